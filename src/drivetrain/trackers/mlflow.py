"""Logs to MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow

from drivetrain.trackers.tracker import Tracker
from drivetrain.trackers.values import Scalar, flat_configuration, numbers_in, texts_in

_MAX_PARAMETERS = 100  # of one request. Source: MLflow's REST API, "Log Batch"


class MLflowTracker(Tracker):
    """Is one run of MLflow; where that is kept is MLflow's setting, such as `MLFLOW_TRACKING_URI`.

    Args:
        project_name: the experiment there.
        options: of `mlflow.start_run`, such as `run_name`, `tags` or `nested`.
    """

    name = "mlflow"

    def __init__(self, project_name: str, *, logging_dir: Path, **options: Any) -> None:  # noqa: ARG002
        mlflow.set_experiment(project_name)
        self._run = mlflow.start_run(**options)

    @property
    def tracker(self) -> Any:
        """The run, an `mlflow.ActiveRun`."""
        return self._run

    def store_init_configuration(self, values: Mapping[str, object]) -> None:
        """Record the configuration as parameters, with dotted keys."""
        flat = list(flat_configuration(values).items())
        for start in range(0, len(flat), _MAX_PARAMETERS):
            mlflow.log_params(dict(flat[start : start + _MAX_PARAMETERS]), run_id=self._run.info.run_id)

    def log(self, values: Mapping[str, Scalar], step: int, **options: Any) -> None:
        """Record numbers as metrics; texts as tags, of which MLflow keeps the last.

        Args:
            options: of `mlflow.log_metrics`, such as `synchronous`.
        """
        metrics = {key: float(number) for key, number in numbers_in(values).items()}
        if metrics:
            mlflow.log_metrics(metrics, step=step, run_id=self._run.info.run_id, **options)
        if texts := texts_in(values):
            mlflow.set_tags(texts)

    def finish(self) -> None:
        """End the run as finished."""
        mlflow.end_run("FINISHED")

    def fail(self) -> None:
        """End the run as failed."""
        mlflow.end_run("FAILED")
