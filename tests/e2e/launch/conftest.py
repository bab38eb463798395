"""Runs `drivetrain launch` as a user does, in a folder of its own, and finds every process of a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

COMMAND = (sys.executable, "-m", "drivetrain.cli.main", "launch")
TOKEN = "TEST_JOB_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a finished job left on the terminal."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def last_lines(self) -> str:
        """What a user sees without scrolling: the last 20 lines of stderr."""
        return "\n".join(self.err.splitlines()[-20:])


class Job:
    """One `drivetrain launch`, whose processes all carry a variable with a value of its own."""

    def __init__(self, words: Sequence[str], *, folder: Path, variables: dict[str, str]) -> None:
        self.token = uuid.uuid4().hex
        self._started = time.monotonic()
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            cwd=folder,
            env={**variables, TOKEN: self.token},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, *, timeout: float = 60.0) -> Outcome:
        """Wait for the launcher to end."""
        out, err = self.process.communicate(timeout=timeout)
        return Outcome(code=self.process.returncode, out=out, err=err, seconds=time.monotonic() - self._started)

    def living(self) -> list[int]:
        """Return every process of the job that is alive, the launcher included."""
        needle = f"{TOKEN}={self.token}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if needle in (entry / "environ").read_bytes().split(b"\0") and _is_running(entry):
                        found.append(int(entry.name))
        return found

    def wait_for_living(self, count: int, *, timeout: float = 40.0) -> None:
        """Wait until the job has that many processes."""
        self._wait(lambda: len(self.living()) == count, timeout, f"not {count} processes")

    def wait_for_line(self, text: str) -> None:
        """Wait until a line of the output is this text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == text:
                return
        raise AssertionError(f"the output ended without `{text}`: {self.process.communicate()[1]}")

    def wait_for_end_of_all(self, *, timeout: float) -> None:
        """Wait until no process of the job is left."""
        self._wait(lambda: not self.living(), timeout, "processes are left")

    def clean_up(self) -> None:
        """Kill whatever is left, so that one failing test does not disturb the next."""
        for pid in self.living():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def _wait(self, is_so: Callable[[], bool], timeout: float, complaint: str) -> None:
        deadline = time.monotonic() + timeout
        while not is_so():
            assert time.monotonic() < deadline, f"after {timeout} s {complaint}: {self.living()}"
            time.sleep(0.05)


def _is_running(entry: Path) -> bool:
    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


class Jobs:
    """Starts jobs in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(("DRIVETRAIN_", "OMP_", "COV_", "PYTEST_"))
        }
        self.variables["XDG_CACHE_HOME"] = str(folder / "cache")
        self._jobs: list[Job] = []

    def write(self, name: str, text: str) -> str:
        """Write a script and return its name."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return name

    def start(self, *words: str) -> Job:
        """Start `drivetrain launch` with these words."""
        self._jobs.append(Job(words, folder=self.folder, variables=self.variables))
        return self._jobs[-1]

    def run(self, *words: str, timeout: float = 60.0) -> Outcome:
        """Run `drivetrain launch` with these words to its end."""
        return self.start(*words).finish(timeout=timeout)

    def close(self) -> None:
        """Leave no process."""
        for job in self._jobs:
            job.clean_up()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Starts jobs in a folder of their own."""
    started = Jobs(tmp_path)
    yield started
    started.close()
