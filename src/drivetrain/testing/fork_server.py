"""A process that has imported torch and forks ranks on request, so that a call on ranks takes milliseconds.

It holds nothing but its connection to the process that started it. When that one goes away, however it ends, the
connection closes, and the server stops every rank and leaves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from importlib import import_module
from multiprocessing.connection import Connection, wait

from drivetrain.testing.exchange import Ended, Order, Request

PRELOADED = ("numpy", "torch", "torch.distributed", "drivetrain.testing.rank_process")


class ForkServer:
    """Forks the ranks of one request at a time and reports their ends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._rank_of: dict[int, int] = {}
        self._child_ended, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, nothing is written there

    def serve(self) -> None:
        """Serve until the other side is gone."""
        try:
            self._connection.send("ready")
            while True:
                ready = wait([self._connection, self._child_ended])
                if self._child_ended in ready:
                    self._child_ended.recv(4096)
                    self._report_ended()
                if self._connection in ready:
                    self._obey(self._connection.recv())
        except (EOFError, ConnectionError):
            pass
        finally:
            self._signal_all(signal.SIGKILL)

    def _obey(self, message: Request | Order) -> None:
        if isinstance(message, Request):
            for rank in range(message.ranks):
                self._fork(message, rank=rank)
        elif message is Order.SHOW_STACKS:
            from drivetrain.testing.rank_process import STACK_SIGNAL

            for process_id in self._rank_of:
                os.kill(process_id, STACK_SIGNAL)
        else:
            self._signal_all(signal.SIGKILL)

    def _fork(self, request: Request, *, rank: int) -> None:
        server_pid = os.getpid()
        process_id = os.fork()
        if process_id == 0:
            self._connection.close()
            self._child_ended.close()
            self._wakeup.close()
            from drivetrain.testing import rank_process

            rank_process.live(request, rank=rank, server_pid=server_pid)
        # Both sides say it, whoever comes first: a group must exist before it is signalled.
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(process_id, process_id)
        self._rank_of[process_id] = rank

    def _report_ended(self) -> None:
        for process_id, rank in list(self._rank_of.items()):
            ended, status = os.waitpid(process_id, os.WNOHANG)
            if ended:
                del self._rank_of[process_id]
                _signal_group(process_id, signal.SIGKILL)  # what the rank itself had started
                code = os.waitstatus_to_exitcode(status)
                self._connection.send(Ended(rank=rank, exit_code=code, monotonic_ns=time.monotonic_ns()))

    def _signal_all(self, number: signal.Signals) -> None:
        for process_id in self._rank_of:
            _signal_group(process_id, number)


def _signal_group(process_id: int, number: signal.Signals) -> None:
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.killpg(process_id, number)


def main() -> None:
    """Serve on the inherited descriptor that the only argument names."""
    for name in PRELOADED:
        import_module(name)
    ForkServer(Connection(int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
