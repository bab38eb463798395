"""The exception tree of drivetrain.

    DrivetrainError
    |-- ConfigError            settings: unknown, contradictory, of the wrong type
    |-- LaunchError            processes could not be started, or the environment is half set
    |-- TopologyError          ranks, devices or process groups do not fit what was asked for
    |   `-- RankMismatchError  ranks do different things: another call, another value
    |-- PrepareError           an object that `prepare` cannot take
    |-- TrainingStepError      `backward`, `clip_*` or `step` in an order that gives wrong gradients
    |   `-- NonFiniteError     a gradient is inf or NaN, and the policy says to stop
    |-- DataError              a loader or its data cannot be shared out as asked
    `-- TrackerError           values cannot be logged, or a tracker is not open

Catch `DrivetrainError` to catch all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class DrivetrainError(Exception):
    """Root of everything that drivetrain raises on purpose.

    Args:
        message: what was found and what was expected.
        hint: the exact flag, key or call that changes it.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = message
        self.hint = hint
        super().__init__(message if hint is None else f"{message}\n  hint: {hint}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with the settings.

    Args:
        path: dotted key as the user wrote it, such as `fsdp_config.fsdp_version`; empty for a file as a whole.
        value: what was found there, as text; None when there is nothing to show.
        source: where it came from, such as `run.yaml line 9`, `flag --num_processes` or `Accelerator(seed=...)`.
        message: why it cannot be used.
        hint: the fix.
    """

    path: str
    message: str
    value: str | None = None
    source: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        head = self.path if self.value is None else f"{self.path} = {self.value}"
        if self.source is not None:
            head = f"{head} ({self.source})" if head else self.source
        lines = [f"  {head}", f"    {self.message}"]
        if self.hint is not None:
            lines.append(f"    hint: {self.hint}")
        return "\n".join(lines)


class ConfigError(DrivetrainError):
    """All problems of the settings at once, ordered by path."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: problem.path))
        count = len(self.problems)
        noun = "problem" if count == 1 else "problems"
        super().__init__("\n".join([f"{count} {noun} in the configuration", *map(str, self.problems)]))


class LaunchError(DrivetrainError):
    """Processes could not be started, or the environment that should describe them is incomplete."""


class TopologyError(DrivetrainError):
    """Ranks, devices or process groups do not fit what was asked for."""


class RankMismatchError(TopologyError):
    """Ranks reached different calls, or the same call with values that must agree and do not."""


class PrepareError(DrivetrainError):
    """`prepare` was given something that it cannot take."""


class TrainingStepError(DrivetrainError):
    """`backward`, `clip_*`, `unscale_gradients` or `step` were called in an order that gives wrong gradients."""


class NonFiniteError(TrainingStepError):
    """A gradient is inf or NaN and `non_finite` is `raise`."""


class DataError(DrivetrainError):
    """A data loader or its data cannot be shared out as asked."""


class TrackerError(DrivetrainError):
    """Values cannot be logged as asked, or a tracker cannot be used."""
