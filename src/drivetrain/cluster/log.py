"""What is said while a run goes on: lines of drivetrain's own, and loggers for scripts that know about ranks.

Loads without torch; a logger looks for a process group only where something else has loaded torch's.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from drivetrain.cluster.environ import read_environ
from drivetrain.errors import ConfigError, LaunchError, Problem, TopologyError


def say(line: str) -> None:
    """Print a line; who is to say it is the caller's business."""
    print(f"drivetrain: {line}", file=sys.stderr, flush=True)


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """Return the logger of this name in a form that knows about ranks; may be used before there is an accelerator.

    Args:
        log_level: of this logger, such as `INFO`; if not given, what Python's logging says.

    Raises:
        ConfigError: there is no such level.
    """
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(_level(log_level))
    return RankLogger(logger)


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose records come from the main rank alone, unless a call says otherwise.

    Every method of a logger takes two further arguments:

    - `main_process_only`: False for a record from each rank; True by default;
    - `in_order`: such records one after another, by rank. Collective: every rank must make the call, whatever its
      level is.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._warned: set[str] = set()

    def log(  # type: ignore[override]  # there, what else it takes may be anything
        self,
        level: int,
        msg: object,
        *args: object,
        main_process_only: bool = True,
        in_order: bool = False,
        stacklevel: int = 1,
        **kwargs: Any,
    ) -> None:
        """Log a record on the main rank; or on each rank, then in their order if asked for."""
        takes_turns = in_order and not main_process_only
        is_enabled = self.isEnabledFor(level)
        if not (is_enabled or takes_turns):
            return
        place = _place()
        for turn in range(place.group_size if takes_turns else 1):
            is_its_turn = turn == place.group_rank if takes_turns else place.rank == 0 or not main_process_only
            if is_enabled and is_its_turn:
                # One level more: this method stands between the logger and the caller.
                self.logger.log(level, msg, *args, stacklevel=stacklevel + 1, **kwargs)
            if takes_turns:
                place.wait()

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a warning unless this logger has logged the same one before."""
        key = repr((msg, args))
        if key not in self._warned:
            self._warned.add(key)
            self.warning(msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where among the ranks this process is, and in the process group that they meet in; alone while there is none."""

    rank: int
    group_rank: int = 0
    group_size: int = 1

    def wait(self) -> None:
        """Wait for the other ranks of the group."""
        if self.group_size == 1:
            return
        distributed = sys.modules["torch.distributed"]
        try:
            distributed.barrier()
        except RuntimeError as error:
            raise TopologyError(
                f"rank {self.rank} waited in a log call with in_order=True and another rank did not come: {error}",
                hint="every rank must make such a call; look for the rank that failed or left first",
            ) from error


def _place() -> _Place:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank = distributed.get_rank()
        return _Place(rank=rank, group_rank=rank, group_size=distributed.get_world_size())
    try:
        return _Place(rank=read_environ().rank)
    except LaunchError:  # a half-set environment is for the accelerator to refuse; to log is better than not to
        return _Place(rank=0)


def _level(name: str) -> str:
    levels = logging.getLevelNamesMapping()
    if str(name).upper() in levels:
        return str(name).upper()
    near = get_close_matches(str(name).upper(), levels, n=1)
    raise ConfigError(
        [
            Problem(
                path="log_level",
                value=str(name),
                source="get_logger(log_level=...)",
                message=f"allowed: {', '.join(levels)}",
                hint=f"did you mean `{near[0]}`?" if near else None,
            )
        ]
    )
