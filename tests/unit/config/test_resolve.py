from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from drivetrain.config import (
    Flag,
    Layer,
    Source,
    Value,
    flags,
    flatten,
    layer_from_code,
    layer_from_flags,
    layer_from_mapping,
    layer_from_variables,
    read_file,
    resolve,
)
from drivetrain.errors import ConfigError


def file(**settings: object) -> Layer:
    return layer_from_mapping(settings, place="run.yaml")


def typed(spellings: Mapping[str, str]) -> Layer:
    table: dict[str, Flag] = {name: flag for flag in flags() for name in (*flag.names, *flag.aliases)}
    return layer_from_flags([(table[spelling], spelling, text) for spelling, text in spellings.items()])


def problem_of(*layers: Mapping[str, Value], **world: int) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(layers, **world)
    assert len(caught.value.problems) == 1
    return str(caught.value.problems[0])


def test_resolve_when_four_sources_speak_then_code_beats_flag_beats_variable_beats_file() -> None:
    layers = [
        layer_from_mapping(
            {"mixed_precision": "bf16", "num_processes": 2, "gradient_accumulation_steps": 4}, place="run.yaml"
        ),
        layer_from_variables({"DRIVETRAIN_MIXED_PRECISION": "fp16"}),
        typed({"--mixed_precision": "no"}),
        layer_from_code({"gradient_accumulation_steps": 1}),
    ]
    for order in itertools.permutations(layers):
        resolved = resolve(order)
        config = resolved.config
        assert (config.mixed_precision, config.num_processes, config.gradient_accumulation_steps) == ("no", 2, 1)
        assert str(resolved.sources["mixed_precision"]) == "flag --mixed_precision"
        assert str(resolved.sources["num_processes"]) == "run.yaml"
        assert str(resolved.sources["gradient_accumulation_steps"]) == "Accelerator(gradient_accumulation_steps=...)"
        assert str(resolved.sources["seed"]) == "default"
        assert resolved.notes == ()
    # Through torchrun there is no flag.
    assert resolve([*layers[:2], layers[3]]).config.mixed_precision == "fp16"


def test_resolve_when_two_layers_are_of_one_kind_then_the_later_wins() -> None:
    assert resolve([file(seed=1), file(seed=2)]).config.seed == 2


def test_resolve_when_nothing_is_said_then_every_setting_is_default() -> None:
    resolved = resolve([])
    assert set(resolved.sources) == set(flatten(resolved.config))
    assert {str(source) for source in resolved.sources.values()} == {"default"}


def test_resolve_when_a_flag_or_variable_loses_to_code_then_notes_say_so() -> None:
    notes = resolve(
        [
            layer_from_code({"mixed_precision": "bf16", "seed": 3, "global_batch_size": 8}),
            typed({"--mixed-precision": "no"}),
            layer_from_variables({"DRIVETRAIN_SEED": "4"}),
            file(global_batch_size=4),
        ]
    ).notes
    assert notes == (
        "`mixed_precision` is bf16 (Accelerator(mixed_precision=...)); no (flag --mixed-precision) has no effect, "
        "as code comes first",
        "`seed` is 3 (Accelerator(seed=...)); 4 (variable DRIVETRAIN_SEED) has no effect, as code comes first",
    )


def test_resolve_when_flag_and_code_agree_then_there_is_no_note() -> None:
    assert resolve([layer_from_code({"seed": 3, "cpu": True}), typed({"--seed": "3", "--cpu": "yes"})]).notes == ()


