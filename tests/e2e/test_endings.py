"""How a training ends, well or badly, through the whole stack: CASES 21 and 23, and clean ends many times over."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys, time, torch
from drivetrain import Accelerator

accelerator = Accelerator(cpu=True, seed=0)
model = torch.nn.Linear(1, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
rank, mistake = accelerator.process_index, sys.argv[1]
for step in range(5 if rank == 1 or mistake != "unequal" else 3):
    if step == 2 and rank == 1 and mistake == "raise":
        raise ValueError("cause-7f3")
    if step == 2 and rank == 1 and mistake == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 2 and rank == 1 and mistake == "exit":
        sys.exit(3)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).mean())
        optimizer.step()
        optimizer.zero_grad()
if mistake == "late" and rank == 0:
    time.sleep(8)
    print("rank 0 is done")
"""


EMPTY = """
from drivetrain import Accelerator
Accelerator(cpu=True)
"""


def launch(tmp_path: Path, mistake: str, *, program: str = PROGRAM) -> tuple[int, str, str, float]:
    """Return exit code, stdout, the last 20 lines of stderr, and the seconds it took."""
    script = tmp_path / "train.py"
    script.write_text(program)
    command = [sys.executable, "-m", "drivetrain.cli.main", "launch", "--cpu", "--num_processes", "2"]
    start = time.monotonic()
    done = subprocess.run([*command, str(script), mistake], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, "\n".join(done.stderr.splitlines()[-20:]), time.monotonic() - start


@pytest.mark.parametrize(
    ("mistake", "texts"),
    [
        ("raise", ["cause-7f3", "ValueError", "rank 1", "train.py", "line 11"]),
        ("kill", ["rank 1", "signal 9", "memory"]),
        ("exit", ["rank 1", "3"]),
        ("unequal", ["RankMismatchError", "rank 0: the end of the run after update 3", "rank 1: update 4"]),
    ],
)
def test_rank_that_goes_wrong_is_named_last_within_seconds(tmp_path: Path, mistake: str, texts: list[str]) -> None:
    code, _, last_lines, seconds = launch(tmp_path, mistake)
    assert code == 1
    for text in texts:
        assert text in last_lines
    assert "terminate called" not in last_lines
    # Ten seconds after the start of the processes; importing torch on a busy machine comes on top.
    assert seconds < 10 + 15


def test_rank_that_ends_long_after_the_others_is_no_failure(tmp_path: Path) -> None:
    code, printed, last_lines, _ = launch(tmp_path, "late")
    assert (code, printed) == (0, "rank 0 is done\n"), last_lines


@pytest.mark.parametrize("runs", [5, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.deadline(600)])])
def test_job_that_only_makes_an_accelerator_always_ends_cleanly(tmp_path: Path, runs: int) -> None:
    for _ in range(runs):
        code, printed, errors, _ = launch(tmp_path, "", program=EMPTY)
        assert (code, printed) == (0, "")
        assert errors.splitlines() == [
            "drivetrain: 2 ranks on cpu (`use_cpu`), data parallelism (DDP) through gloo, fp32 (default)"
        ]
