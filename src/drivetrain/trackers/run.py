"""The trackers of one run: made together, logged to together, ended together."""

from __future__ import annotations

import atexit
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from drivetrain.cluster.log import say
from drivetrain.errors import TrackerError
from drivetrain.registry import resolve, tracker_specs
from drivetrain.trackers.json_lines import JsonLines
from drivetrain.trackers.tracker import SilentTracker, Tracker
from drivetrain.trackers.values import plain_configuration, plain_values

TrackerLike = Tracker | type[Tracker]
Options = Mapping[str, Mapping[str, Any]]


class RunTrackers:
    """The trackers that a run was asked to log with, and the file of JSON lines that it always has.

    Args:
        names: of trackers in the registry; `all` for those that are installed, `none` for none.
        custom: trackers of the user's own.
        logging_dir: where files go.
        is_main: whether this is the main rank; elsewhere nothing is made, read or written.
        current_step: the number of updates so far.
    """

    def __init__(
        self,
        *,
        names: Sequence[str],
        custom: Sequence[TrackerLike],
        logging_dir: Path,
        is_main: bool,
        current_step: Callable[[], int],
    ) -> None:
        self.logging_dir = logging_dir
        self._names = [*dict.fromkeys(known for name in names for known in _expanded(name))]
        self._custom = tuple(custom)
        self._is_main = is_main
        self._current_step = current_step
        self._open: tuple[Tracker, ...] = ()
        _check_doubles(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The trackers that were asked for."""
        return (*self._names, *(tracker.name for tracker in self._custom))

    @property
    def open(self) -> tuple[Tracker, ...]:
        """The trackers that are at work; none before `start`, after `finish`, and on other ranks."""
        return self._open

    def start(self, project_name: str, *, config: Mapping[str, object] | None, init_kwargs: Options) -> None:
        """Make all trackers and record the configuration; those already made are ended when one cannot be.

        Raises:
            TrackerError: trackers are open already, or `init_kwargs` names none of those asked for.
        """
        if not self._is_main:
            return
        if self._open:
            raise TrackerError(
                "init_trackers() was called before, and its trackers are open",
                hint="call it once; end_training() ends the trackers",
            )
        if config is not None and not isinstance(config, Mapping):
            raise TrackerError(f"`config` is a {type(config).__name__}, and no mapping", hint="pass config=vars(args)")
        makers = self._makers(project_name)
        _check_options("init_kwargs", init_kwargs, names=[name for name, make in makers.items() if make])
        with ExitStack() as on_failure:
            opened: list[Tracker] = []
            for name, make in makers.items():
                tracker = self._instance(name) if make is None else make(**init_kwargs.get(name, {}))
                on_failure.callback(tracker.fail)
                opened.append(tracker)
            if config is not None:
                stored = plain_configuration(config)
                assert isinstance(stored, dict)
                for tracker in opened:
                    tracker.store_init_configuration(stored)
            on_failure.pop_all()
        self._open = tuple(opened)
        # The last to be registered is the first to run: before libraries of trackers end their runs as finished.
        atexit.register(self._finish_at_exit)
        others = f", and to {', '.join(self.names)}" if self.names else ""
        say(f"values are logged to {self.logging_dir / 'metrics.jsonl'}{others}")

    def log(self, values: Mapping[str, object], *, step: int | None, log_kwargs: Options) -> None:
        """Record values in all trackers, the JSON lines first; on other ranks nothing is even read.

        Args:
            step: the number of updates so far if None.

        Raises:
            TrackerError: no tracker is open, or something cannot be logged.
        """
        if not self._is_main:
            return
        if not self._open:
            raise TrackerError(
                "log() found no open tracker: nothing would be recorded",
                hint="call init_trackers('project') first, and log before end_training()",
            )
        if log_kwargs:
            _check_options("log_kwargs", log_kwargs, names=[tracker.name for tracker in self._open])
        number = self._current_step() if step is None else _step(step)
        plain = plain_values(values)
        for tracker in self._open:
            tracker.log(plain, number, **log_kwargs.get(tracker.name, {}))

    def find(self, name: str) -> Tracker:
        """Return an open tracker by its name; on other ranks one that does nothing.

        Raises:
            TrackerError: there is none.
        """
        if not self._is_main:
            return SilentTracker()
        for tracker in self._open:
            if tracker.name == name:
                return tracker
        known = ", ".join(tracker.name for tracker in self._open) or "none, call init_trackers() first"
        hint = _did_you_mean(name, [tracker.name for tracker in self._open])
        raise TrackerError(f"no tracker {name!r} is open; open: {known}", hint=hint)

    def finish(self, *, is_failing: bool) -> None:
        """End all trackers, once; the failure of one keeps no other from ending.

        Args:
            is_failing: the run ends by an error, which is not to be covered by one of a tracker.

        Raises:
            TrackerError: a tracker could not be ended, and the run is not failing.
        """
        ended, self._open = self._open, ()
        atexit.unregister(self._finish_at_exit)
        failures: dict[str, Exception] = {}
        for tracker in ended:
            try:
                if is_failing:
                    tracker.fail()
                else:
                    tracker.finish()
            except Exception as error:  # noqa: BLE001 - the border to other people's code; raised below
                failures[tracker.name] = error
        for name, failure in failures.items():
            message = f"the tracker {name!r} could not be ended: {type(failure).__name__}: {failure}"
            if not is_failing:
                raise TrackerError(message) from failure
            say(message)

    def _finish_at_exit(self) -> None:
        self.finish(is_failing=getattr(sys, "last_value", None) is not None)

    def _makers(self, project_name: str) -> dict[str, Callable[..., Tracker] | None]:
        """Return by its name what makes each tracker; None for one that exists."""
        classes: dict[str, Callable[..., Tracker]] = {JsonLines.name: JsonLines}
        classes |= {name: resolve(tracker_specs()[name].implementation) for name in self._names}
        classes |= {tracker.name: tracker for tracker in self._custom if isinstance(tracker, type)}
        arguments = {"logging_dir": self.logging_dir}
        return {
            **{name: partial(tracker, project_name, **arguments) for name, tracker in classes.items()},
            **{tracker.name: None for tracker in self._custom if isinstance(tracker, Tracker)},
        }

    def _instance(self, name: str) -> Tracker:
        return next(item for item in self._custom if isinstance(item, Tracker) and item.name == name)


def _expanded(name: str) -> list[str]:
    if name == "all":
        return [spec.name for spec in tracker_specs().values() if spec.is_installed]
    return [] if name == "none" else [name]


def _check_doubles(names: Iterable[str]) -> None:
    seen = {JsonLines.name}
    for name in names:
        if name in seen:
            raise TrackerError(f"two trackers are called {name!r}", hint="give each class or instance its own `name`")
        seen.add(name)


def _check_options(argument: str, options: Options, *, names: Sequence[str]) -> None:
    for name, inner in options.items():
        if name not in names:
            hint = _did_you_mean(name, names) or f"it is keyed by tracker: {argument}={{'{names[-1]}': {{...}}}}"
            raise TrackerError(f"`{argument}` names {name!r}, which is none of: {', '.join(names)}", hint=hint)
        if not isinstance(inner, Mapping):
            raise TrackerError(f"`{argument}[{name!r}]` is a {type(inner).__name__}, and no mapping of arguments")


def _did_you_mean(name: object, names: Iterable[str]) -> str | None:
    near = get_close_matches(str(name), list(names), n=1)
    return f"did you mean {near[0]!r}?" if near else None


def _step(step: object) -> int:
    try:
        return operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise TrackerError(f"`step` is {step!r}, a {type(step).__name__}, and no whole number") from None
