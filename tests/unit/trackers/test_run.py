"""The trackers of one run: opened, logged to and ended together."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.errors import TrackerError
from drivetrain.trackers import RunTrackers, SilentTracker, TrackerLike
from host_reads import counted_reads
from keeping_tracker import KeepingTracker

STEP = 41  # what `current_step` says


class Broken(KeepingTracker):
    """Cannot be ended."""

    name = "broken"

    def finish(self) -> None:
        """Fail."""
        raise OSError("no way out")

    fail = finish


class NeverStarts(KeepingTracker):
    """Cannot be made."""

    name = "never"

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise OSError("no server")


@pytest.fixture
def made() -> Iterator[list[RunTrackers]]:
    """Collect what a test makes, and end it."""
    runs: list[RunTrackers] = []
    yield runs
    for run in runs:
        run.finish(is_failing=True)


def run_with(made: list[RunTrackers], folder: Path, *custom: TrackerLike, is_main: bool = True) -> RunTrackers:
    """Return trackers that are not open yet."""
    run = RunTrackers(names=(), custom=custom, logging_dir=folder, is_main=is_main, current_step=lambda: STEP)
    made.append(run)
    return run


def steps_in(folder: Path) -> list[int]:
    """Return the steps in the file of JSON lines."""
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_class_when_given_then_is_made_at_the_start_with_its_own_arguments(
    made: list[RunTrackers], tmp_path: Path
) -> None:
    run = run_with(made, tmp_path, KeepingTracker)
    run.start("project", config={"lr": 0.1}, init_kwargs={"keeping": {"color": "red"}})
    run.log({"loss": torch.tensor(0.5)}, step=None, log_kwargs={})
    run.log({"loss": 0.25}, step=torch.tensor(3), log_kwargs={"keeping": {"commit": True}})  # type: ignore[arg-type]
    tracker = run.find("keeping")
    run.finish(is_failing=False)
    assert isinstance(tracker, KeepingTracker)
    assert tracker.calls == [
        ("init", "project", tmp_path, {"color": "red"}),
        ("config", {"lr": 0.1}),
        ("log", {"loss": 0.5}, STEP, {}),
        ("log", {"loss": 0.25}, 3, {"commit": True}),
        ("finish",),
    ]
    assert steps_in(tmp_path) == [STEP, 3]


def test_instance_when_given_then_is_used_as_it_is(made: list[RunTrackers], tmp_path: Path) -> None:
    tracker = KeepingTracker("mine")
    run = run_with(made, tmp_path, tracker)
    run.start("project", config=None, init_kwargs={})
    run.log({}, step=1, log_kwargs={})
    run.finish(is_failing=True)
    assert tracker.calls == [("init", "mine", None, {}), ("log", {}, 1, {}), ("fail",)]


def test_rank_that_is_not_main_when_it_logs_then_makes_nothing_and_reads_nothing(
    made: list[RunTrackers], tmp_path: Path
) -> None:
    run = run_with(made, tmp_path / "logs", KeepingTracker, is_main=False)
    run.start("project", config={}, init_kwargs={})
    with counted_reads() as reads:
        run.log({"loss": torch.tensor(1.0)}, step=1, log_kwargs={})
    silent: Any = run.find("whatever")
    assert isinstance(silent, SilentTracker)
    assert silent.tracker.add_scalar("a", 1) is silent
    silent.config.update({"a": 1})
    silent.log({"a": 1})
    run.finish(is_failing=False)
    assert (reads.total(), run.open, (tmp_path / "logs").exists()) == (0, (), False)


def test_value_when_it_cannot_be_logged_then_no_tracker_gets_the_record(
    made: list[RunTrackers], tmp_path: Path
) -> None:
    tracker = KeepingTracker()
    run = run_with(made, tmp_path, tracker)
    run.start("project", config=None, init_kwargs={})
    with pytest.raises(TrackerError, match="'grads' cannot be logged"):
        run.log({"loss": 1.0, "grads": torch.zeros(2)}, step=1, log_kwargs={})
    assert (steps_in(tmp_path), tracker.calls[1:]) == ([], [])


def test_log_when_nothing_is_open_then_says_what_to_call(made: list[RunTrackers], tmp_path: Path) -> None:
    run = run_with(made, tmp_path)
    with pytest.raises(TrackerError, match=r"nothing would be recorded\n  hint: call init_trackers"):
        run.log({"loss": 1.0}, step=1, log_kwargs={})
    run.start("project", config=None, init_kwargs={})
    run.finish(is_failing=False)
    with pytest.raises(TrackerError, match="nothing would be recorded"):
        run.log({"loss": 1.0}, step=1, log_kwargs={})


def test_start_when_done_twice_then_is_refused_until_the_first_has_ended(
    made: list[RunTrackers], tmp_path: Path
) -> None:
    run = run_with(made, tmp_path)
    run.start("one", config=None, init_kwargs={})
    with pytest.raises(TrackerError, match="was called before"):
        run.start("two", config=None, init_kwargs={})
    run.finish(is_failing=False)
    run.start("two", config=None, init_kwargs={})
    run.log({}, step=2, log_kwargs={})
    assert steps_in(tmp_path) == [2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"init_kwargs": {"keepin": {}}},
            "`init_kwargs` names 'keepin', which is none of: jsonl, keeping\n.*'keeping'",
        ),
        ({"init_kwargs": {"entity": "me"}}, r"it is keyed by tracker: init_kwargs=\{'keeping': "),
        ({"init_kwargs": {"keeping": 3}}, "is a int, and no mapping"),
        ({"config": [1]}, r"`config` is a list, and no mapping\n  hint: pass config=vars\(args\)"),
    ],
)
def test_start_when_an_argument_is_wrong_then_nothing_is_opened(
    made: list[RunTrackers], tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    run = run_with(made, tmp_path, KeepingTracker)
    with pytest.raises(TrackerError, match=words):
        run.start("project", **{"config": None, "init_kwargs": {}, **arguments})
    assert (run.open, list(tmp_path.iterdir())) == ((), [])


def test_log_when_its_arguments_are_wrong_then_names_them(made: list[RunTrackers], tmp_path: Path) -> None:
    run = run_with(made, tmp_path, KeepingTracker)
    run.start("project", config=None, init_kwargs={})
    with pytest.raises(TrackerError, match="`log_kwargs` names 'wandb', which is none of: jsonl, keeping"):
        run.log({}, step=1, log_kwargs={"wandb": {}})
    with pytest.raises(TrackerError, match="jsonl takes no `log_kwargs`, and got 'commit'"):
        run.log({}, step=1, log_kwargs={"jsonl": {"commit": True}})
    with pytest.raises(TrackerError, match=r"`step` is 1\.5, a float, and no whole number"):
        run.log({}, step=1.5, log_kwargs={})  # type: ignore[arg-type]


def test_tracker_when_asked_for_by_a_wrong_name_then_the_open_ones_are_named(
    made: list[RunTrackers], tmp_path: Path
) -> None:
    run = run_with(made, tmp_path, KeepingTracker)
    with pytest.raises(TrackerError, match="open: none, call init_trackers"):
        run.find("keeping")
    run.start("project", config=None, init_kwargs={})
    with pytest.raises(
        TrackerError, match=r"no tracker 'kepping' is open; open: jsonl, keeping\n.*did you mean 'keeping'"
    ):
        run.find("kepping")
    assert run.find("jsonl").tracker == tmp_path / "metrics.jsonl"


def test_trackers_when_two_have_one_name_then_are_refused(made: list[RunTrackers], tmp_path: Path) -> None:
    with pytest.raises(TrackerError, match="two trackers are called 'keeping'"):
        run_with(made, tmp_path, KeepingTracker, KeepingTracker())


def test_tracker_when_it_cannot_be_made_then_those_before_are_ended(made: list[RunTrackers], tmp_path: Path) -> None:
    first = KeepingTracker()
    run = run_with(made, tmp_path, first, NeverStarts)
    # Classes are made first; an instance that exists is the last to be taken.
    with pytest.raises(OSError, match="no server"):
        run.start("project", config=None, init_kwargs={})
    assert run.open == ()
    run = run_with(made, tmp_path, KeepingTracker, Refuses("mine"))
    with pytest.raises(OSError, match="no configuration"):
        run.start("project", config={"a": 1}, init_kwargs={})
    assert Refuses.ended == ["mine"]


class Refuses(KeepingTracker):
    """Takes no configuration."""

    name = "refuses"
    ended: list[str] = []  # noqa: RUF012 - shared on purpose

    def store_init_configuration(self, _values: Any) -> None:
        """Fail."""
        raise OSError("no configuration")

    def fail(self) -> None:
        """Keep that it was ended."""
        self.ended.append(self.calls[0][1])


def test_tracker_when_it_cannot_be_ended_then_the_others_are_and_the_error_names_it(
    made: list[RunTrackers], tmp_path: Path
) -> None:
    last = KeepingTracker()
    run = run_with(made, tmp_path, Broken(), last)
    run.start("project", config=None, init_kwargs={})
    with pytest.raises(TrackerError, match="'broken' could not be ended: OSError: no way out"):
        run.finish(is_failing=False)
    assert last.calls[-1] == ("finish",)
    run.finish(is_failing=False)  # once is enough
    assert last.calls.count(("finish",)) == 1


def test_tracker_when_it_cannot_be_ended_after_an_error_then_it_is_said_and_covers_nothing(
    made: list[RunTrackers], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    last = KeepingTracker()
    run = run_with(made, tmp_path, Broken(), last)
    run.start("project", config=None, init_kwargs={})
    run.finish(is_failing=True)
    assert last.calls[-1] == ("fail",)
    assert "'broken' could not be ended: OSError: no way out" in capfd.readouterr().err


SCRIPT = """
import sys
from pathlib import Path
from drivetrain.trackers import RunTrackers
from keeping_tracker import KeepingTracker

class Telling(KeepingTracker):
    def finish(self): print("finished")
    def fail(self): print("failed")

run = RunTrackers(names=(), custom=[Telling], logging_dir=Path("."), is_main=True, current_step=lambda: 0)
run.start("project", config=None, init_kwargs={})
run.log({"loss": 0.5}, step=1, log_kwargs={})
"""


@pytest.mark.parametrize(
    ("end", "told"),
    [("", "finished"), ("raise ValueError('cause')", "failed"), ("run.finish(is_failing=False)", "finished")],
)
def test_trackers_when_the_script_ends_then_are_ended_once_as_it_ended(tmp_path: Path, end: str, told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{SCRIPT}{end}"],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=tmp_path,
    )
    assert (done.stdout.split(), "cause" in done.stderr) == ([told], "cause" in end)
    assert steps_in(tmp_path) == [1]
