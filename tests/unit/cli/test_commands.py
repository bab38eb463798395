"""The command as a function: exit codes, and what goes to which stream."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from drivetrain.cli import launch
from drivetrain.cli.arguments import split
from drivetrain.cli.commands import ABSENT, COMMANDS
from drivetrain.cli.main import main
from drivetrain.config import flags
from drivetrain.config.keys import keys
from drivetrain.errors import ConfigError
from drivetrain.launch import LaunchPlan
from drivetrain.launch.machine import Devices, Machine


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder, without a default file, and never let a launch take this process's place."""

    def refuse(_plan: LaunchPlan) -> NoReturn:
        pytest.fail("the launch started")

    monkeypatch.setattr(launch, "start", refuse)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DRIVETRAIN_HOME", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    Path("train.py").touch()


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_overview_when_asked_for_then_lists_the_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert "launch" in capsys.readouterr().out


def test_version_when_asked_for_then_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"drivetrain \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_command_when_misspelled_then_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lanch"]) == 2
    assert capsys.readouterr().err == "error: there is no command `lanch`\n  hint: did you mean `launch`?\n"


@pytest.mark.parametrize("command", sorted(ABSENT))
def test_command_when_it_is_not_there_yet_then_says_so(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 2
    expected = f"error: the command `{command}` is not there yet\n  hint: {ABSENT[command]}\n"
    assert capsys.readouterr().err == expected
    assert command not in COMMANDS


def test_help_of_launch_when_a_default_is_true_then_shows_how_to_say_false(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--help"]) == 0
    shown = re.findall(r"--(\w+) +true\|false", capsys.readouterr().out)
    assert shown == [key.flat for key in keys().values() if key.default is True]


def test_help_of_launch_when_printed_then_names_every_flag_and_keeps_brackets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["launch", "--help"]) == 0
    text = capsys.readouterr().out
    for flag in flags():
        assert flag.names[0] in text
    assert "drivetrain launch [flags] script.py [script's flags]" in text
    assert "[default: no]" in text


def test_help_when_printed_then_torch_is_not_loaded() -> None:
    code = "import sys; from drivetrain.cli.main import main; main(['launch', '--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("launch", "error: no script is given"),
        ("launch trian.py", "error: there is no file `trian.py`"),
        ("launch -m no_such_module", "error: no module named `no_such_module`"),
        ("launch --config_file run.yaml train.py", "error: there is no file `run.yaml`"),
        ("launch --num_proceses 2 train.py", "hint: did you mean `--num_processes`?"),
        ("launch --num_processes two train.py", "num_processes = two (flag --num_processes)"),
        ("launch --num_processes 2 --distributed_type NO train.py", "(flag --distributed_type)"),
        ("launch --distributed_type MEGATRON_LM train.py", "Megatron-LM is not there yet; allowed: "),
        ("launch --num_machines 2 --cpu train.py", "num_machines = 2 (flag --num_machines)"),
    ],
)
def test_launch_when_the_request_is_wrong_then_exits_with_two(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_dry_run_when_layers_differ_then_shows_who_won(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").write_text("use_cpu: true\nnum_processes: 4\nseed: 1\nmixed_precision: bf16\n")
    monkeypatch.setenv("DRIVETRAIN_SEED", "2")
    monkeypatch.setenv("DRIVETRAIN_NUM_PROCESSES", "3")
    words = ["--config_file", "run.yaml", "--num_processes", "2", "--dry-run", "train.py", "--lr", "1"]
    assert main(["launch", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("train.py --lr 1")
    assert lines[1].startswith("processes: 2 processes, forked")
    assert lines[2] == "device: cpu (`use_cpu`)"
    assert "  mixed_precision = bf16 (run.yaml line 4)" in lines
    assert "  seed = 2 (variable DRIVETRAIN_SEED)" in lines
    assert "  num_processes = 2 (flag --num_processes)" in lines
    assert "  non_finite = raise (default)" in lines
    assert [line for line in lines if line.startswith("settings")] == [
        "settings, without those that the script itself gives to Accelerator(...), which come first:"
    ]


def test_dry_run_when_ranks_share_variables_then_prints_these_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--cpu", "--num_processes", "2", "--dry-run", "train.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start, *ranks = (lines.index(f"variables of {who}:") for who in ("every rank", "rank 0", "rank 1"))
    assert "  WORLD_SIZE=2" in lines[start : ranks[0]]
    assert lines[ranks[0] :] == [
        *("variables of rank 0:", "  RANK=0", "  LOCAL_RANK=0", "  ROLE_RANK=0"),
        *("variables of rank 1:", "  RANK=1", "  LOCAL_RANK=1", "  ROLE_RANK=1"),
    ]


def test_dry_run_when_there_is_one_rank_then_all_variables_are_in_one_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--cpu", "--dry-run", "train.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("variables")] == ["variables:"]
    assert "  RANK=0" in lines


@pytest.mark.parametrize(
    ("variables", "path"),
    [
        ({"DRIVETRAIN_HOME": "/home/dt", "XDG_CACHE_HOME": "/cache"}, "/home/dt/default_config.yaml"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/drivetrain/default_config.yaml"),
        ({}, str(Path.home() / ".cache/drivetrain/default_config.yaml")),
    ],
)
def test_default_file_when_looked_for_then_lies_in_the_cache(variables: dict[str, str], path: str) -> None:
    assert launch.default_file(variables) == Path(path)


def test_default_file_when_it_exists_then_is_read_unless_another_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    default = tmp_path / "cache" / "drivetrain" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text("seed: 5\n")
    assert main(["launch", "--dry-run", "train.py"]) == 0
    assert f"  seed = 5 ({default} line 1)" in capsys.readouterr().out
    Path("run.yaml").write_text("use_cpu: true\n")
    assert main(["launch", "--config_file", "run.yaml", "--dry-run", "train.py"]) == 0
    assert "  seed = unset (default)" in capsys.readouterr().out


def test_file_when_a_variable_names_it_then_is_read_unless_a_flag_names_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").write_text("seed: 5\n")
    Path("other.yaml").write_text("seed: 6\n")
    monkeypatch.setenv("DRIVETRAIN_CONFIG_FILE", "run.yaml")
    assert main(["launch", "--dry-run", "train.py"]) == 0
    assert "  seed = 5 (run.yaml line 1)" in capsys.readouterr().out
    assert main(["launch", "--config_file", "other.yaml", "--dry-run", "train.py"]) == 0
    assert "  seed = 6 (other.yaml line 1)" in capsys.readouterr().out
    monkeypatch.setenv("DRIVETRAIN_CONFIG_FILE", "absent.yaml")
    assert main(["launch", "--dry-run", "train.py"]) == 2
    assert capsys.readouterr().err.endswith("  hint: it was named by DRIVETRAIN_CONFIG_FILE\n")


def test_launch_when_settings_of_a_file_have_no_effect_then_says_so_once_for_each_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rdzv_backend: c10d\nmain_process_ip: 10.0.0.1\n")
    words = ["--cpu", "--num_processes", "2", "--config_file", str(file), "--dry-run", "train.py"]
    assert main(["launch", *words]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        f"warning: `main_process_ip: 10.0.0.1` ({file} line 2) has no effect: this run is on a single machine",
        f"warning: `rdzv_backend: c10d` ({file} line 1) has no effect: this run is on a single machine",
    ]
    assert "no effect" not in out


def test_launch_when_flags_have_no_effect_then_refuses_them_unless_neutral(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cpu", "--num_processes", "2", "--gpu_ids", "all", "--machine_rank", "0", "--dry-run", "train.py"]
    assert main(["launch", *words]) == 0
    assert "no effect" not in "".join(capsys.readouterr())
    assert main(["launch", "--rdzv-backend", "c10d", *words]) == 2
    assert "rdzv_backend = c10d (flag --rdzv-backend)\n    has no effect" in capsys.readouterr().err


def test_launch_when_more_processes_than_devices_are_asked_for_then_refuses_before_any_starts() -> None:
    two = Devices(present=2, visible=2, variable="CUDA_VISIBLE_DEVICES", reason="2 found")
    machine = Machine(cpus=4, devices=two, variables={}, platform="linux", python="python")
    arguments = split(["--num_processes", "3", "train.py"], flags=flags())
    with pytest.raises(ConfigError, match="3 processes need 3 devices on this machine, 2 can be used"):
        launch.prepare(arguments, machine=machine)
