"""The life of one rank: from the fork to the end of its process."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from io import TextIOWrapper
from types import TracebackType
from typing import NoReturn

import torch
import torch._dynamo  # what the first optimizer of a process imports, in seconds
import torch.distributed

from drivetrain.cluster.environ import replace_variables
from drivetrain.launch.failures import is_echo
from drivetrain.launch.lifeline import end_with
from drivetrain.testing.exchange import Outcome, Raised, Request, Returned, write_outcome

STACK_SIGNAL = signal.SIGUSR2


def live(request: Request, *, rank: int, server_pid: int) -> NoReturn:
    """Run the function as rank `rank`, write the outcome and end the process."""
    exit_code = 1
    try:
        os.setpgid(0, 0)
        end_with(server_pid)
        _reset_signals()
        _redirect_output(request, rank=rank)
        with request.path(rank, "stack").open("w") as stack:
            faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
            _take_the_place_of_the_caller(request, rank=rank)
            outcome = _call(request, rank=rank)
            write_outcome(outcome, request.path(rank, "outcome"))
            if isinstance(outcome, Returned):
                _wind_down()
                exit_code = 0
    except BaseException:  # noqa: BLE001 - nothing may unwind into the fork server's loop below this frame
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        # Past this point only static destructors could run, and some abort ("terminate called without an active
        # exception") when threads of torch are still alive.
        os._exit(exit_code)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _redirect_output(request: Request, *, rank: int) -> None:
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        file = os.open(request.path(rank, ("stdout", "stderr")[descriptor - 1]), os.O_CREAT | os.O_WRONLY, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    faulthandler.enable(file=sys.stderr)


def _take_the_place_of_the_caller(request: Request, *, rank: int) -> None:
    replace_variables({**request.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    os.chdir(request.working_directory)
    sys.path[:] = request.sys_path
    torch.set_num_threads(1)


def _call(request: Request, *, rank: int) -> Outcome:
    try:
        function = request.function.load()
        args, kwargs = pickle.loads(request.arguments)
        if request.group_timeout_seconds is not None:
            _open_group(request, rank=rank, timeout_seconds=request.group_timeout_seconds)
        return Returned(value=pickle.dumps(function(*args, **kwargs)))
    except BaseException as error:  # noqa: BLE001 - the border of the process: told to the caller, who raises
        sys.last_value = error  # as the interpreter does: exit handlers can see that the process fails
        return _raised(error, monotonic_ns=time.monotonic_ns())


def _open_group(request: Request, *, rank: int, timeout_seconds: float) -> None:
    torch.distributed.init_process_group(
        "gloo",
        init_method=request.rendezvous,
        rank=rank,
        world_size=request.ranks,
        timeout=timedelta(seconds=timeout_seconds),
    )


def _raised(error: BaseException, *, monotonic_ns: int) -> Raised:
    lines = traceback.format_exception(type(error), error, _without_own_frames(error.__traceback__))
    return Raised(
        monotonic_ns=monotonic_ns,
        type_name=type(error).__name__,
        message=str(error),
        lost_peer=is_echo(error),
        traceback="".join(lines).rstrip("\n"),
    )


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename == __file__:
        first = first.tb_next
    return first if first is not None else trace


def _wind_down() -> None:
    """Do what the interpreter does at its end, as far as tested code can see it."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
