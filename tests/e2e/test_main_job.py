"""The main job as a user starts it: `python`, `drivetrain launch`, `torchrun`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "language_model.py")
BIN = Path(sys.executable).parent

PYTHON = (sys.executable, EXAMPLE)
LAUNCH = (str(BIN / "drivetrain"), "launch", "--cpu", "--num_processes", "2", EXAMPLE)
LAUNCH_SHARDED = (*LAUNCH[:-1], "--use_fsdp", EXAMPLE)
TORCHRUN = (str(BIN / "torchrun"), "--nproc_per_node", "2", EXAMPLE)


def run(command: tuple[str, ...], *arguments: str, folder: Path, timeout: float) -> str:
    """Run the example and return what it printed."""
    return start(command, *arguments, folder=folder, timeout=timeout).stdout


def start(command: tuple[str, ...], *arguments: str, folder: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run the example to its end."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments, "--output_dir", str(folder)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=variables,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def final_loss(printed: str) -> float:
    found = re.search(r"final training loss: ([\d.]+)", printed)
    assert found, printed
    return float(found[1])


def bits_per_byte(printed: str) -> list[float]:
    """Return held-out bits per byte before training and after each epoch."""
    line = printed.strip().splitlines()[-1]
    assert line.startswith("held-out bits per byte: before "), printed
    return [float(value) for value in re.findall(r"(?:before|epoch \d+) ([\d.]+)", line)]


@pytest.mark.deadline(400)
def test_short_run_when_started_in_four_ways_gives_one_loss_and_one_model(tmp_path: Path) -> None:
    short = ("--epochs", "1", "--train_rows", "325", "--heldout_rows", "51")
    commands = (PYTHON, LAUNCH, LAUNCH_SHARDED, TORCHRUN)
    done = [
        start(command, *short, folder=tmp_path / str(number), timeout=120) for number, command in enumerate(commands)
    ]
    assert "GPT is sharded over 2 ranks, units: 2 x Block" in done[2].stderr
    losses = [final_loss(one.stdout) for one in done]
    assert losses == pytest.approx([losses[0]] * len(done), abs=1e-4)
    heldout = [bits_per_byte(one.stdout) for one in done]
    for values in heldout:
        assert values == pytest.approx(heldout[0], abs=2e-3)  # printed with three digits
    first, *others = (load_file(tmp_path / str(number) / "model.safetensors") for number in range(len(done)))
    for weights in others:
        assert weights.keys() == first.keys()
        for name, value in first.items():
            # Ten updates of AdamW, which magnifies rounding where gradients are near zero.
            assert (weights[name] - value).norm() <= 1e-4 * value.norm(), name


def test_demo_when_make_is_given_flags_then_they_are_those_of_the_launch() -> None:
    make = ("make", "--no-print-directory", "--dry-run", "demo", "ARGS=--use_fsdp --seed 1", "SCRIPT_ARGS=--lr 1")
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    words = shlex.split(done.stdout.strip().splitlines()[-1])
    flags = ["--cpu", "--num_processes", "2", "--use_fsdp", "--seed", "1"]
    assert words == [".venv/bin/drivetrain", "launch", *flags, "examples/language_model.py", "--lr", "1"]


@pytest.mark.deadline(300)
def test_main_job_learns_on_two_ranks(tmp_path: Path) -> None:
    printed = run(LAUNCH, folder=tmp_path, timeout=280)
    before, first, *_, last = bits_per_byte(printed)
    assert before > 7.5  # a byte has 8 bits; nothing is known before training
    assert last < 0.75 * first
    assert re.search(r"step 25: loss [\d.]+, lr [\d.e+-]+, [\d,]+ tokens/s", printed)
    assert printed.count("final training loss") == 1


@pytest.mark.soak
@pytest.mark.deadline(900)
def test_main_job_has_one_final_loss_on_one_and_two_ranks(tmp_path: Path) -> None:
    losses = [final_loss(run(command, folder=tmp_path, timeout=400)) for command in (PYTHON, LAUNCH, TORCHRUN)]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-4)
