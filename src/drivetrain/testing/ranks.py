"""Runs a plain function on several CPU ranks and returns the results by rank.

    def total(value):
        torch.distributed.init_process_group("gloo", init_method=os.environ["DRIVETRAIN_RENDEZVOUS"])
        ...

    assert ranks.run(total, 3, ranks=2) == [6, 6]

Each rank is a process of its own with torchrun's variables and one thread. Processes meet at a file, so that no two
runs can want the same port. A call that does not end in time is ended, and the error says where each rank was.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from drivetrain.cluster.environ import variables
from drivetrain.errors import DrivetrainError
from drivetrain.testing.exchange import Ended, FunctionReference, Order, Request
from drivetrain.testing.report import RanksFailed, Run, results

GRACE_SECONDS = 0.5  # for the others to say what they saw when one rank has failed
STACK_SECONDS = 0.5
STOP_SECONDS = 10.0
START_SECONDS = 120.0  # importing torch on a machine that is busy or cold

__all__ = ["RanksFailed", "run", "start"]


def run(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int,
    timeout: float = 60.0,
    init_group: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Return what `fn(*args, **kwargs)` returns on each of `ranks` CPU ranks, in the order of the ranks.

    A rank finds torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and
    DRIVETRAIN_RENDEZVOUS, an `init_method` that needs no port. What ranks print appears here after the call.

    Args:
        fn: defined at the top level of a module.
        args: of any kind that pickles, as are results; tensors travel by value.
        timeout: seconds until all ranks must be done.
        init_group: whether a gloo group is open while `fn` runs. One that `fn` leaves open is closed in any case.

    Raises:
        RanksFailed: a rank raised, died or was not done in time. The others had half a second to follow.
    """
    function = FunctionReference.of(fn)
    arguments = pickle.dumps((args, kwargs))
    with tempfile.TemporaryDirectory(prefix="drivetrain-ranks-") as folder, _reserved_port() as port:
        request = Request(
            function=function,
            arguments=arguments,
            ranks=ranks,
            environ=_environ(ranks=ranks, port=port, folder=folder),
            sys_path=sys.path,
            working_directory=str(Path.cwd()),
            folder=folder,
            group_timeout_seconds=timeout if init_group else None,
        )
        return results(_server(os.getpid()).run(request, timeout=timeout))


def start() -> None:
    """Begin to import torch for the ranks of later calls, in the background."""
    _server(os.getpid())


def _environ(*, ranks: int, port: int, folder: str) -> dict[str, str]:
    environ = variables()
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    environ.update(
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        DRIVETRAIN_RENDEZVOUS=(Path(folder) / "rendezvous").as_uri(),
    )
    return environ


@contextmanager
def _reserved_port() -> Iterator[int]:
    """Hold a port that nobody else is given, and that a store of the ranks can still listen on."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()  # there, a bound socket keeps others from listening even with SO_REUSEADDR
        yield port


class _Server:
    """The other end of a fork server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_ready = False
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "drivetrain.testing.fork_server", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**variables(), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self._close, os.getpid())

    def run(self, request: Request, *, timeout: float) -> Run:
        """Return when every rank's process has ended, by itself or because its time was up."""
        with self._lock:
            try:
                return self._run(request, timeout=timeout)
            except (EOFError, ConnectionError) as error:
                _server.cache_clear()
                code = self._process.wait(timeout=STOP_SECONDS)
                raise DrivetrainError(f"the process that forks ranks ended with exit code {code}") from error

    def _run(self, request: Request, *, timeout: float) -> Run:
        if not self._is_ready:
            self._wait_until_ready()
        ended: dict[int, Ended] = {}
        self._connection.send(request)
        try:
            self._collect(ended, request=request, deadline=time.monotonic() + timeout)
            on_time = frozenset(ended)
            if len(on_time) < request.ranks:
                self._connection.send(Order.SHOW_STACKS)
                _wait_for_stacks(request, ranks=set(range(request.ranks)) - on_time)
        finally:
            self._stop(ended, request=request)
        return Run(request=request, ended=ended, on_time=on_time, timeout_seconds=timeout, grace_seconds=GRACE_SECONDS)

    def _wait_until_ready(self) -> None:
        if not self._connection.poll(START_SECONDS):
            raise DrivetrainError(f"the process that forks ranks did not start within {START_SECONDS:.0f} s")
        self._connection.recv()
        self._is_ready = True

    def _collect(self, ended: dict[int, Ended], *, request: Request, deadline: float) -> None:
        while len(ended) < request.ranks and self._connection.poll(max(0.0, deadline - time.monotonic())):
            end: Ended = self._connection.recv()
            ended[end.rank] = end
            if end.exit_code != 0:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)

    def _stop(self, ended: dict[int, Ended], *, request: Request) -> None:
        if len(ended) == request.ranks:
            return
        self._connection.send(Order.STOP)
        deadline = time.monotonic() + STOP_SECONDS
        while len(ended) < request.ranks:
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                raise DrivetrainError(f"ranks of a test were killed and still run after {STOP_SECONDS:.0f} s")
            end: Ended = self._connection.recv()
            ended[end.rank] = end

    def _close(self, owner: int) -> None:
        if os.getpid() != owner:
            return
        self._connection.close()
        self._process.kill()
        self._process.wait()


@cache
def _server(_process_id: int) -> _Server:
    """Return the server of the process that asks; a forked child has another id and gets its own."""
    return _Server()


def _wait_for_stacks(request: Request, *, ranks: set[int]) -> None:
    deadline = time.monotonic() + STACK_SECONDS
    paths = [request.path(rank, "stack") for rank in ranks]
    while time.monotonic() < deadline and not all(path.exists() and path.stat().st_size for path in paths):
        time.sleep(0.01)
