"""A limit of time for each test, without a plug-in.

Two steps. At the deadline an alarm interrupts the test, which fails with the stack of where it was. A test that hangs
below Python, in a collective say, cannot be interrupted: a while later `faulthandler` shows all stacks and ends
the whole run.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

UNIT_SECONDS = 60.0
RANKS_SECONDS = 120.0  # also e2e and documentation tests: they start processes
SOAK_SECONDS = 3600.0
UNINTERRUPTIBLE_SECONDS = 15.0


def seconds_for(item: pytest.Item) -> float:
    """Return the limit of one phase (setup, call, teardown) of `item`."""
    own = item.get_closest_marker("deadline")
    if own is not None:
        return float(own.args[0])
    if item.get_closest_marker("soak"):
        return SOAK_SECONDS
    if any(item.get_closest_marker(name) for name in ("ranks", "e2e", "gpu")):
        return RANKS_SECONDS
    return UNIT_SECONDS


@contextmanager
def deadline(seconds: float, *, stderr: int) -> Iterator[None]:
    """Fail the test that runs in this block after `seconds`; `stderr` is a descriptor that pytest does not capture."""

    def fail(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"the test was not done after its deadline of {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("tests must run in the main thread: only there an alarm can interrupt them")
    before = signal.signal(signal.SIGALRM, fail)
    outer_seconds, _ = signal.setitimer(signal.ITIMER_REAL, seconds)  # of a test that runs pytest; else 0, no alarm
    faulthandler.dump_traceback_later(seconds + UNINTERRUPTIBLE_SECONDS, exit=True, file=stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, outer_seconds)


def uncaptured_stderr() -> int:
    """Return a copy of the terminal's descriptor, taken before pytest redirects it."""
    return os.dup(2)
