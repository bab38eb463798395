"""The event files that TensorBoard's own reader finds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from drivetrain.registry import resolve, tracker_specs


def opened(folder: Path, **options: Any) -> Any:
    """Return a tracker."""
    return resolve(tracker_specs()["tensorboard"].implementation)("project", logging_dir=folder, **options)


def events_in(folder: Path) -> Any:
    """Return what the reader finds in the one file of a folder."""
    assert len(list(folder.iterdir())) == 1
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_run_when_logged_then_the_reader_finds_numbers_texts_and_configuration(tmp_path: Path) -> None:
    tracker = opened(tmp_path)
    tracker.store_init_configuration({"lr": 0.1, "deep": {"betas": [0.9], "on": True}, "none": None})
    for step, loss in enumerate([0.5, 0.25, math.nan]):
        tracker.log({"loss": loss, "text": f"t{step}", "absent": None, "count": step, "done": step == 1}, step)
    assert isinstance(tracker.tracker, SummaryWriter)
    tracker.finish()
    events = events_in(tmp_path / "project")
    assert sorted(events.Tags()["scalars"]) == ["count", "done", "loss"]
    assert [event.step for event in events.Scalars("loss")] == [0, 1, 2]
    assert [event.value for event in events.Scalars("loss")][:2] == [0.5, 0.25]
    assert math.isnan(events.Scalars("loss")[2].value)
    assert [event.value for event in events.Scalars("done")] == [0.0, 1.0, 0.0]
    assert [event.tensor_proto.string_val[0] for event in events.Tensors("text/text_summary")] == [b"t0", b"t1", b"t2"]
    (stored,) = [
        metadata.plugin_data.content
        for tag, metadata in events.summary_metadata.items()
        if tag == "_hparams_/session_start_info"
    ]
    assert all(name in stored for name in (b"lr", b"deep.betas", b"[0.9]", b"deep.on", b"none"))


def test_value_when_logged_then_it_is_in_the_file_before_the_run_ends(tmp_path: Path) -> None:
    tracker = opened(tmp_path)
    for step, loss in enumerate([0.5, 0.25, 0.125]):
        tracker.log({"loss": loss}, step)
        assert events_in(tmp_path / "project").Scalars("loss")[-1].value == loss
    tracker.fail()


@pytest.mark.parametrize("walltime", [1000.0])
def test_options_when_given_then_reach_the_writer(tmp_path: Path, walltime: float) -> None:
    tracker = opened(tmp_path, log_dir=str(tmp_path / "elsewhere"), filename_suffix=".mine")
    tracker.log({"loss": 0.5}, 1, walltime=walltime)
    tracker.finish()
    (file,) = (tmp_path / "elsewhere").iterdir()
    assert file.name.endswith(".mine")
    assert [event.wall_time for event in events_in(tmp_path / "elsewhere").Scalars("loss")] == [walltime]
