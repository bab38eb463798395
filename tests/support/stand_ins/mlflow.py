"""Stands in for MLflow 3.17: the calls that its adapter makes, with the real names of their arguments, recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

calls: list[tuple[Any, ...]] = []

MAX_PARAMETERS = 100


@dataclass
class RunInfo:
    """Of a run."""

    run_id: str = "run-1"


@dataclass
class ActiveRun:
    """What `start_run` returns."""

    info: RunInfo = field(default_factory=RunInfo)


def set_experiment(experiment_name: str | None = None, experiment_id: str | None = None) -> None:
    """Record the call."""
    calls.append(("set_experiment", experiment_name))


def start_run(
    run_id: str | None = None, experiment_id: str | None = None, run_name: str | None = None, nested: bool = False
) -> ActiveRun:
    """Record the call."""
    calls.append(("start_run", run_name, nested))
    return ActiveRun()


def log_params(params: dict[str, Any], synchronous: bool | None = None, run_id: str | None = None) -> None:
    """Record the call; like the real one, take no more than a hundred."""
    assert len(params) <= MAX_PARAMETERS
    calls.append(("log_params", params, run_id))


def log_metrics(
    metrics: dict[str, float], step: int | None = None, synchronous: bool | None = None, run_id: str | None = None
) -> None:
    """Record the call."""
    assert all(type(value) is float for value in metrics.values())
    calls.append(("log_metrics", metrics, step, synchronous, run_id))


def set_tags(tags: dict[str, Any], synchronous: bool | None = None) -> None:
    """Record the call."""
    calls.append(("set_tags", tags))


def end_run(status: str = "FINISHED") -> None:
    """Record the call."""
    calls.append(("end_run", status))
