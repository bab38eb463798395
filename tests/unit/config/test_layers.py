from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.config import (
    Flag,
    Layer,
    flags,
    layer_from_code,
    layer_from_flags,
    layer_from_mapping,
    layer_from_variables,
    read_file,
    resolve,
)
from drivetrain.config.layers import OWN_VARIABLES
from drivetrain.config.migrate import DROPPED
from drivetrain.strategies.ddp.settings import DDPSettings


def from_text(tmp_path: Path, text: str) -> Layer:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return read_file(path)


def flag(path: str) -> Flag:
    return next(flag for flag in flags() if flag.path == path)


def raws(layer: Layer) -> dict[str, object]:
    return {path: value.raw for path, value in layer.items()}


def test_read_file_when_keys_are_known_then_keeps_line_and_spelling(tmp_path: Path) -> None:
    layer = from_text(tmp_path, "seed: 3\nddp_config:\n  timeout: 60\n  ddp_bucket_cap_mb: 10\n")
    assert raws(layer) == {"seed": 3, "ddp_config.timeout": 60, "ddp_config.bucket_cap_mb": 10}
    assert layer["ddp_config.bucket_cap_mb"].written == "ddp_config.ddp_bucket_cap_mb"
    assert str(layer["ddp_config.bucket_cap_mb"].source) == f"{tmp_path / 'run.yaml'} line 4"


def test_read_file_when_both_spellings_are_given_then_is_a_problem_with_both_lines(tmp_path: Path) -> None:
    (problem,) = from_text(tmp_path, "ddp_config:\n  ddp_timeout: 60\n  timeout: 60\n").problems
    assert problem.source is not None
    assert problem.source.endswith("line 3")
    assert "line 2 gives it too as `ddp_config.ddp_timeout`: 60" in problem.message


def test_read_file_when_a_key_repeats_then_every_repeat_is_a_problem(tmp_path: Path) -> None:
    problems = from_text(tmp_path, "seed: 1\nseed: 2\nseed: 1\n").problems
    assert [problem.source and problem.source[-6:] for problem in problems] == ["line 2", "line 3"]
    assert all("line 1 gives it too: 1" in problem.message for problem in problems)


@pytest.mark.parametrize(
    ("text", "path", "hint"),
    [
        ("gradient_acumulation: 4", "gradient_acumulation", "did you mean `gradient_accumulation_steps`?"),
        ("Num_Processes: 4", "Num_Processes", "did you mean `num_processes`?"),
        ("ddp_conf: {}", "ddp_conf", "did you mean `ddp_config`?"),
        ("ddp_timeout: 4", "ddp_timeout", "it belongs under `ddp_config`"),
        ("ddp_config: {bucket_cap: 4}", "ddp_config.bucket_cap", "did you mean `bucket_cap_mb`?"),
        ("ddp_config: {ddp_bucket_cap: 4}", "ddp_config.ddp_bucket_cap", "did you mean `ddp_bucket_cap_mb`?"),
        ("qqqqqq: 4", "qqqqqq", None),
    ],
)
def test_read_file_when_a_key_is_unknown_then_the_nearest_name_is_the_hint(
    tmp_path: Path, text: str, path: str, hint: str | None
) -> None:
    (problem,) = from_text(tmp_path, text).problems
    assert (problem.path, problem.hint) == (path, hint)


def test_read_file_when_a_section_is_a_value_then_is_a_problem(tmp_path: Path) -> None:
    (problem,) = from_text(tmp_path, "ddp_config: 3").problems
    assert "section" in problem.message


@pytest.mark.parametrize("text", ["ddp_config:", "ddp_config: {}", "seed:", "main_process_ip: null"])
def test_read_file_when_a_key_is_empty_then_it_says_nothing(tmp_path: Path, text: str) -> None:
    layer = from_text(tmp_path, text)
    assert (raws(layer), layer.problems) == ({}, ())


ACCELERATE_FILE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_CPU
downcast_bf16: 'no'
dynamo_config: {}
enable_cpu_affinity: false
fsdp_config: {}
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""


def test_read_file_when_accelerate_wrote_it_then_neutral_keys_are_dropped(tmp_path: Path) -> None:
    layer = from_text(tmp_path, ACCELERATE_FILE)
    assert layer.problems == ()
    assert layer.notes == ()
    config = resolve([layer]).config
    assert (config.distributed_type, config.num_processes, config.wants_cpu) == ("MULTI_CPU", 2, True)


@pytest.mark.parametrize("key", sorted(DROPPED))
def test_read_file_when_a_foreign_key_says_something_then_is_refused_by_name(tmp_path: Path, key: str) -> None:
    (problem,) = from_text(tmp_path, f"{key}: {{x: 1}}").problems
    assert (problem.path, problem.message) == (key, DROPPED[key].reason)
    assert from_text(tmp_path, f"{key}: {{}}").problems == ()