def test_resolve_when_there_are_many_faults_then_one_error_names_all(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "gradient_acumulation: 4\n"
        "num_processes: 2.0\n"
        "num_machines: true\n"
        "seed: 1\n"
        "seed: 2\n"
        "ddp_config:\n"
        "  bucket_cap_mb: 0\n"
        "  ddp_timeout: .inf\n"
        "gpu_ids: 0\n"
    )
    with pytest.raises(ConfigError) as caught:
        resolve(
            [
                read_file(path),
                layer_from_variables({"DRIVETRAIN_MAX_RESTARTS": "often", "DRIVETRAIN_SED": "1"}),
                typed({"--mixed_precision": "bf61", "--cpu": "true"}),
                layer_from_code({"non_finite": "explode"}),
            ]
        )
    found = [(problem.path, problem.source) for problem in caught.value.problems]
    assert found == [
        ("DRIVETRAIN_SED", "environment"),
        ("ddp_config.bucket_cap_mb", f"{path} line 7"),
        ("ddp_config.ddp_timeout", f"{path} line 8"),
        ("gpu_ids", f"{path} line 9"),
        ("gradient_acumulation", f"{path} line 1"),
        ("max_restarts", "variable DRIVETRAIN_MAX_RESTARTS"),
        ("mixed_precision", "flag --mixed_precision"),
        ("non_finite", "Accelerator(non_finite=...)"),
        ("num_machines", f"{path} line 3"),
        ("num_processes", f"{path} line 2"),
        ("seed", f"{path} line 5"),
    ]


def test_resolve_when_a_value_is_faulty_then_rules_about_it_are_silent() -> None:
    # With the default of one machine, this rank would be a second problem.
    message = problem_of(file(machine_rank=1, num_machines="two"))
    assert message.startswith("  num_machines = two (run.yaml)")


def test_resolve_when_a_bad_value_is_overruled_then_it_does_not_matter() -> None:
    assert resolve([file(seed="x"), typed({"--seed": "3"})]).config.seed == 3


def test_error_when_printed_then_shows_value_source_and_hint() -> None:
    layer = file(mixed_precision="bf61")
    with pytest.raises(ConfigError) as caught:
        resolve([layer])
    assert str(caught.value) == (
        "1 problem in the configuration\n"
        "  mixed_precision = bf61 (run.yaml)\n"
        "    allowed: `no`, `fp16` or `bf16`\n"
        "    hint: did you mean `bf16`?"
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_processes": 0}, "must be more than 0"),
        ({"max_restarts": -1}, "must be at least 0"),
        ({"main_process_port": 65536}, "must be at most 65535"),
        ({"seed": 2**32}, f"must be less than {2**32}"),
        ({"monitor_interval": float("inf")}, "must be finite"),
        ({"monitor_interval": float("nan")}, "must be"),
        ({"project_dir": ""}, "must not be empty"),
    ],
)
def test_resolve_when_a_value_is_out_of_bounds_then_names_the_bound(settings: dict[str, object], words: str) -> None:
    assert words in problem_of(file(**settings))


def test_resolve_when_port_is_0_then_is_unset() -> None:
    assert resolve([file(main_process_port=0)]).config.main_process_port is None


