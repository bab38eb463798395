"""The file that every run has: CASES 9, its form, and what a broken end costs."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from drivetrain.errors import TrackerError
from drivetrain.trackers.json_lines import JsonLines


def strict(text: str) -> Any:
    """Read JSON as a reader that knows the standard only."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a log."""
    return [strict(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_loss_when_it_is_nan_from_step_3_then_the_log_shows_it_from_step_3(tmp_path: Path) -> None:
    log = JsonLines("p", logging_dir=tmp_path)
    losses = [0.5, 0.25, math.nan, math.nan, math.nan]
    for step, loss in enumerate(losses, start=1):
        log.log({"loss": loss}, step)
    log.finish()
    assert [(row["step"], row["loss"]) for row in rows_of(tmp_path)] == [
        (1, 0.5),
        (2, 0.25),
        (3, "NaN"),
        (4, "NaN"),
        (5, "NaN"),
    ]
    assert [math.isnan(float(row["loss"])) for row in rows_of(tmp_path)] == [math.isnan(loss) for loss in losses]


def test_infinities_when_logged_then_read_back_as_such(tmp_path: Path) -> None:
    log = JsonLines("p", logging_dir=tmp_path)
    log.log({"up": math.inf, "down": -math.inf}, 0)
    log.finish()
    (row,) = rows_of(tmp_path)
    assert (row["up"], row["down"]) == ("Infinity", "-Infinity")
    assert (float(row["up"]), float(row["down"])) == (math.inf, -math.inf)


def test_record_when_logged_then_it_is_in_the_file_at_once_with_step_and_time(tmp_path: Path) -> None:
    before = time.time()
    log = JsonLines("p", logging_dir=tmp_path / "made" / "here")
    log.log({"b": 1, "a": True, "text": "x", "absent": None}, 7)
    (row,) = rows_of(tmp_path / "made" / "here")  # before it is closed
    log.finish()
    assert list(row) == ["step", "time", "b", "a", "text", "absent"]
    assert before - 1e-3 <= row.pop("time") <= time.time()
    assert row == {"step": 7, "b": 1, "a": True, "text": "x", "absent": None}


def test_log_when_a_run_is_started_again_then_goes_on_below(tmp_path: Path) -> None:
    for step in (1, 2):
        log = JsonLines("p", logging_dir=tmp_path)
        log.log({}, step)
        log.finish()
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]


@pytest.mark.parametrize("broken", ['{"step": 2, "ti', "{", '{"step": 1, "time": 0.0}\n{"st'])
def test_log_when_its_last_line_is_broken_then_every_line_can_be_read_again(tmp_path: Path, broken: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(broken)
    log = JsonLines("p", logging_dir=tmp_path)
    log.log({}, 9)
    log.finish()
    assert [row["step"] for row in rows_of(tmp_path)] == [*([1] if "\n" in broken else []), 9]


@pytest.mark.parametrize("key", ["step", "time"])
def test_value_when_it_has_the_name_of_the_record_itself_then_is_refused(tmp_path: Path, key: str) -> None:
    log = JsonLines("p", logging_dir=tmp_path)
    with pytest.raises(TrackerError, match=f"the value '{key}' cannot be logged"):
        log.log({key: 1.0}, 0)
    log.finish()


def test_configuration_when_stored_then_lies_beside_the_log(tmp_path: Path) -> None:
    log = JsonLines("project", logging_dir=tmp_path)
    log.store_init_configuration({"lr": 0.1, "limit": math.inf, "deep": {"list": [1, math.nan]}})
    log.finish()
    stored = strict((tmp_path / "metrics.config.json").read_text())
    assert stored.pop("time") == pytest.approx(time.time(), abs=60)
    assert stored == {
        "project_name": "project",
        "config": {"lr": 0.1, "limit": "Infinity", "deep": {"list": [1, "NaN"]}},
    }
