"""Ctrl-C, typed in a terminal: the kernel sends SIGINT to the launcher and to all ranks at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

# Ends its clean-up only if it is left alone meanwhile.
SCRIPT = """
    import os, pathlib, time
    rank = os.environ["RANK"]
    pathlib.Path(f"ready-{rank}").touch()
    try:
        time.sleep(300)
    finally:
        time.sleep(1)
        pathlib.Path(f"clean-{rank}").touch()
"""

# Gives itself a terminal of its own, the one on its standard input, and becomes the launcher.
IN_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "drivetrain.cli.main", *sys.argv[1:]])
"""


def _wait_for(paths: list[Path], process: subprocess.Popen[str]) -> None:
    while not all(path.exists() for path in paths):
        assert process.poll() is None


def test_ranks_when_ctrl_c_is_typed_then_are_interrupted_once_and_clean_up(jobs: Any) -> None:
    script = jobs.write("train.py", SCRIPT)
    words = ["launch", "--cpu", "--num_processes", "2", script]
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *words],
        cwd=jobs.folder,
        env=jobs.variables,
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        os.close(theirs)
        _wait_for([jobs.folder / f"ready-{rank}" for rank in range(2)], process)
        os.write(ours, b"\x03")
        _, errors = process.communicate(timeout=20)
    finally:
        os.close(ours)
        process.kill()
        process.communicate()
    assert sorted(path.name for path in jobs.folder.glob("clean-*")) == ["clean-0", "clean-1"]
    assert process.returncode == -signal.SIGINT
    assert errors == "interrupted by SIGINT: all ranks were stopped\n"


def test_launcher_when_interrupted_before_ranks_exist_then_shows_no_traceback(jobs: Any) -> None:
    # The marker is written while the launcher imports torch's neighbour numpy: a moment that is sure to come.
    jobs.write("numpy/__init__.py", "import pathlib, time; pathlib.Path('importing').touch(); time.sleep(20)")
    jobs.variables["PYTHONPATH"] = str(jobs.folder)
    job = jobs.start("--cpu", "--num_processes", "2", jobs.write("train.py", ""))
    _wait_for([jobs.folder / "importing"], job.process)
    job.process.send_signal(signal.SIGINT)
    outcome = job.finish(timeout=10)
    assert (outcome.code, outcome.err) == (-signal.SIGINT, "")
