"""The part of an accelerator that logs the values of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from drivetrain.cluster.process_group import Ranks
from drivetrain.config import RunConfig
from drivetrain.errors import ConfigError, Problem
from drivetrain.trackers import RunTrackers, Tracker, TrackerLike

LogWith = str | TrackerLike | Sequence[str | TrackerLike]


class Tracking:
    """Logs values of the main rank to `metrics.jsonl` and to the trackers of `log_with`.

    None of its members is collective, and other ranks do nothing in them: all ranks may call them, or the main one
    alone.
    """

    _trackers: RunTrackers

    @property
    def log_with(self) -> tuple[str, ...]:
        """Names of the trackers that were asked for."""
        return self._trackers.names

    @property
    def trackers(self) -> list[Tracker]:
        """The trackers that are open on this rank: none before `init_trackers`, and none but on the main rank."""
        return list(self._trackers.open)

    @property
    def logging_dir(self) -> Path:
        """The folder of the logs."""
        return self._trackers.logging_dir

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, object] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Open the trackers, and from then on `metrics.jsonl`.

        Args:
            project_name: what the run is filed under: a project, an experiment, a folder.
            config: what the run was started with; of values that are not plain, their text is stored.
            init_kwargs: further arguments of each tracker, by its name.

        Raises:
            TrackerError: trackers are open already, or `init_kwargs` names none of them.
        """
        self._trackers.start(project_name, config=config, init_kwargs=init_kwargs or {})

    def log(
        self,
        values: Mapping[str, object],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record values in all trackers. Reads devices on the main rank, with one transfer each.

        Args:
            values: numbers, texts, None for what is not there, and tensors with one element.
            step: what they belong to; `accelerator.step` if not given.
            log_kwargs: further arguments of each tracker's own call, by its name.

        Raises:
            TrackerError: no tracker is open, or a value cannot be logged.
        """
        self._trackers.log(values, step=step, log_kwargs=log_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return an open tracker; on other ranks an object that takes every call and does nothing.

        Args:
            unwrap: return the object of the library behind it, such as a `wandb.Run`.

        Raises:
            TrackerError: no tracker of this name is open.
        """
        tracker = self._trackers.find(name)
        return tracker.tracker if unwrap else tracker


def trackers_of(config: RunConfig, custom: Sequence[TrackerLike], ranks: Ranks) -> RunTrackers:
    """Return the trackers of a run, none of them open yet.

    Args:
        custom: those that are no names.
    """
    return RunTrackers(
        names=config.trackers,
        custom=custom,
        logging_dir=Path(config.logging_dir or config.project_dir or "."),
        is_main=ranks.rank == 0,
        current_step=lambda: ranks.control.updates,
    )


def split_log_with(log_with: LogWith | None) -> tuple[str | None, tuple[TrackerLike, ...]]:
    """Return the names in `Accelerator(log_with=...)` as a setting, None if it was not given, and the other trackers.

    Raises:
        ConfigError: it holds something that is neither.
    """
    if log_with is None:
        return None, ()
    given: list[object] = [*log_with] if isinstance(log_with, list | tuple) else [log_with]
    custom = [item for item in given if _is_tracker(item)]
    if strange := [item for item in given if not isinstance(item, str) and not _is_tracker(item)]:
        raise ConfigError(
            Problem(
                path="log_with",
                value=repr(item),
                source="Accelerator(log_with=...)",
                message="this is neither the name of a tracker nor a `drivetrain.trackers.Tracker` with a `name`",
                hint="derive a class from drivetrain.trackers.Tracker, and give it or an instance of it",
            )
            for item in strange
        )
    return ",".join(item for item in given if isinstance(item, str)) or "none", tuple(custom)


def _is_tracker(item: object) -> TypeGuard[TrackerLike]:
    is_one = isinstance(item, Tracker) or (isinstance(item, type) and issubclass(item, Tracker))
    return is_one and isinstance(getattr(item, "name", None), str)