@pytest.mark.parametrize(
    ("settings", "flags_typed", "shown"),
    [
        pytest.param(
            {"num_machines": 3, "main_process_ip": "a", "main_process_port": 1},
            {"--num_processes": "4"},
            ["num_processes = 4 (flag --num_processes)", "`num_machines = 3` (run.yaml)"],
            id="machines-do-not-divide",
        ),
        pytest.param(
            {"num_machines": 2, "main_process_ip": "a", "main_process_port": 1},
            {"--machine_rank": "2"},
            ["machine_rank = 2 (flag --machine_rank)", "`num_machines = 2` (run.yaml)", "0 to 1"],
            id="machine-rank",
        ),
        pytest.param({"machine_rank": 1}, {}, ["machine_rank = 1 (run.yaml)", "0 to 0"], id="one-machine"),
        pytest.param(
            {"num_machines": 2, "num_processes": 2},
            {},
            ["num_machines = 2 (run.yaml)", "main_process_ip and main_process_port"],
            id="no-address",
        ),
        pytest.param(
            {"gpu_ids": "0,1"},
            {"--cpu": "true"},
            ["gpu_ids = 0,1 (run.yaml)", "`use_cpu = true` (flag --cpu)"],
            id="devices-on-the-cpu",
        ),
        pytest.param(
            {"distributed_type": "MULTI_CPU"},
            {"--gpu_ids": "0"},
            ["gpu_ids = 0 (flag --gpu_ids)", "`distributed_type = MULTI_CPU` (run.yaml)"],
            id="devices-with-multi-cpu",
        ),
        pytest.param(
            {"ddp_config": {"ddp_backend": "nccl"}},
            {"--cpu": "true"},
            ["ddp_config.ddp_backend = nccl (run.yaml)", "`use_cpu = true` (flag --cpu)"],
            id="nccl-on-the-cpu",
        ),
        pytest.param(
            {"ddp_config": {"backend": "nccl"}, "distributed_type": "MULTI_CPU"},
            {},
            ["ddp_config.backend = nccl (run.yaml)", "`distributed_type = MULTI_CPU` (run.yaml)"],
            id="nccl-with-multi-cpu",
        ),
        pytest.param(
            {"distributed_type": "MULTI_GPU"},
            {"--cpu": "true"},
            ["distributed_type = MULTI_GPU (run.yaml)", "`use_cpu = true` (flag --cpu)"],
            id="multi-gpu-on-the-cpu",
        ),
        pytest.param(
            {"distributed_type": "MULTI_CPU", "use_cpu": False},
            {},
            ["distributed_type = MULTI_CPU (run.yaml)", "`use_cpu = false` (run.yaml)"],
            id="multi-cpu-denied",
        ),
        pytest.param(
            {"distributed_type": "NO"},
            {"--num_processes": "2"},
            ["distributed_type = NO (run.yaml)", "`num_processes = 2` (flag --num_processes)"],
            id="no-with-two-processes",
        ),
    ],
)
def test_resolve_when_settings_contradict_then_names_both_sources(
    settings: dict[str, object], flags_typed: dict[str, str], shown: list[str]
) -> None:
    message = problem_of(file(**settings), typed(flags_typed))
    for text in shown:
        assert text in message


@pytest.mark.parametrize(
    "settings",
    [
        {"gpu_ids": "all", "use_cpu": True},
        {"gpu_ids": "ALL", "distributed_type": "MULTI_CPU"},
        {"distributed_type": "MULTI_CPU"},
        {"distributed_type": "MULTI_CPU", "use_cpu": True, "ddp_config": {"backend": "gloo"}},
        {"distributed_type": "NO", "num_processes": 1},
        {"gradient_accumulation_steps": 2, "global_batch_size": 8},
        {"num_machines": 2, "num_processes": 4, "machine_rank": 1, "main_process_ip": "a", "main_process_port": 1},
    ],
)
def test_resolve_when_settings_agree_then_there_is_no_problem(settings: dict[str, object]) -> None:
    assert set(settings) <= resolve([file(**settings)]).config.model_fields_set


def test_resolve_when_ranks_run_already_then_num_processes_must_be_their_number() -> None:
    assert resolve([file(num_processes=2)], world_size=2).config.num_processes == 2
    with pytest.raises(ConfigError) as caught:
        resolve([file(num_processes=4)], world_size=2, world_source="WORLD_SIZE")
    assert "num_processes = 4 (run.yaml)\n    this run has 2 ranks (WORLD_SIZE)" in str(caught.value)
    assert "drivetrain launch" in problem_of(file(num_processes=4), world_size=1)


def test_resolve_when_ranks_run_already_then_machines_need_no_address() -> None:
    resolve([file(num_machines=2, num_processes=2)], world_size=2)


def test_resolve_when_a_plain_mapping_is_a_layer_then_takes_it() -> None:
    value = Value(raw="3", source=Source(kind="flag", place="--seed"), written="seed")
    assert resolve([{"seed": value}]).config.seed == 3


def test_config_when_written_to_then_refuses() -> None:
    config = resolve([]).config
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]


def test_resolve_when_a_typical_file_is_read_then_takes_less_than_50_ms(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in (("seed", 3), ("num_processes", 2))) + "# x\n" * 30)
    resolve([read_file(path)])
    times = []
    for _ in range(5):
        start = time.perf_counter()
        resolve([read_file(path)])
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05
