"""How sharding is chosen, and what of Accelerate's `fsdp_config` is taken, dropped or refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from drivetrain.cli import launch
from drivetrain.cli.arguments import split
from drivetrain.cli.main import main
from drivetrain.config import (
    SETTINGS_VARIABLE,
    Layer,
    Resolved,
    flags,
    layer_from_code,
    layer_from_flags,
    layer_from_variables,
    read_file,
    resolve,
    resolve_for_process,
    settings_to_text,
    strategy_for,
)
from drivetrain.errors import ConfigError, Problem
from drivetrain.strategies.fsdp.settings import SPEC, FSDPSettings

SECTION = "fsdp_config: {reshard_after_forward: false}\n"


def typed(line: str) -> Layer:
    """Return what flags in front of a script say."""
    return layer_from_flags(split([*line.split(), "train.py"], flags=flags()).typed)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for files, which is the current one, so that sources are short."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def from_text(text: str) -> Layer:
    Path("run.yaml").write_text(text)
    return read_file("run.yaml")


def chosen(*layers: Mapping[str, object]) -> tuple[str | None, str]:
    """Return the distributed type that layers make, and what says so."""
    resolved = resolve(layers)  # type: ignore[arg-type]
    return resolved.config.distributed_type, str(resolved.sources["distributed_type"])


def problems_of(*layers: Layer) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve(layers)
    return caught.value.problems


def units_of(layer: Layer) -> tuple[str, ...]:
    return resolve([layer]).config.section(FSDPSettings).unit_names


# By name


@pytest.mark.parametrize(
    ("line", "source"),
    [
        ("--use_fsdp", "flag --use_fsdp"),
        ("--use-fsdp", "flag --use-fsdp"),
        ("--use_fsdp=true", "flag --use_fsdp"),
        ("--use_fsdp yes", "flag --use_fsdp"),
        ("--distributed_type FSDP", "flag --distributed_type"),
    ],
)
def test_flag_when_it_chooses_then_it_is_the_source(line: str, source: str) -> None:
    assert chosen(typed(line)) == ("FSDP", source)


@pytest.mark.parametrize("line", ["--use_fsdp=false", "--use-fsdp no", "--use_fsdp 0"])
def test_flag_when_false_and_alone_then_nothing_is_chosen(line: str) -> None:
    assert chosen(typed(line)) == (None, "default")


def test_flag_when_neither_true_nor_false_then_is_a_problem() -> None:
    (problem,) = problems_of(typed("--use_fsdp=maybe"))
    assert (problem.path, problem.value, problem.source) == ("use_fsdp", "maybe", "flag --use_fsdp")
    assert problem.message == "`maybe` is neither `true` nor `false`"


@pytest.mark.parametrize("line", ["--use_fsdp --use_fsdp=false", "--use-fsdp=no --use_fsdp"])
def test_flag_when_typed_twice_and_otherwise_then_is_a_problem(line: str) -> None:
    (problem,) = problems_of(typed(line))
    assert problem.hint == "give the flag once"


@pytest.mark.parametrize("value", ["true", "'true'", '"yes"', "True"])
def test_file_when_it_chooses_then_its_line_is_the_source(written: Path, value: str) -> None:
    assert chosen(from_text(f"seed: 1\nuse_fsdp: {value}\n")) == ("FSDP", "run.yaml line 2")


@pytest.mark.parametrize("value", ["false", "'false'", "'no'", "null", ""])
def test_file_when_false_or_empty_then_nothing_is_chosen(written: Path, value: str) -> None:
    assert chosen(from_text(f"use_fsdp: {value}\n")) == (None, "default")


@pytest.mark.parametrize("value", ["maybe", "1", "0", "[]", "{}", "''", "2.0"])
def test_file_when_neither_true_nor_false_then_is_a_problem(written: Path, value: str) -> None:
    (problem,) = problems_of(from_text(f"use_fsdp: {value}\n"))
    assert (problem.path, problem.source) == ("use_fsdp", "run.yaml line 1")
    assert problem.message.endswith("is neither `true` nor `false`")


def test_code_when_it_chooses_then_the_argument_is_the_source() -> None:
    assert chosen(layer_from_code({"use_fsdp": True})) == ("FSDP", "Accelerator(use_fsdp=...)")
    assert chosen(layer_from_code({"use_fsdp": False})) == (None, "default")
    assert chosen(layer_from_code({"use_fsdp": None})) == (None, "default")


@pytest.mark.parametrize(("value", "hint"), [("true", "write it without quotes"), ("maybe", None), (1, None)])
def test_code_when_it_is_no_bool_then_is_a_problem(value: object, hint: str | None) -> None:
    (problem,) = problems_of(layer_from_code({"use_fsdp": value}))
    assert (problem.path, problem.source, problem.hint) == ("use_fsdp", "Accelerator(use_fsdp=...)", hint)


@pytest.mark.parametrize("text", ["true", "1", " TRUE ", "on"])
def test_variable_when_it_chooses_then_it_is_the_source(text: str) -> None:
    assert chosen(layer_from_variables({"DRIVETRAIN_USE_FSDP": text})) == ("FSDP", "variable DRIVETRAIN_USE_FSDP")


@pytest.mark.parametrize("text", ["", "false", "0"])
def test_variable_when_false_or_empty_then_nothing_is_chosen(text: str) -> None:
    assert chosen(layer_from_variables({"DRIVETRAIN_USE_FSDP": text})) == (None, "default")


def test_variable_when_neither_true_nor_false_then_is_a_problem() -> None:
    (problem,) = problems_of(layer_from_variables({"DRIVETRAIN_USE_FSDP": "maybe"}))
    assert (problem.path, problem.source) == ("use_fsdp", "variable DRIVETRAIN_USE_FSDP")


def test_chooser_when_misspelled_then_its_name_is_the_hint(written: Path) -> None:
    (in_file,) = from_text("use_fdsp: true\n").problems
    (in_variable,) = layer_from_variables({"DRIVETRAIN_USE_FDSP": "1"}).problems
    assert (in_file.hint, in_variable.hint) == ("did you mean `use_fsdp`?", "did you mean `DRIVETRAIN_USE_FSDP`?")


# Against each other


@pytest.mark.parametrize("weaker", ["use_fsdp: true\n", "distributed_type: FSDP\n", SECTION])
@pytest.mark.parametrize(
    "stronger", [typed("--use_fsdp=false"), layer_from_variables({"DRIVETRAIN_USE_FSDP": "false"})]
)
def test_false_when_a_weaker_place_chooses_then_takes_it_back(written: Path, weaker: str, stronger: Layer) -> None:
    assert chosen(from_text(weaker), stronger) == (None, "default")


def test_false_when_a_stronger_place_chooses_then_it_loses() -> None:
    variable = layer_from_variables({"DRIVETRAIN_USE_FSDP": "false"})
    assert chosen(variable, typed("--use_fsdp")) == ("FSDP", "flag --use_fsdp")
    assert chosen(variable, typed("--distributed_type=FSDP")) == ("FSDP", "flag --distributed_type")


def test_flag_when_the_file_names_another_type_then_the_flag_wins(written: Path) -> None:
    assert chosen(from_text("distributed_type: MULTI_CPU\n"), typed("--use_fsdp")) == ("FSDP", "flag --use_fsdp")
    assert chosen(from_text("use_fsdp: true\n"), typed("--distributed_type MULTI_CPU")) == (
        "MULTI_CPU",
        "flag --distributed_type",
    )


def test_false_when_another_strategy_is_chosen_then_that_one_stays(written: Path) -> None:
    assert chosen(from_text("distributed_type: MULTI_CPU\n"), typed("--use_fsdp=no"))[0] == "MULTI_CPU"


def test_flag_when_code_says_otherwise_then_code_wins_and_it_is_said() -> None:
    resolved = resolve([typed("--use_fsdp=false"), layer_from_code({"use_fsdp": True})])
    assert resolved.config.distributed_type == "FSDP"
    assert resolved.notes == (
        "`use_fsdp` is true (Accelerator(use_fsdp=...)); false (flag --use_fsdp) has no effect, as code comes first",
    )
    resolved = resolve([typed("--use_fsdp"), layer_from_code({"distributed_type": "MULTI_CPU"})])
    assert resolved.config.distributed_type == "MULTI_CPU"
    assert resolved.notes == (
        "`distributed_type` is MULTI_CPU (Accelerator(distributed_type=...)); "
        "FSDP (flag --use_fsdp) has no effect, as code comes first",
    )


@pytest.mark.parametrize(
    "layer",
    [
        typed("--use_fsdp --distributed_type MULTI_CPU"),
        typed("--use_fsdp=false --distributed_type FSDP"),
        layer_from_variables({"DRIVETRAIN_USE_FSDP": "1", "DRIVETRAIN_DISTRIBUTED_TYPE": "NO"}),
        layer_from_code({"use_fsdp": True, "distributed_type": "MULTI_GPU"}),
    ],
)
def test_place_when_it_contradicts_itself_then_both_are_named(layer: Layer) -> None:
    (problem,) = problems_of(layer)
    other = layer["distributed_type"]
    assert problem.path == "use_fsdp"
    assert problem.message == f"`distributed_type = {other.raw}` ({other.source}) says otherwise"
    assert problem.hint == "keep one of them"


def test_place_when_it_says_one_thing_twice_then_all_is_well(written: Path) -> None:
    assert chosen(from_text("use_fsdp: true\ndistributed_type: FSDP\n"))[0] == "FSDP"
    assert chosen(from_text("use_fsdp: false\ndistributed_type: MULTI_CPU\n"))[0] == "MULTI_CPU"


# By a section


def test_section_when_nothing_else_is_said_then_it_chooses(written: Path) -> None:
    assert chosen(from_text(f"seed: 1\n{SECTION}")) == ("FSDP", "run.yaml line 2")
    assert chosen(typed("--fsdp-reshard-after-forward false")) == ("FSDP", "flag --fsdp-reshard-after-forward")
    variable = layer_from_variables({"DRIVETRAIN_FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "Block"})
    assert chosen(variable) == ("FSDP", "variable DRIVETRAIN_FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP")
    for section in ({"reshard_after_forward": False}, FSDPSettings(reshard_after_forward=False)):
        assert chosen(layer_from_code({"fsdp_config": section})) == ("FSDP", "Accelerator(fsdp_config=...)")


@pytest.mark.parametrize("turned", [1, -1])
def test_section_when_several_places_have_it_then_the_strongest_is_the_source(written: Path, turned: int) -> None:
    layers = [from_text(SECTION), typed("--fsdp_auto_wrap_policy NO_WRAP")][::turned]
    assert chosen(*layers) == ("FSDP", "flag --fsdp_auto_wrap_policy")


@pytest.mark.parametrize("section", ["{}", "", "{fsdp_offload_params: false, fsdp_cpu_ram_efficient_loading: true}"])
def test_section_when_it_says_nothing_then_it_does_not_choose(written: Path, section: str) -> None:
    assert chosen(from_text(f"fsdp_config: {section}\n")) == (None, "default")


def test_section_when_a_type_is_named_then_it_is_left_over_and_kept(written: Path) -> None:
    resolved = resolve([from_text(f"distributed_type: MULTI_CPU\n{SECTION}")])
    assert strategy_for(resolved.config, world_size=2).name == "ddp"
    assert not resolved.config.section(FSDPSettings).reshard_after_forward
    assert resolved.notes == ()


def test_section_when_code_names_a_type_then_it_is_left_over_and_nothing_is_said() -> None:
    resolved = resolve([typed("--fsdp_auto_wrap_policy NO_WRAP"), layer_from_code({"distributed_type": "MULTI_CPU"})])
    assert (resolved.config.distributed_type, resolved.notes) == ("MULTI_CPU", ())


def test_section_when_the_same_file_says_false_then_it_is_left_over(written: Path) -> None:
    assert chosen(from_text(f"use_fsdp: false\n{SECTION}")) == (None, "default")


@pytest.mark.parametrize("code", [{}, {"fsdp_config": {"version": 2}}])
def test_section_when_launch_was_told_false_then_ranks_do_not_choose_again(
    written: Path, code: dict[str, object]
) -> None:
    launched = settings_to_text(resolve([from_text(SECTION), typed("--use_fsdp=false")]))
    assert in_a_rank(launched, code).config.distributed_type is None


def test_flag_when_ranks_read_it_then_it_is_still_the_source() -> None:
    arrived = in_a_rank(settings_to_text(resolve([typed("--use-fsdp")])), {})
    assert arrived.config.distributed_type == "FSDP"
    assert str(arrived.sources["distributed_type"]) == "flag --use-fsdp"


def in_a_rank(launched: str, code: dict[str, object]) -> Resolved:
    return resolve_for_process(config_file=None, variables={SETTINGS_VARIABLE: launched}, code=code, config=None)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_strategy_when_chosen_by_name_then_serves_any_number_of_ranks(world_size: int) -> None:
    config = resolve([typed("--use_fsdp")], world_size=world_size).config
    assert strategy_for(config, world_size=world_size).name == "fsdp"


# Keys and values of the section


@pytest.mark.parametrize(
    "text", ["[Encoder, Decoder]", "Encoder,Decoder", "' Encoder , Decoder,'", "\n    - Encoder\n    - Decoder"]
)
def test_classes_when_listed_in_a_file_then_all_are_units(written: Path, text: str) -> None:
    layer = from_text(f"fsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: {text}\n")
    assert units_of(layer) == ("Encoder", "Decoder")


@pytest.mark.parametrize("classes", [["Encoder", "Decoder"], ("Encoder", "Decoder"), "Encoder,Decoder"])
def test_classes_when_listed_in_code_then_all_are_units(classes: object) -> None:
    layer = layer_from_code({"fsdp_config": {"transformer_layer_cls_to_wrap": classes}})
    assert units_of(layer) == ("Encoder", "Decoder")


@pytest.mark.parametrize("text", ["[]", "''", "' , '"])
def test_classes_when_there_are_none_then_the_units_are_found(written: Path, text: str) -> None:
    assert units_of(from_text(f"fsdp_config: {{transformer_layer_cls_to_wrap: {text}}}\n")) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[Encoder, true]", "`true` in this list is not text"),
        ("[Encoder, [Decoder]]", "a list in this list is not text"),
        ("{Encoder: 1}", "a group of `key: value` pairs is not text"),
    ],
)
def test_classes_when_they_are_no_text_then_is_a_problem(written: Path, text: str, message: str) -> None:
    (problem,) = problems_of(from_text(f"fsdp_config: {{transformer_layer_cls_to_wrap: {text}}}\n"))
    assert (problem.path, problem.message) == ("fsdp_config.transformer_layer_cls_to_wrap", message)


NEUTRAL = {
    "activation_checkpointing": ("false", "null", "'false'"),
    "activation_checkpointing_offload": ("false",),
    "backward_prefetch": ("BACKWARD_PRE", "NO_PREFETCH", "null"),
    "cpu_offload": ("false",),
    "cpu_ram_efficient_loading": ("true", "false", "'true'"),
    "forward_prefetch": ("false",),
    "ignored_modules": ("null", "''"),
    "min_num_params": ("0", "null"),
    "offload_params": ("false", "'no'"),
    "plugin": ("null",),
    "sharding_strategy": ("FULL_SHARD", "1", "'1'"),
    "state_dict_type": ("SHARDED_STATE_DICT", "FULL_STATE_DICT"),
    "sync_module_states": ("true", "false"),
    "use_orig_params": ("true", "false"),
}
"""What Accelerate writes for a key that is not used, or that asks for what is done anyway."""

REFUSED = {
    "activation_checkpointing": "true",
    "activation_checkpointing_offload": "true",
    "backward_prefetch": "BACKWARD_POST",
    "cpu_offload": "true",
    "cpu_ram_efficient_loading": "never",
    "forward_prefetch": "true",
    "ignored_modules": "head.*",
    "min_num_params": "1000000",
    "offload_params": "true",
    "plugin": "{reshard_after_forward: true}",
    "sharding_strategy": "HYBRID_SHARD",
    "state_dict_type": "LOCAL_STATE_DICT",
    "sync_module_states": "never",
    "use_orig_params": "never",
}


def test_absent_keys_when_listed_then_each_has_its_tests() -> None:
    assert set(NEUTRAL) == set(REFUSED) == set(SPEC.absent)


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
@pytest.mark.parametrize("key", sorted(NEUTRAL))
def test_absent_key_when_it_asks_for_nothing_then_is_dropped(written: Path, key: str, prefix: str) -> None:
    for value in NEUTRAL[key]:
        layer = from_text(f"fsdp_config:\n  {prefix}{key}: {value}\n")
        assert (dict(layer), layer.problems, layer.notes) == ({}, (), ()), value


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
@pytest.mark.parametrize("key", sorted(REFUSED))
def test_absent_key_when_it_asks_for_something_then_is_refused_by_name(written: Path, key: str, prefix: str) -> None:
    (problem,) = from_text(f"fsdp_config:\n  {prefix}{key}: {REFUSED[key]}\n").problems
    assert problem.path == f"fsdp_config.{prefix}{key}"
    assert problem.source == "run.yaml line 2"
    assert problem.message == SPEC.absent[key].reason
    assert problem.hint


def test_absent_key_when_it_stands_at_the_top_then_is_refused_too(written: Path) -> None:
    (problem,) = from_text("fsdp_offload_params: true\n").problems
    assert (problem.path, problem.message) == ("fsdp_offload_params", "keeping parameters on the CPU is not there yet")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("fsdp_reshard_aftr_forward", "did you mean `fsdp_reshard_after_forward`?"),
        ("reshard_aftr_forward", "did you mean `reshard_after_forward`?"),
        ("fsdp_transformer_cls_to_wrap", "did you mean `fsdp_transformer_layer_cls_to_wrap`?"),
        ("wrap_policy", "did you mean `auto_wrap_policy`?"),
        ("qqqqq", None),
    ],
)
def test_key_when_misspelled_then_the_nearest_name_is_the_hint(written: Path, key: str, hint: str | None) -> None:
    (problem,) = from_text(f"fsdp_config:\n  {key}: true\n").problems
    assert (problem.path, problem.hint) == (f"fsdp_config.{key}", hint)
    assert problem.message == f"`fsdp_config` has no key `{key}`"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("fsdp_version", "1", "the first version of FSDP is not supported; allowed: `2`"),
        ("version", "'1'", "the first version of FSDP is not supported; allowed: `2`"),
        ("version", "3", "allowed: `2`"),
        (
            "fsdp_auto_wrap_policy",
            "SIZE_BASED_WRAP",
            "cutting a model by size is not there yet; allowed: `TRANSFORMER_BASED_WRAP` or `NO_WRAP`",
        ),
        ("fsdp_reshard_after_forward", "FULL_SHARD", "`FULL_SHARD` is neither `true` nor `false`"),
    ],
)
def test_value_when_it_is_not_there_then_is_refused_by_name(written: Path, key: str, value: str, message: str) -> None:
    (problem,) = problems_of(from_text(f"fsdp_config:\n  {key}: {value}\n"))
    assert (problem.path, problem.source, problem.message) == (f"fsdp_config.{key}", "run.yaml line 2", message)


# A whole file

ACCELERATE_FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_cpu_offload: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_activation_checkpointing: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
mixed_precision: bf16
num_machines: 1
num_processes: 4
"""


def test_file_when_accelerate_wrote_it_then_every_key_is_understood(written: Path) -> None:
    layer = from_text(ACCELERATE_FILE)
    assert (layer.problems, layer.notes) == ((), ())
    resolved = resolve([layer], world_size=4)
    assert resolved.notes == ()
    config = resolved.config
    assert (config.distributed_type, config.mixed_precision, config.num_processes) == ("FSDP", "bf16", 4)
    section = config.section(FSDPSettings)
    assert (section.unit_names, section.reshard_after_forward) == (("LlamaDecoderLayer",), True)
    assert strategy_for(config, world_size=4).name == "fsdp"


def test_file_when_accelerate_wrote_it_then_launch_shows_what_would_start(
    written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "start", lambda _plan: pytest.fail("the launch started"))
    Path("run.yaml").write_text(ACCELERATE_FILE)
    Path("train.py").touch()
    assert main(["launch", "--config_file", "run.yaml", "--cpu", "--dry-run", "train.py"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "processes: 4 processes" in shown.out
    assert "distributed_type = FSDP (run.yaml line 3)" in shown.out
    assert re.search(r"transformer_layer_cls_to_wrap = LlamaDecoderLayer \(run\.yaml line 12\)", shown.out)
