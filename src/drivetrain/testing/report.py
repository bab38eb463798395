"""Turns what the ranks of one call left behind into results, or into an error that ends with the first cause."""

from __future__ import annotations

import pickle
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.errors import DrivetrainError
from drivetrain.testing.exchange import Ended, Outcome, Raised, Request, Returned, read_outcome

OUTPUT_LINES = 30
_NOISE = re.compile(r'^  File ".*(testing/(rank_process|fork_server)\.py|<frozen runpy>)"|^Extension modules: ')

# What a rank raises that waited in vain for another one, which is then the one to look at.
_WAITED = re.compile(r"timed out", re.IGNORECASE)


class RanksFailed(DrivetrainError):
    """At least one rank raised, died or was not done in time.

    Args:
        failures: rank -> what happened there, in the order of the message: the first cause comes last.
        exceptions: rank -> (name of the type, message), for the ranks that raised.
    """

    def __init__(self, message: str, *, failures: Mapping[int, str], exceptions: Mapping[int, tuple[str, str]]) -> None:
        self.failures = dict(failures)
        self.exceptions = dict(exceptions)
        super().__init__("\n\n".join([message, *failures.values()]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One finished call.

    Args:
        ended: the end of every rank's process.
        on_time: the ranks that ended by themselves; the others were stopped.
        timeout_seconds: what the call had.
        grace_seconds: what the others had after the first failure.
    """

    request: Request
    ended: Mapping[int, Ended]
    on_time: frozenset[int]
    timeout_seconds: float
    grace_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    rank: int
    text: str
    monotonic_ns: int
    is_cause: bool
    exception: tuple[str, str] | None = None


def results(run: Run) -> list[Any]:
    """Return the ranks' results in order, and repeat here what they printed; RanksFailed unless all are good."""
    outcomes = {rank: read_outcome(run.request.path(rank, "outcome")) for rank in range(run.request.ranks)}
    failures = [failure for rank in outcomes if (failure := _failure(run, rank=rank, outcome=outcomes[rank]))]
    _repeat_output(run.request)
    if failures:
        raise _error(run, failures=failures)
    return [pickle.loads(outcome.value) for outcome in outcomes.values() if isinstance(outcome, Returned)]


def _failure(run: Run, *, rank: int, outcome: Outcome | None) -> _Failure | None:
    end = run.ended[rank]
    if isinstance(outcome, Raised):
        return _Failure(
            rank=rank,
            text=f"rank {rank} raised:\n{outcome.traceback}",
            monotonic_ns=outcome.monotonic_ns,
            is_cause=not outcome.lost_peer and _WAITED.search(outcome.message) is None,
            exception=(outcome.type_name, outcome.message),
        )
    if rank in run.on_time and outcome is not None and end.exit_code == 0:
        return None
    when = "before" if outcome is None else "after"
    if rank in run.on_time:
        how = f"{_end_in_words(end.exit_code)} {when} `{run.request.function.qualname}` returned"
        detail = _tail(run.request.path(rank, "stderr"))
    else:
        how = f"was stopped {when} `{run.request.function.qualname}` returned; it was here:"
        detail = _stack(run.request.path(rank, "stack"))
    return _Failure(
        rank=rank,
        text="\n".join(filter(None, [f"rank {rank} {how}", detail])),
        monotonic_ns=end.monotonic_ns,
        is_cause=rank in run.on_time,
    )


def _error(run: Run, *, failures: list[_Failure]) -> RanksFailed:
    # Stopped ones and those that lost a peer, then the causes, each from late to early: what happened first is last.
    order = sorted(failures, key=lambda failure: (failure.is_cause, -failure.monotonic_ns))
    name = run.request.function.qualname
    unfinished = [rank for rank in range(run.request.ranks) if rank not in run.on_time]
    if len(unfinished) == len(failures):
        message = (
            f"{_ranks_in_words(unfinished)} of {run.request.ranks} had not finished `{name}` "
            f"after {run.timeout_seconds:g} s"
        )
    else:
        message = f"{len(failures)} of {run.request.ranks} ranks failed in `{name}`, the first one last"
        if unfinished:
            message += f" ({_ranks_in_words(unfinished)} stopped {run.grace_seconds:g} s later)"
    return RanksFailed(
        message,
        failures={failure.rank: failure.text for failure in order},
        exceptions={failure.rank: failure.exception for failure in order if failure.exception is not None},
    )


def _ranks_in_words(ranks: list[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _end_in_words(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    return f"ended with exit code {exit_code}"


def _tail(path: Path) -> str:
    return "\n".join(_lines(path)[-OUTPUT_LINES:])


def _stack(path: Path) -> str:
    return "\n".join(_lines(path)) or "  (it did not answer)"


def _lines(path: Path) -> list[str]:
    """Return the file's lines without what `faulthandler` says about the harness and about loaded modules."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return [line for line in text.splitlines() if not _NOISE.search(line)]


def _repeat_output(request: Request) -> None:
    for kind, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        for rank in range(request.ranks):
            path = request.path(rank, kind)
            text = path.read_text(errors="replace") if path.exists() else ""
            for line in text.splitlines():
                print(f"[rank {rank}] {line}", file=stream)
