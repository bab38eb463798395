"""Signals to the launcher while it has ranks: noted and waited for, never raised in the middle of something."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from types import FrameType

from drivetrain.launch.worker import HANDLED_SIGNALS

_Handler = Callable[[int, FrameType | None], object] | int | None


class Interrupted(BaseException):
    """The launcher was told to end.

    Not an Exception, so that nothing on the way takes it for a failure of the job.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"interrupted by {signal.Signals(number).name}")


class SignalWatch:
    """Until closed, notes the first signal that should end the job, and makes its descriptor readable at any.

    SIGHUP and SIGQUIT stay ignored where they were (`nohup`); SIGINT and SIGTERM are always heard.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        # Written to in whatever thread the signal arrives; a handler alone would not wake this one.
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before: dict[int, _Handler] = {}
        for number in HANDLED_SIGNALS:
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN or number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = handler
                signal.signal(number, self._note)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a signal has come."""
        return self._reader.fileno()

    def close(self) -> None:
        """Put the handlers back, once."""
        if self._before:
            for number, handler in self._before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            self._before.clear()
            signal.set_wakeup_fd(self._wakeup_before)
            self._reader.close()
            self._writer.close()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or number


def die_of(number: int) -> int:
    """End this process by a signal, as if nobody had caught it; returns the shell's code for it where that fails."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number
