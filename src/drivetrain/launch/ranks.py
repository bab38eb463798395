"""The rank processes of this machine: start them, wait for them, stop them, say how each ended.

Knows nothing of rendezvous, restarts or reports. On Linux it sleeps on the processes' descriptors and wakes up the
moment one ends; elsewhere it looks every few hundredths of a second.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Literal

from drivetrain.cluster.environ import variables
from drivetrain.launch import worker
from drivetrain.launch.failures import Ending, script_stack
from drivetrain.launch.last_words import LastWords
from drivetrain.launch.signals import SignalWatch
from drivetrain.launch.worker import HANDLED_SIGNALS, Order

SETTLE_SECONDS = 0.3  # after the first failure: the time in which its echoes, and a cause recorded later, arrive
GRACE_SECONDS = 5.0  # between asking a rank to end and killing it
_POLL_SECONDS = 0.03


class RankGroup:
    """Processes of one attempt.

    Args:
        start_method: `fork` copies this process, with torch imported and no device touched; `spawn` starts Python anew.
    """

    def __init__(self, orders: Sequence[Order], *, start_method: Literal["fork", "spawn"]) -> None:
        self._ranks = [order.rank for order in orders]
        self._last_words = {rank: LastWords.open() for rank in self._ranks}
        self._exits: dict[int, tuple[int, int]] = {}
        self._descriptors: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        start = _fork if start_method == "fork" else _spawn
        _flush()
        # Blocked meanwhile, so that no handler of ours runs in a rank before the rank has reset it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        self._watch = SignalWatch()
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else the exit codes of the ranks are thrown away
        try:
            for order in orders:
                self._pids[order.rank] = start(order, self._last_words[order.rank])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._open_descriptors()

    @property
    def signal(self) -> int | None:
        """The signal that came to this process while it had these ranks."""
        return self._watch.received

    @property
    def pids(self) -> dict[int, int]:
        """Process of each rank, ended or not."""
        return dict(self._pids)

    def wait(self, *, seconds: float) -> bool:
        """Wait until a rank ends, a signal comes or the time is over; return whether all ended or one failed."""
        self._reap()
        if not self._is_decided():
            self._sleep(seconds)
            self._reap()
        return self._is_decided()

    def settle(self) -> list[Ending]:
        """Give the echoes of a failure their time, stop all ranks that are left, and return how each one ended.

        The last thing to be asked of them.
        """
        if self._any_failed():
            self._wait_for_all(SETTLE_SECONDS)
        ended_by_themselves = dict(self._exits)
        self.stop(signal.SIGTERM)
        endings = [self._ending(rank, ended_by_themselves) for rank in self._ranks]
        while self._last_words:
            self._last_words.popitem()[1].close()
        return endings

    def stop(self, number: int) -> None:
        """Ask the ranks that are left to end, and kill those that have not ended after the grace period.

        A rank that has recorded its failure is ending already and is left to its exit handlers. So is every rank at
        Ctrl-C in a terminal, which sends the signal to all of them.
        """
        self._reap()
        if not (number == signal.SIGINT and _is_in_foreground()):
            self._send(number, [rank for rank in self._left() if not self._has_record(rank)])
        self._wait_for_all(GRACE_SECONDS)
        self._send(signal.SIGKILL, self._left())
        self._wait_for_all(GRACE_SECONDS)
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._watch.close()

    def _send(self, number: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            os.kill(self._pids[rank], number)  # not reaped, so the number is still this process's

    def _open_descriptors(self) -> None:
        if not hasattr(os, "pidfd_open"):
            return
        try:
            for rank, pid in self._pids.items():
                self._descriptors[rank] = os.pidfd_open(pid)
        except OSError:  # a sandbox that forbids the call: look now and then instead
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def _left(self) -> list[int]:
        return [rank for rank in self._pids if rank not in self._exits]

    def _any_failed(self) -> bool:
        return any(code != 0 for code, _ in self._exits.values()) or any(map(self._has_record, self._ranks))

    def _has_record(self, rank: int) -> bool:
        return rank in self._last_words and self._last_words[rank].record() is not None

    def _is_decided(self) -> bool:
        return not self._left() or self._any_failed()

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._left() and (rest := deadline - time.monotonic()) > 0:
            self._sleep(rest, heed_signals=False)
            self._reap()

    def _sleep(self, seconds: float, *, heed_signals: bool = True) -> None:
        """Sleep until a rank that was alive ends, or a signal comes, at most for that time."""
        poll = select.poll()
        if heed_signals:
            poll.register(self._watch, select.POLLIN)
        for rank in self._left():
            if rank in self._descriptors:
                poll.register(self._descriptors[rank], select.POLLIN)
        if not self._descriptors:
            seconds = min(seconds, _POLL_SECONDS)
        poll.poll(seconds * 1000)

    def _reap(self) -> None:
        now = time.monotonic_ns()  # one for all that are found together: their order is not known
        for rank in self._left():
            pid, status = os.waitpid(self._pids[rank], os.WNOHANG)
            if pid != 0:
                self._exits[rank] = (os.waitstatus_to_exitcode(status), now)

    def _ending(self, rank: int, ended_by_themselves: dict[int, tuple[int, int]]) -> Ending:
        code, ended_ns = ended_by_themselves.get(rank, (None, time.monotonic_ns()))
        last_words = self._last_words[rank]
        return Ending(
            rank=rank,
            exit_code=code,
            ended_ns=ended_ns,
            record=last_words.record(),
            crash=script_stack(last_words.crash()),
        )


def _fork(order: Order, last_words: LastWords) -> int:
    gc.freeze()  # a collection in a rank then leaves the pages shared
    with warnings.catch_warnings():
        # Python 3.12 and later warn of threads at a fork. Those here are the store's: they hold no lock of Python's,
        # and a rank closes their sockets and never calls into them.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        worker.live(order, last_words)
    return pid


def _spawn(order: Order, last_words: LastWords) -> int:
    command = [sys.executable, "-m", worker.__name__, worker.to_json(order, last_words)]
    for descriptor in last_words.descriptors:
        os.set_inheritable(descriptor, True)
    return os.posix_spawn(sys.executable, command, {**variables(), **order.variables})


def _is_in_foreground() -> bool:
    """Whether Ctrl-C in the terminal reaches this process and its children alike."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # standard input is no terminal
        return False


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as it is where a descriptor is closed
            stream.flush()
