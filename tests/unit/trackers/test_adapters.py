"""What the adapters of other libraries call there; against stand-ins, as these libraries are large."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from drivetrain.registry import resolve, tracker_specs
from drivetrain.trackers import Tracker

STAND_INS = Path(__file__).parents[2] / "support" / "stand_ins"
NAMES = ("wandb", "mlflow", "trackio")
VALUES: dict[str, Any] = {"loss": 0.5, "count": 3, "text": "x", "absent": None}
CONFIGURATION = {"lr": 0.1, "deep": {"betas": [0.9, 0.99]}}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the stand-ins in the place of the libraries, installed or not."""
    modules = [name for library in NAMES for name in (library, f"drivetrain.trackers.{library}")]
    earlier = {name: sys.modules.pop(name) for name in modules if name in sys.modules}
    monkeypatch.syspath_prepend(STAND_INS)
    yield
    for name in modules:
        sys.modules.pop(name, None)
    sys.modules.update(earlier)


def opened(library: str, folder: Path, **options: Any) -> tuple[ModuleType, Tracker]:
    """Return a stand-in and the tracker that has called it."""
    tracker = resolve(tracker_specs()[library].implementation)("project", logging_dir=folder, **options)
    module = import_module(library)
    assert module.__file__ == str(STAND_INS / f"{library}.py")
    return module, tracker


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("end", "exit_code"), [("finish", None), ("fail", 1)])
def test_wandb_when_a_run_is_logged_then_gets_values_and_how_it_ended(
    tmp_path: Path, end: str, exit_code: int | None
) -> None:
    wandb, tracker = opened("wandb", tmp_path, name="first", mode="offline")
    tracker.store_init_configuration(CONFIGURATION)
    tracker.log(VALUES, 7, commit=False)
    getattr(tracker, end)()
    assert isinstance(tracker.tracker, wandb.Run)
    assert wandb.calls == [
        ("init", "project", str(tmp_path), "first", "offline"),
        ("config.update", CONFIGURATION, True),
        ("log", {"loss": 0.5, "count": 3, "text": "x"}, 7, False),
        ("finish", exit_code),
    ]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("end", "status"), [("finish", "FINISHED"), ("fail", "FAILED")])
def test_mlflow_when_a_run_is_logged_then_gets_values_and_how_it_ended(tmp_path: Path, end: str, status: str) -> None:
    mlflow, tracker = opened("mlflow", tmp_path, run_name="first", nested=True)
    tracker.store_init_configuration(CONFIGURATION)
    tracker.log(VALUES, 7, synchronous=False)
    tracker.log({"absent": None}, 8)
    getattr(tracker, end)()
    assert isinstance(tracker.tracker, mlflow.ActiveRun)
    assert mlflow.calls == [
        ("set_experiment", "project"),
        ("start_run", "first", True),
        ("log_params", {"lr": 0.1, "deep.betas": "[0.9, 0.99]"}, "run-1"),
        ("log_metrics", {"loss": 0.5, "count": 3.0}, 7, False, "run-1"),
        ("set_tags", {"text": "x"}),
        ("end_run", status),
    ]


@pytest.mark.usefixtures("stand_ins")
def test_mlflow_when_a_configuration_is_larger_than_a_request_then_it_comes_in_parts(tmp_path: Path) -> None:
    mlflow, tracker = opened("mlflow", tmp_path)
    configuration = {f"key{number}": number for number in range(250)}
    tracker.store_init_configuration(configuration)
    parts = [call[1] for call in mlflow.calls if call[0] == "log_params"]
    assert [len(part) for part in parts] == [100, 100, 50]
    assert {key: value for part in parts for key, value in part.items()} == configuration


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("end", ["finish", "fail"])
def test_trackio_when_a_run_is_logged_then_gets_values_and_its_end(tmp_path: Path, end: str) -> None:
    trackio, tracker = opened("trackio", tmp_path, name="first", group="g")
    tracker.store_init_configuration(CONFIGURATION)
    tracker.log(VALUES, 7)
    getattr(tracker, end)()
    assert tracker.tracker.config == {"_Username": "somebody", **CONFIGURATION}
    assert trackio.calls == [
        ("init", "project", "first", "g"),
        ("log", {"loss": 0.5, "count": 3, "text": "x"}, 7),
        ("finish",),
    ]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", NAMES)
def test_library_when_an_option_of_ours_is_given_then_the_users_holds(tmp_path: Path, name: str) -> None:
    own = {"wandb": {"project": "other", "dir": "elsewhere"}, "trackio": {"project": "other"}, "mlflow": {}}[name]
    module, tracker = opened(name, tmp_path, **own)
    expected = {
        "wandb": ("init", "other", "elsewhere", None, None),
        "trackio": ("init", "other", None, None),
        "mlflow": ("set_experiment", "project"),
    }[name]
    assert module.calls[0] == expected
    tracker.finish()
