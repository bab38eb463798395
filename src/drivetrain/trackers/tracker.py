"""The one interface that every tracker has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from drivetrain.trackers.values import Scalar


class Tracker(ABC):
    """Records the values of one run in one place.

    A subclass given as `Accelerator(log_with=MyTracker)` is called by `init_trackers`, on the main rank alone, as
    `MyTracker(project_name, logging_dir=..., **init_kwargs)`; an instance is taken as it is.

    Attributes:
        name: what `get_tracker`, `init_kwargs` and `log_kwargs` call it.
    """

    name: str

    @property
    def tracker(self) -> Any:
        """The object of the library behind it, for all that the library can and this interface cannot."""
        return self

    @abstractmethod
    def store_init_configuration(self, values: Mapping[str, object]) -> None:
        """Record what the run was started with: nested mappings and lists of plain values."""

    @abstractmethod
    def log(self, values: Mapping[str, Scalar], step: int, **options: Any) -> None:
        """Record values; one that is None was not there at this step.

        Args:
            options: what `log_kwargs` holds for this tracker.
        """

    def finish(self) -> None:
        """Write out what is left, and close."""
        return

    def fail(self) -> None:
        """Do as `finish` does, and record that the run ended by an error, where that can be told."""
        self.finish()


class SilentTracker(Tracker):
    """What ranks get that log nothing: it has every method and attribute, and none does anything."""

    name = "silent"

    def store_init_configuration(self, values: Mapping[str, object]) -> None:
        """Do nothing."""

    def log(self, values: Mapping[str, Scalar], step: int = 0, **options: Any) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> SilentTracker:
        if name.startswith("__"):  # what Python itself looks for, such as __array__
            raise AttributeError(name)
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> SilentTracker:
        """Do nothing, whatever method this stands for."""
        return self
