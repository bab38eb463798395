"""Logging through the accelerator, on one process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.accelerator.tracking import split_log_with
from drivetrain.errors import ConfigError, TrackerError
from drivetrain.registry import TrackerSpec
from keeping_tracker import KeepingTracker
from scalar import Scalar


class Nameless(KeepingTracker):
    """Has no name."""

    name = None  # type: ignore[assignment]


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """Return the records in the file of JSON lines."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("given", "names", "custom"),
    [
        (None, None, ()),
        ("wandb", "wandb", ()),
        (["wandb", "mlflow"], "wandb,mlflow", ()),
        ([], "none", ()),
        (KeepingTracker, "none", (KeepingTracker,)),
        (("wandb", KeepingTracker), "wandb", (KeepingTracker,)),
    ],
)
def test_log_with_when_given_in_any_form_then_names_and_trackers_part(given: Any, names: Any, custom: Any) -> None:
    assert split_log_with(given) == (names, custom)


@pytest.mark.parametrize("given", [3, [object()], ["wandb", dict], Nameless, Nameless()])
def test_log_with_when_it_holds_something_else_then_is_a_problem(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"log_with = .* \(Accelerator\(log_with=...\)\)\n.*neither the name"):
        Accelerator(cpu=True, log_with=given)


def test_log_with_when_it_is_not_installed_then_the_accelerator_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TrackerSpec, "is_installed", False)
    with pytest.raises(ConfigError, match=r"hint: pip install 'drivetrain\[wandb\]'"):
        Accelerator(cpu=True, log_with="wandb")


def test_values_when_logged_then_are_filed_under_the_updates_so_far(tmp_path: Path) -> None:
    with Accelerator(cpu=True, project_dir=tmp_path, log_with=KeepingTracker) as accelerator:
        model, optimizer = accelerator.prepare(model := Scalar(), torch.optim.SGD(model.parameters(), lr=0.5))
        accelerator.init_trackers("project", config={"lr": 0.5})
        accelerator.log({"loss": 0.0})
        for item in (2.0, 4.0):
            accelerator.backward(model(torch.tensor([item])).mean())
            optimizer.step()
            optimizer.zero_grad()
            update = accelerator.last_update
            assert update is not None
            accelerator.log({"loss": update.loss, "norm": update.grad_norm})
        tracker = accelerator.get_tracker("keeping")
        assert accelerator.get_tracker("keeping", unwrap=True) is tracker
        assert (accelerator.log_with, [one.name for one in accelerator.trackers]) == (
            ("keeping",),
            ["jsonl", "keeping"],
        )
        assert accelerator.logging_dir == tmp_path
    # The weight is 0, then 0 - 0.5 * 2 = -1: the losses are 0 * 2 and -1 * 4.
    assert [(row["step"], row["loss"]) for row in rows_in(tmp_path)] == [(0, 0.0), (1, 0.0), (2, -4.0)]
    assert rows_in(tmp_path)[2]["norm"] is None  # nothing was clipped
    assert tracker.calls[0] == ("init", "project", tmp_path, {})
    assert tracker.calls[-2:] == [("log", {"loss": -4.0, "norm": None}, 2, {}), ("finish",)]
    assert accelerator.trackers == []


def test_logging_dir_when_given_then_holds_the_logs_in_place_of_project_dir(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path / "project", logging_dir=tmp_path / "logs")
    accelerator.init_trackers("project")
    accelerator.log({"loss": math.nan}, step=3)
    accelerator.end_training()
    assert [(row["step"], row["loss"]) for row in rows_in(tmp_path / "logs")] == [(3, "NaN")]
    assert not (tmp_path / "project").exists()


def test_trackers_when_an_exception_leaves_the_block_then_are_failed(tmp_path: Path) -> None:
    tracker = KeepingTracker()

    def train() -> None:
        with Accelerator(cpu=True, project_dir=tmp_path, log_with=tracker) as accelerator:
            accelerator.init_trackers("project")
            raise ValueError("cause")

    with pytest.raises(ValueError, match="cause"):
        train()
    assert tracker.calls[-1] == ("fail",)


def test_log_when_nothing_was_opened_then_says_so() -> None:
    with pytest.raises(TrackerError, match="nothing would be recorded"):
        Accelerator(cpu=True).log({"loss": 1.0})


SCRIPT = """
import torch
from drivetrain import Accelerator
from keeping_tracker import KeepingTracker

class Telling(KeepingTracker):
    def finish(self): print("finished")
    def fail(self): print("failed")

accelerator = Accelerator(cpu=True, log_with=[Telling, "tensorboard"])
accelerator.init_trackers("project")
accelerator.log({"loss": torch.tensor(0.5)})
"""


@pytest.mark.parametrize(
    ("end", "told"), [("accelerator.end_training()", "finished"), ("", "finished"), ("raise ValueError", "failed")]
)
def test_trackers_when_a_script_ends_without_a_block_then_are_ended_as_it_ended(
    tmp_path: Path, end: str, told: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{SCRIPT}{end}"],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.stdout.split(), done.returncode) == ([told], int(end.startswith("raise"))), done.stderr
    assert [row["loss"] for row in rows_in(tmp_path)] == [0.5]
    assert len(list((tmp_path / "project").iterdir())) == 1
