"""Logs to trackio."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trackio

from drivetrain.trackers.tracker import Tracker
from drivetrain.trackers.values import Scalar


class TrackioTracker(Tracker):
    """Is one run of trackio; where that is kept is trackio's setting.

    Args:
        project_name: the project there.
        options: of `trackio.init`, such as `name`, `group` or `space_id`.
    """

    name = "trackio"

    def __init__(self, project_name: str, *, logging_dir: Path, **options: Any) -> None:  # noqa: ARG002
        self._run = trackio.init(**{"project": project_name, **options})

    @property
    def tracker(self) -> Any:
        """The run, a `trackio.Run`."""
        return self._run

    def store_init_configuration(self, values: Mapping[str, object]) -> None:
        """Record the configuration as that of the run; trackio sends it with the first values."""
        self._run.config.update(values)

    def log(self, values: Mapping[str, Scalar], step: int, **options: Any) -> None:
        """Record values."""
        present = {key: value for key, value in values.items() if value is not None}
        self._run.log(present, step=step, **options)

    def finish(self) -> None:
        """Send what is left, and end the run."""
        self._run.finish()
