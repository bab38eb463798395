"""The life of one rank: from the first moment of its process, forked or spawned, to its exit.

A forked rank starts as a copy of the launcher and has to shed what is the launcher's: signal handlers, sockets, the
random state, the number of threads. A spawned one starts as `python -m drivetrain.launch.worker` with its order as
JSON. From there on both are the same, and both end the way an interpreter ends: threads, exit handlers, streams.
"""

from __future__ import annotations

import atexit
import faulthandler
import io
import json
import os
import random
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Collection, Mapping
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import asdict, dataclass
from typing import NoReturn

from drivetrain.cluster.environ import add_variables
from drivetrain.launch import failures
from drivetrain.launch.last_words import LastWords
from drivetrain.launch.lifeline import tie_to_parent
from drivetrain.launch.script import Script, run_as_main

HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FLUSH_FAILED = 120  # the interpreter's own exit code for this


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one rank is to do.

    Args:
        variables: the environment variables that are its own, added to those of the launcher.
        threads: CPU threads for torch.
        launcher_pid: the process that it must not outlive.
        log_file: gets its output, after what is there; None leaves it where the launcher's goes.
    """

    rank: int
    script: Script
    variables: Mapping[str, str]
    threads: int
    launcher_pid: int
    log_file: str | None = None


def to_json(order: Order, last_words: LastWords) -> str:
    """Return what a spawned rank has to know, as text for its command line."""
    return json.dumps([asdict(order), asdict(last_words)])


def from_json(text: str) -> tuple[Order, LastWords]:
    """Return what `to_json` was given."""
    fields, descriptors = json.loads(text)
    script = fields.pop("script")
    script["arguments"] = tuple(script["arguments"])
    return Order(script=Script(**script), **fields), LastWords(**descriptors)


def live(order: Order, last_words: LastWords) -> NoReturn:
    """Be that rank, until the process ends. Never returns into the copy of the launcher's stack."""
    code = 1
    try:
        _shed_launcher(order, last_words)
        code = _finish(_run(order, last_words))
    except BaseException:  # noqa: BLE001 - the border of the process
        traceback.print_exc()
    finally:
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def _shed_launcher(order: Order, last_words: LastWords) -> None:
    _reset_signals()
    tie_to_parent(order.launcher_pid)
    _close_descriptors(keep=last_words.descriptors)
    if order.log_file is not None:
        _redirect_output(order.log_file)
    add_variables(order.variables)
    _reseed()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(order.threads)
    faulthandler.enable(last_words.crash_fd)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in HANDLED_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # The launcher blocks them around the fork, so that its handlers never run in a rank.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)


def _close_descriptors(*, keep: Collection[int]) -> None:
    """Close what was inherited besides the standard streams, such as the sockets of the launcher's store; not pipes.

    One pair of pipes is libuv's, below that store: it closes them by number in every process that is forked, so that
    closing them here would make loader workers lose whatever has got those numbers since.
    """
    for number in keep:
        os.set_inheritable(number, False)
    for number in _open_descriptors():
        with suppress(OSError):
            if number > 2 and number not in keep and not stat.S_ISFIFO(os.fstat(number).st_mode):
                os.close(number)


def _open_descriptors() -> list[int]:
    for folder in ("/proc/self/fd", "/dev/fd"):
        with suppress(OSError):
            return [int(name) for name in os.listdir(folder)]
    return list(range(3, 4096))


def _redirect_output(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def _reseed() -> None:
    """Give this process random states of its own, as a process that was not forked has."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()


def _run(order: Order, last_words: LastWords) -> int:
    """Run the program, record what it raised, and return the exit code, negative for a signal."""
    try:
        run_as_main(order.script)
    except SystemExit as stop:
        code, message = _meaning(stop)
        if message is not None:
            print(message, file=sys.stderr)
        if code != 0:
            _record(stop, order, last_words)
        return code
    except KeyboardInterrupt as stop:
        _record(stop, order, last_words)
        return -signal.SIGINT
    except BaseException as error:  # noqa: BLE001 - the border of the process: whatever ends it is recorded
        _record(error, order, last_words)
        return 1
    return 0


def _record(error: BaseException, order: Order, last_words: LastWords) -> None:
    sys.last_value = error  # as the interpreter does: exit handlers can see that the process fails
    record = failures.record_of(error, rank=order.rank)
    try:
        last_words.write(record)
    except OSError:
        sys.stderr.write(record.traceback)
    if not isinstance(error, SystemExit):
        _tell_hook(error)


def _tell_hook(error: BaseException) -> None:
    """Call the exception hook that the script or a tracker has set; Python's own is left out, the launcher prints.

    torch sets one with a process group, which prints and passes on to the one before; its output is dropped.
    """
    hook = sys.excepthook
    if hook is sys.__excepthook__:
        return
    is_torch = getattr(hook, "__module__", "").startswith("torch.")
    with redirect_stderr(io.StringIO()) if is_torch else nullcontext():
        hook(type(error), error, failures.script_traceback(error))


def _meaning(stop: SystemExit) -> tuple[int, object | None]:
    """Return the exit code and the message, if any, that Python gives to a SystemExit."""
    if stop.code is None:
        return 0, None
    if isinstance(stop.code, int):
        return stop.code & 0xFF, None
    return 1, stop.code


def _finish(code: int) -> int:
    """Do what an interpreter does before it ends: wait for threads, run exit handlers, flush; return the exit code."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError):
            code = code or _FLUSH_FAILED
    return code


if __name__ == "__main__":
    live(*from_json(sys.argv[1]))
