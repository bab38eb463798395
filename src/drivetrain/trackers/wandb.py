"""Logs to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from drivetrain.trackers.tracker import Tracker
from drivetrain.trackers.values import Scalar


class WandbTracker(Tracker):
    """Is one run of W&B, whose own files lie below `logging_dir`.

    Args:
        project_name: the project there.
        options: of `wandb.init`, such as `name`, `entity`, `tags` or `mode`.
    """

    name = "wandb"

    def __init__(self, project_name: str, *, logging_dir: Path, **options: Any) -> None:
        self._run = wandb.init(**{"project": project_name, "dir": str(logging_dir), **options})

    @property
    def tracker(self) -> Any:
        """The run, a `wandb.Run`."""
        return self._run

    def store_init_configuration(self, values: Mapping[str, object]) -> None:
        """Record the configuration as that of the run."""
        self._run.config.update(dict(values), allow_val_change=True)

    def log(self, values: Mapping[str, Scalar], step: int, **options: Any) -> None:
        """Record values.

        Args:
            options: of the run's `log`, such as `commit`.
        """
        present = {key: value for key, value in values.items() if value is not None}
        self._run.log(present, step=step, **options)

    def finish(self) -> None:
        """Send what is left; the run is finished."""
        self._run.finish()

    def fail(self) -> None:
        """Send what is left; the run is failed."""
        self._run.finish(exit_code=1)
