"""How ranks ended, which of them failed first, and what the user reads about it.

Two ideas. A *record* is what a rank that raises leaves, with a time in nanoseconds: it survives whatever happens to
the process afterwards. An *ending* is what the launcher saw of a rank: its record, its exit code and when it was gone.
`first_failure` picks the cause from the endings by rule, because order of arrival alone names the wrong rank: when one
rank dies, the others fail too, in the collective where they waited for it.
"""

from __future__ import annotations

import os
import re
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from drivetrain.errors import RankMismatchError

# What gloo, NCCL and the store say when the process at the other end is gone, and how to know that they say it.
_LOST_PEER = re.compile(
    r"connection (was likely )?(closed|reset|refused|aborted)|broken pipe|socket closed|no route to host"
    r"|remote process exited|communicator was aborted|connectfullmesh failed|failed to (recv|send)",
    re.IGNORECASE,
)
_LEAVING_NS = 1_000_000_000  # from closing a process group to the end of the process
_TRANSPORT = re.compile(r"gloo|nccl|c10d|tcpstore|torch\.distributed", re.IGNORECASE)
_SOURCE_FILE = re.compile(r"^\[\S+\.(cc|cpp|h):\d+\] ")  # gloo's own, in front of its messages
_INSTALLED = re.compile(r"site-packages|dist-packages|/lib/python3|^<frozen")
_TEXT_LIMIT = 20_000
_HERE = os.path.dirname(__file__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a rank wrote about the exception that ended it.

    Args:
        monotonic_ns: when; one clock for all processes of a machine.
        type: class of the exception, with its module unless it is a built-in one.
        text: the message.
        place: `file:line` where it was raised, empty when unknown.
        traceback: as Python prints it, without the launcher's frames.
        lost_peer: whether this is only the echo of another process's end.
    """

    rank: int
    monotonic_ns: int
    type: str
    text: str
    place: str
    traceback: str
    lost_peer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the launcher saw one rank end.

    Args:
        exit_code: as `subprocess` gives it, negative for a signal; None when the rank had not ended by itself.
        ended_ns: when it was seen to be gone, on the clock of `Record.monotonic_ns`.
        crash: stack of the interpreter at a fatal signal, empty when there is none.
    """

    rank: int
    exit_code: int | None
    ended_ns: int
    record: Record | None = None
    crash: str = ""

    @property
    def failed(self) -> bool:
        """Whether the rank ended by itself, and not well."""
        return self.record is not None or (self.exit_code is not None and self.exit_code != 0)

    @property
    def is_victim(self) -> bool:
        """Whether the rank failed only because another one was gone."""
        return self.record is not None and self.record.lost_peer

    @property
    def failed_ns(self) -> int:
        """When it failed: its own word where there is one, else when the launcher saw it."""
        return self.ended_ns if self.record is None else self.record.monotonic_ns


def record_of(error: BaseException, *, rank: int) -> Record:
    """Return the record of an exception that has just been caught."""
    trace = script_traceback(error)
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return Record(
        rank=rank,
        monotonic_ns=time.monotonic_ns(),
        type=f"{module}{kind.__qualname__}",
        text=_text_of(error)[:_TEXT_LIMIT],
        place=_place(error, trace),
        traceback="".join(traceback.format_exception(kind, error, trace)),
        lost_peer=is_echo(error),
    )


def is_echo(error: BaseException) -> bool:
    """Return whether an exception says only that the process at the other end is gone.

    An error that says where all ranks were is a cause, though a lost connection brought it up.
    """
    return not isinstance(error, RankMismatchError) and any(_is_lost_peer(link) for link in _chain(error))


def script_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback of an exception from the script's first frame on, as `python script.py` would have it."""
    trace = error.__traceback__
    while trace is not None and _is_launcher(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def script_stack(crash: str) -> str:
    """Return what faulthandler wrote at a fatal signal, without the launcher's frames and the list of extensions."""
    kept: list[str] = []
    in_launcher = False
    for line in crash.splitlines():
        frame = re.match(r'  File "([^"]*)"', line)
        in_launcher = frame is not None and (in_launcher or _is_launcher(frame[1]))
        if not in_launcher and not line.startswith("Extension modules:"):
            kept.append(line)
    return "\n".join(kept).strip()


def first_failure(endings: Sequence[Ending]) -> Ending | None:
    """Return the ending that made the others fail, or None when all ranks ended well.

    The earliest failure that is not the echo of a lost peer. When all are echoes, a rank that ended with exit code 0
    left the others alone in a collective, and is the cause: it closes its connections before it ends, so it may be seen
    to end a moment after the echo. Without one, the earliest echo is returned (the peer was on another machine).
    """
    failures = sorted((ending for ending in endings if ending.failed), key=lambda ending: ending.failed_ns)
    for ending in failures:
        if not ending.is_victim:
            return ending
    if not failures:
        return None
    latest_ns = failures[0].failed_ns + _LEAVING_NS
    deserters = [ending for ending in endings if ending.exit_code == 0 and ending.ended_ns <= latest_ns]
    return min(deserters, key=lambda ending: ending.ended_ns, default=failures[0])


def report(endings: Sequence[Ending], *, program: str) -> str:
    """Return the text for the screen: a line for each other rank, then the cause, its last line naming it again."""
    cause = first_failure(endings)
    if cause is None:
        return ""
    lines = [*_fold([ending for ending in endings if ending is not cause])]
    details = cause.crash if cause.record is None else cause.record.traceback
    if details and not (cause.record is not None and cause.record.type == "SystemExit"):
        lines += [f"rank {cause.rank} of `{program}`:", details.rstrip("\n")]
    lines.append(f"error: rank {cause.rank} {_verdict(cause)}")
    if hint := _hint(cause):
        lines.append(f"  hint: {hint}")
    return "\n".join(lines) + "\n"


def _verdict(cause: Ending) -> str:
    if cause.record is not None:
        where = f" ({cause.record.place})" if cause.record.place else ""
        if cause.record.type == "SystemExit":
            return f"ended by sys.exit({cause.record.text}){where}"
        return f"{'lost a peer' if cause.is_victim else 'failed'}: {_headline(cause.record)}{where}"
    if cause.exit_code == 0:
        return "ended with exit code 0 while other ranks still waited for it"
    if cause.exit_code is not None and cause.exit_code < 0:
        return f"was killed by {_signal_name(-cause.exit_code)}"
    return f"ended with exit code {cause.exit_code}"


def _hint(cause: Ending) -> str | None:
    if cause.is_victim:
        return "the other end closed the connection first: it had finished its part, or it failed on another machine"
    if cause.record is None and cause.exit_code == -signal.SIGKILL:
        return "maybe out of memory: the kernel kills a process so, and its log (`dmesg`) says so"
    if cause.record is None and cause.exit_code == 0:
        return "every rank must make the same number of steps and collective calls"
    return None


def _fold(endings: Sequence[Ending]) -> Iterator[str]:
    """Yield one line for each rank that failed too, and one for all that were stopped."""
    for ending in endings:
        if ending.failed:
            yield f"rank {ending.rank} {_verdict(ending)}"
    stopped = [str(ending.rank) for ending in endings if ending.exit_code is None and not ending.failed]
    if stopped:
        noun = "rank" if len(stopped) == 1 else "ranks"
        yield f"{noun} {', '.join(stopped)} stopped by the launcher"


def _headline(record: Record, *, limit: int = 160) -> str:
    lines = record.text.strip().splitlines()
    text = _SOURCE_FILE.sub("", lines[0]) if lines else ""
    if len(text) > limit:
        text = f"{text[:limit]}..."
    return f"{record.type}: {text}" if text else record.type


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"


def _place(error: BaseException, trace: TracebackType | None) -> str:
    """Return `file:line` of the innermost frame that is not inside an installed package, else of the innermost."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if not _INSTALLED.search(frame.filename)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - whatever the __str__ of a script's class raises, there must be a record
        return f"<str() of it raised {type(broken).__name__}>"


def _is_launcher(filename: str) -> bool:
    return os.path.dirname(filename) == _HERE


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _is_lost_peer(error: BaseException) -> bool:
    text = _text_of(error)
    is_transport = _TRANSPORT.search(f"{type(error).__module__} {text}") is not None
    return isinstance(error, RuntimeError) and is_transport and _LOST_PEER.search(text) is not None