@pytest.mark.parametrize(
    "text",
    [
        "ipex_config: {ipex: false, use_xpu: false}",
        "dynamo_config: {dynamo_backend: 'NO'}",
        "fsdp_config: {}",
        "deepspeed_plugin: null",
        "device_placement: true",
    ],
)
def test_read_file_when_a_foreign_value_means_not_used_then_is_dropped(tmp_path: Path, text: str) -> None:
    layer = from_text(tmp_path, text)
    assert (raws(layer), layer.problems) == ({}, ())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("fsdp_plugin", object(), "there are no plug-ins"),
        ("fsdp_offload_params", True, "keeping parameters on the CPU is not there yet"),
        ("deepspeed_plugin", object(), "DeepSpeed is not there yet"),
        ("device_placement", False, "`prepare` always moves"),
        ("gradient_accumulation_plugin", object(), "here this is `gradient_accumulation_steps`"),
        ("debug", True, "here this is `check_collectives`"),
    ],
)
def test_layer_from_code_when_only_accelerate_has_an_argument_then_is_refused_by_name(
    name: str, value: object, message: str
) -> None:
    (problem,) = layer_from_code({name: value}).problems
    assert (problem.path, problem.source) == (name, f"Accelerator({name}=...)")
    assert problem.message.startswith(message)
    assert "did you mean" not in (problem.hint or "")
    assert layer_from_code({name: None}).problems == ()


def test_layer_from_variables_when_only_accelerate_has_the_setting_then_is_refused_by_name() -> None:
    (problem,) = layer_from_variables({"DRIVETRAIN_USE_DEEPSPEED": "true"}).problems
    assert (problem.path, problem.message) == ("DRIVETRAIN_USE_DEEPSPEED", "DeepSpeed is not there yet")


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [("fp16: true", "mixed_precision", "fp16"), ("debug: true", "check_collectives", "always")],
)
def test_read_file_when_a_key_is_legacy_then_is_translated_with_a_note(
    tmp_path: Path, text: str, path: str, value: str
) -> None:
    layer = from_text(tmp_path, text)
    assert raws(layer) == {path: value}
    assert layer.notes == (f"{tmp_path / 'run.yaml'} line 1: `{text}` is read as `{path}: {value}`",)


def test_read_file_when_legacy_key_is_false_then_says_nothing(tmp_path: Path) -> None:
    layer = from_text(tmp_path, "fp16: false\ndebug: false\n")
    assert (raws(layer), layer.notes, layer.problems) == ({}, (), ())


def test_read_file_when_legacy_and_present_key_are_given_then_is_a_problem_with_both(tmp_path: Path) -> None:
    (problem,) = from_text(tmp_path, "mixed_precision: bf16\nfp16: true\n").problems
    assert (problem.path, problem.value) == ("fp16", "true")
    assert "line 1 gives it too as `mixed_precision`: bf16" in problem.message


def test_layer_from_variables_when_names_are_known_then_takes_the_text() -> None:
    layer = layer_from_variables(
        {"DRIVETRAIN_SEED": "3", "DRIVETRAIN_DDP_BUCKET_CAP_MB": "10", "DRIVETRAIN_USE_CPU": "", "HOME": "/"}
    )
    assert raws(layer) == {"seed": "3", "ddp_config.bucket_cap_mb": "10"}
    assert str(layer["seed"].source) == "variable DRIVETRAIN_SEED"
    assert layer.problems == ()


def test_layer_from_variables_when_a_name_is_unknown_then_the_nearest_is_the_hint() -> None:
    own = dict.fromkeys(OWN_VARIABLES, "x")
    (problem,) = layer_from_variables({"DRIVETRAIN_MIXED_PRECISON": "no", **own}).problems
    assert problem.path == "DRIVETRAIN_MIXED_PRECISON"
    assert problem.hint == "did you mean `DRIVETRAIN_MIXED_PRECISION`?"


def test_layer_from_flags_when_typed_then_the_source_has_the_spelling() -> None:
    layer = layer_from_flags([(flag("use_cpu"), "--cpu", "true"), (flag("ddp_config.timeout"), "--ddp-timeout", "3")])
    assert raws(layer) == {"use_cpu": "true", "ddp_config.timeout": "3"}
    assert [str(value.source) for value in layer.values()] == ["flag --cpu", "flag --ddp-timeout"]


def test_layer_from_flags_when_typed_twice_then_only_different_values_are_a_problem() -> None:
    seed = flag("seed")
    assert layer_from_flags([(seed, "--seed", "3"), (seed, "--seed", "3")]).problems == ()
    (problem,) = layer_from_flags([(seed, "--seed", "3"), (seed, "--seed", "4")]).problems
    assert (problem.value, problem.message) == ("4", "flag --seed says 3")


@pytest.mark.parametrize("section", [DDPSettings(timeout=60.0), {"timeout": 60.0}, {"ddp_timeout": 60.0}])
def test_layer_from_code_when_a_section_is_given_then_only_what_was_set_counts(section: object) -> None:
    layer = layer_from_code({"cpu": True, "seed": None, "ddp_config": section})
    assert raws(layer) == {"use_cpu": True, "ddp_config.timeout": 60.0}
    assert [str(value.source) for value in layer.values()] == ["Accelerator(cpu=...)", "Accelerator(ddp_config=...)"]


def test_layer_from_code_when_argument_is_legacy_or_unknown_then_is_a_problem() -> None:
    layer = layer_from_code({"fp16": True, "ddp_config": {"bucket": 3}}, call="Trainer")
    assert [(problem.path, problem.source) for problem in layer.problems] == [
        ("fp16", "Trainer(fp16=...)"),
        ("ddp_config.bucket", "Trainer(ddp_config=...)"),
    ]


def test_layer_from_mapping_when_given_then_has_the_rank_of_a_file() -> None:
    layer = layer_from_mapping({"seed": 3, "fp16": True}, place="Accelerator(config=...)")
    assert raws(layer) == {"seed": 3, "mixed_precision": "fp16"}
    assert layer["seed"].source.kind == "file"
