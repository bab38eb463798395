"""A process that does not outlive the one that started it, and whose own forked children do not outlive it.

On Linux the kernel sends SIGKILL when the parent is gone (`PR_SET_PDEATHSIG`). The kernel means the parent *thread*,
so a child that was forked off the main thread polls its parent instead, once a second, and so does every process
where there is no such call. Children that are started by exec (subprocess, spawned loader workers) are not covered.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 1.0


def end_with(parent_pid: int) -> None:
    """Make this process end with its parent, and leave what it forks alone.

    Args:
        parent_pid: who the parent is meant to be; when it has gone already, this process ends at once.
    """
    _Lifeline().tie(parent_pid, forked_by_main_thread=True)


def tie_to_parent(parent_pid: int) -> None:
    """Make this process end with its parent, and every process that it forks from now on end with it.

    Args:
        parent_pid: who the parent is meant to be; when it has gone already, this process ends at once.
    """
    lifeline = _Lifeline()
    lifeline.tie(parent_pid, forked_by_main_thread=True)
    os.register_at_fork(before=lifeline.before_fork, after_in_child=lifeline.after_in_child)


class _Lifeline:
    """The parent-death call, looked up once, and who is forking at the moment."""

    def __init__(self) -> None:
        self._prctl: Callable[[int, int], int] | None = None
        if sys.platform == "linux":
            self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._forking = threading.local()

    def tie(self, parent_pid: int, *, forked_by_main_thread: bool) -> None:
        followed = False
        if self._prctl is not None and forked_by_main_thread:
            followed = self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0
        if os.getppid() != parent_pid:
            os._exit(1)
        if not followed:
            threading.Thread(target=_poll_parent, args=(parent_pid,), daemon=True, name="lifeline").start()

    def before_fork(self) -> None:
        self._forking.pid = os.getpid()
        self._forking.is_main_thread = threading.get_native_id() == self._forking.pid

    def after_in_child(self) -> None:
        self.tie(self._forking.pid, forked_by_main_thread=self._forking.is_main_thread)


def _poll_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
