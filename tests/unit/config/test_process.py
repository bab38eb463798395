from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import drivetrain.config
from drivetrain.config import (
    SETTINGS_VARIABLE,
    RunConfig,
    check_accelerator,
    digest,
    flatten,
    layer_from_mapping,
    layer_from_variables,
    resolve,
    resolve_for_process,
    settings_from_text,
    settings_to_text,
    shared_settings,
    strategy_for,
)
from drivetrain.config.schema import CoreConfig
from drivetrain.errors import ConfigError
from drivetrain.strategies.ddp.settings import DDPSettings


@pytest.fixture
def launched() -> dict[str, str]:
    """The variable that `launch` leaves, with values of three kinds."""
    layers = [
        layer_from_mapping({"seed": 3, "mixed_precision": "fp16"}, place="run.yaml line 1"),
        layer_from_variables({"DRIVETRAIN_NON_FINITE": "skip", "DRIVETRAIN_DDP_TIMEOUT": "60"}),
    ]
    return {SETTINGS_VARIABLE: settings_to_text(resolve(layers))}


def for_process(**arguments: Any) -> drivetrain.config.Resolved:
    return resolve_for_process(**{"config_file": None, "variables": {}, "code": {}, "config": None} | arguments)


def test_settings_when_handed_over_then_values_and_sources_are_the_same(launched: dict[str, str]) -> None:
    arrived = resolve([settings_from_text(launched[SETTINGS_VARIABLE])])
    config = arrived.config
    assert (config.seed, config.mixed_precision, config.non_finite) == (3, "fp16", "skip")
    assert config.section(DDPSettings).timeout == 60.0
    sources = {path: str(source) for path, source in arrived.sources.items() if str(source) != "default"}
    assert sources == {
        "seed": "run.yaml line 1",
        "mixed_precision": "run.yaml line 1",
        "non_finite": "variable DRIVETRAIN_NON_FINITE",
        "ddp_config.timeout": "variable DRIVETRAIN_DDP_TIMEOUT",
    }


def test_settings_when_handed_over_then_a_default_is_not_taken_for_a_wish() -> None:
    text = settings_to_text(resolve([layer_from_mapping({"distributed_type": "MULTI_CPU"}, place="run.yaml")]))
    assert resolve([settings_from_text(text)]).config.model_fields_set == {"distributed_type"}


@pytest.mark.parametrize(
    "text", ["seed: 3", "[]", '{"seed": 3}', '{"seed": [3, "x", ""]}', '{"sed": [3, "file", ""]}', "[" * 100_000]
)
def test_settings_when_the_text_is_damaged_then_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=f"unset {SETTINGS_VARIABLE}"):
        settings_from_text(text)


def test_resolve_for_process_when_settings_were_handed_over_then_no_file_or_other_variable_is_read(
    launched: dict[str, str], tmp_path: Path
) -> None:
    variables = {**launched, "DRIVETRAIN_SEED": "9", "DRIVETRAIN_NO_SUCH_THING": "1"}
    absent = str(tmp_path / "absent.yaml")
    config = for_process(config_file=absent, variables=variables, code={"mixed_precision": "no"}).config
    assert (config.seed, config.mixed_precision, config.non_finite) == (3, "no", "skip")


def test_resolve_for_process_when_a_variable_is_for_the_launcher_only_then_a_note_says_so() -> None:
    variables = {"DRIVETRAIN_GPU_IDS": "1", "DRIVETRAIN_SEED": "9"}
    assert for_process(variables=variables).notes == (
        "variable DRIVETRAIN_GPU_IDS has no effect: "
        "only `drivetrain launch` reads it, and it did not start this process",
    )
    text = settings_to_text(resolve([layer_from_variables(variables)]))
    assert for_process(variables={SETTINGS_VARIABLE: text}).notes == ()


def test_resolve_for_process_when_there_is_a_file_then_variables_beat_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 3\nmixed_precision: fp16\n")
    config = for_process(config_file=str(path), variables={"DRIVETRAIN_SEED": "9"}).config
    assert (config.seed, config.mixed_precision) == (9, "fp16")


