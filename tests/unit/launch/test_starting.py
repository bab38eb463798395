"""What a launch leaves in the temporary folder, and who tidies it up."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from drivetrain.launch import starting

DAY_SECONDS = 24 * 3600


def _folder_of_a_run(root: Path, *, pid: int, age_seconds: float) -> Path:
    folder = root / f"drivetrain-{pid}-abc"
    folder.mkdir()
    (folder / "config.yaml").touch()
    then = time.time() - age_seconds
    os.utime(folder, (then, then))
    return folder


def _dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(30)
    return process.pid


@pytest.mark.parametrize(
    ("is_alive", "age_seconds", "stays"),
    [(False, 2 * DAY_SECONDS, False), (False, DAY_SECONDS / 2, True), (True, 2 * DAY_SECONDS, True)],
)
def test_folder_when_its_run_is_over_for_a_day_then_the_next_launch_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_alive: bool, age_seconds: float, stays: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pid = os.getpid() if is_alive else _dead_pid()
    folder = _folder_of_a_run(tmp_path, pid=pid, age_seconds=age_seconds)
    others = tmp_path / "drivetrain-notes-1"
    others.mkdir()
    os.utime(others, (0, 0))
    starting.remove_stale_folders()
    assert folder.exists() == stays
    assert others.exists()
