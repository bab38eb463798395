"""A tracker of a user's own that keeps what it is told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.trackers import Scalar, Tracker


class KeepingTracker(Tracker):
    """Keeps every call in `calls`."""

    name = "keeping"

    def __init__(self, project_name: str = "", *, logging_dir: Path | None = None, **options: Any) -> None:
        self.calls: list[tuple[Any, ...]] = [("init", project_name, logging_dir, options)]

    def store_init_configuration(self, values: Mapping[str, object]) -> None:
        """Keep the configuration."""
        self.calls.append(("config", values))

    def log(self, values: Mapping[str, Scalar], step: int, **options: Any) -> None:
        """Keep the values."""
        self.calls.append(("log", dict(values), step, options))

    def finish(self) -> None:
        """Keep that the run is finished."""
        self.calls.append(("finish",))

    def fail(self) -> None:
        """Keep that the run is failed."""
        self.calls.append(("fail",))