@pytest.mark.parametrize("form", ["mapping", "path", "model"])
def test_resolve_for_process_when_config_is_given_then_it_stands_for_the_file(
    launched: dict[str, str], tmp_path: Path, form: str
) -> None:
    path = tmp_path / "other.yaml"
    path.write_text("global_batch_size: 8\nnon_finite: ignore\nddp_config: {bucket_cap_mb: 5}\n")
    given = {
        "path": path,
        "mapping": {"global_batch_size": 8, "non_finite": "ignore", "ddp_config": {"bucket_cap_mb": 5}},
        "model": RunConfig(global_batch_size=8, non_finite="ignore", ddp_config=DDPSettings(bucket_cap_mb=5)),
    }[form]
    config = for_process(variables=launched, config=given).config
    assert (config.global_batch_size, config.seed, config.mixed_precision) == (8, None, "no")
    assert config.non_finite == "skip", "a variable that the launcher read is stronger than a file"
    assert config.section(DDPSettings) == DDPSettings(bucket_cap_mb=5, timeout=60.0)


def test_resolve_for_process_when_ranks_are_fewer_than_asked_then_is_an_error() -> None:
    with pytest.raises(ConfigError, match="drivetrain launch"):
        for_process(config={"num_processes": 4}, world_size=1)


def test_digest_when_only_settings_of_one_machine_differ_then_is_equal() -> None:
    base = resolve([]).config
    assert digest(base) == digest(RunConfig(machine_rank=1, gpu_ids="0", log_dir="x", max_restarts=3))
    for path, value in {"seed": 3, "mixed_precision": "bf16", "ddp_config": {"bucket_cap_mb": 3}}.items():
        assert digest(base) != digest(RunConfig(**{path: value}))
    assert "machine_rank" in flatten(base)
    assert "machine_rank" not in shared_settings(base)
    assert json.loads(json.dumps(flatten(base))) == flatten(base)


@pytest.mark.parametrize(
    ("settings", "world_size", "name"),
    [
        ({}, 1, "single"),
        ({}, 2, "ddp"),
        ({"distributed_type": "NO"}, 1, "single"),
        ({"distributed_type": "MULTI_CPU"}, 1, "ddp"),
        ({"distributed_type": "MULTI_GPU"}, 4, "ddp"),
    ],
)
def test_strategy_for_when_the_world_is_known_then_is_the_one_that_serves_it(
    settings: dict[str, Any], world_size: int, name: str
) -> None:
    assert strategy_for(RunConfig(**settings), world_size=world_size).name == name


def test_strategy_for_when_no_distribution_meets_two_ranks_then_is_an_error() -> None:
    with pytest.raises(ConfigError, match="this run has 2"):
        strategy_for(RunConfig(distributed_type="NO"), world_size=2)


def test_check_accelerator_when_the_type_needs_one_and_none_is_there_then_is_an_error() -> None:
    layers = [layer_from_mapping({"distributed_type": "MULTI_GPU"}, place="run.yaml line 1")]
    resolved = resolve(layers)
    with pytest.raises(ConfigError) as caught:
        check_accelerator(resolved.config, count=0, source=resolved.sources["distributed_type"])
    (problem,) = caught.value.problems
    assert (problem.path, problem.value, problem.source) == ("distributed_type", "MULTI_GPU", "run.yaml line 1")
    check_accelerator(resolved.config, count=1)
    for settings in ({}, {"distributed_type": "MULTI_CPU"}, {"distributed_type": "NO"}):
        check_accelerator(RunConfig(**settings), count=0)


def test_run_config_when_pickled_then_is_the_same() -> None:
    config = RunConfig(seed=3, ddp_config=DDPSettings(timeout=5.0))
    assert pickle.loads(pickle.dumps(config)) == config
    assert isinstance(config, CoreConfig)


def test_core_config_when_made_directly_then_refuses() -> None:
    with pytest.raises(TypeError, match="RunConfig"):
        CoreConfig()


def test_section_when_no_strategy_has_it_then_refuses() -> None:
    class Foreign(drivetrain.config.Section):
        pass

    with pytest.raises(TypeError, match="Foreign"):
        resolve([]).config.section(Foreign)


def test_package_when_a_name_is_unknown_then_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        drivetrain.config.Nothing  # noqa: B018
