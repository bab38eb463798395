"""Where the launcher's flags end and the script's begin."""

from __future__ import annotations

import pytest

from drivetrain.cli.arguments import LaunchArguments, UsageError, split
from drivetrain.config import flags


def parse(line: str) -> LaunchArguments:
    """Return what a command line means."""
    return split(line.split(), flags=flags())


def typed(line: str) -> list[tuple[str, str, str]]:
    """Return path, spelling and text of each setting on a command line."""
    return [(flag.path, spelling, text) for flag, spelling, text in parse(line).typed]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--num_processes 2 t.py", ("num_processes", "--num_processes", "2")),
        ("--num-processes 2 t.py", ("num_processes", "--num-processes", "2")),
        ("--num_processes=2 t.py", ("num_processes", "--num_processes", "2")),
        ("--num-processes= t.py", ("num_processes", "--num-processes", "")),
        ("--seed -3 t.py", ("seed", "--seed", "-3")),
        ("--cpu t.py", ("use_cpu", "--cpu", "true")),
        ("--use-cpu t.py", ("use_cpu", "--use-cpu", "true")),
        ("--cpu=false t.py", ("use_cpu", "--cpu", "false")),
        ("--ddp_static_graph true t.py", ("ddp_config.static_graph", "--ddp_static_graph", "true")),
        ("--ddp-static-graph False t.py", ("ddp_config.static_graph", "--ddp-static-graph", "False")),
    ],
)
def test_flag_when_typed_in_any_form_then_is_read_with_its_spelling(line: str, expected: tuple[str, str, str]) -> None:
    assert typed(line) == [expected]
    assert parse(line).target == "t.py"


@pytest.mark.parametrize(
    "rest", ["--cpu --num_processes 4", "--cpu -- --x", "-- a", "-m x", "--help", "--nonsense", "--dry-run -h"]
)
def test_words_when_after_the_script_then_are_all_the_scripts(rest: str) -> None:
    arguments = parse(f"--cpu t.py {rest}")
    assert arguments.arguments == tuple(rest.split())
    assert (arguments.target, arguments.is_module, arguments.help, arguments.dry_run) == ("t.py", False, False, False)
    assert len(arguments.typed) == 1


def test_words_when_after_a_module_then_are_all_the_modules() -> None:
    arguments = parse("--cpu -m package.train --cpu -m x")
    assert (arguments.target, arguments.is_module) == ("package.train", True)
    assert arguments.arguments == ("--cpu", "-m", "x")


def test_script_when_after_a_double_dash_then_is_found() -> None:
    arguments = parse("--cpu -- t.py --cpu -- y")
    assert (arguments.target, arguments.arguments) == ("t.py", ("--cpu", "--", "y"))


def test_own_flags_when_typed_then_are_no_settings() -> None:
    arguments = parse("--config-file run.yaml --dry_run t.py")
    assert (arguments.config_file, arguments.dry_run, arguments.typed) == ("run.yaml", True, [])
    assert parse("--config_file=run.yaml t.py").config_file == "run.yaml"


@pytest.mark.parametrize("line", ["-h", "--help", "--cpu --help", "--nonsense --help"])
def test_help_when_asked_for_before_the_script_then_wins(line: str) -> None:
    assert parse(line).help


def test_unknown_flags_when_typed_then_are_all_named_with_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        parse("--num_proceses 2 --cpu --mixed-precison=bf16 --warmup 30 --lr 1 --batch_size 8 t.py")
    assert str(caught.value).splitlines() == [
        "5 problems on the command line",
        "  there is no flag `--num_proceses`",
        "    hint: did you mean `--num_processes`?",
        "  there is no flag `--mixed-precison`",
        "    hint: did you mean `--mixed-precision`?",
        "  there is no flag `--warmup`",
        "    hint: flags of the script go after the script",
        "  there is no flag `--lr`",
        "    hint: flags of the script go after the script",
        "  there is no flag `--batch_size`",
        "    hint: did you mean `--global_batch_size`? flags of the script go after the script",
    ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("--fsdp-offload-params", "keeping parameters on the CPU is not there yet"),
        ("--use_deepspeed", "DeepSpeed is not there yet"),
        ("--zero_stage", "DeepSpeed is not there yet"),
        ("--nproc-per-node", "here this is `num_processes`, which counts the processes of all machines together"),
        ("--fp16", "here this is `mixed_precision`"),
        ("--debug", "here this is `check_collectives`"),
    ],
)
def test_flag_when_accelerate_or_torchrun_has_it_then_is_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(f"{name} 2 t.py")
    assert str(caught.value) == f"there is no flag `{name}`: {reason}"


@pytest.mark.parametrize("name", ["--num_process", "--mixed", "-c", "--Num_Processes"])
def test_flag_when_abbreviated_then_is_unknown(name: str) -> None:
    with pytest.raises(UsageError, match=f"there is no flag `{name}`"):
        parse(f"{name} 2 t.py")


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("--num_processes", "`--num_processes` needs a value"),
        ("--num_processes --cpu t.py", "`--num_processes` needs a value"),
        ("--mixed_precision", "`--mixed_precision` needs a value, one of: no, fp16, bf16"),
        ("--config_file", "`--config_file` needs the path of a file"),
        (
            "--config_file a.yaml --config-file b.yaml t.py",
            "`--config-file` names two files, `a.yaml` and `b.yaml`: keep one of them",
        ),
        ("--dry-run=yes t.py", "`--dry-run` takes no value, got `yes`"),
        ("-m", "`-m` needs the name of a module"),
    ],
)
def test_flag_when_its_value_is_missing_or_doubled_then_is_refused(line: str, fault: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(line)
    assert str(caught.value) == fault
