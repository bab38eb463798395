"""The settings of logging: every spelling, and names that cannot be used."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from drivetrain import registry
from drivetrain.config import Resolved, layer_from_code, layer_from_variables, read_file, resolve
from drivetrain.errors import ConfigError
from drivetrain.registry import TrackerSpec, tracker_specs

STAND_INS = Path(__file__).parents[2] / "support" / "stand_ins"


@pytest.fixture
def some_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let W&B and MLflow be installed, and trackio not."""
    monkeypatch.setattr(TrackerSpec, "is_installed", property(lambda spec: spec.name != "trackio"))


def from_code(**settings: object) -> Resolved:
    """Resolve arguments of `Accelerator`."""
    return resolve([layer_from_code(settings)])


@pytest.mark.usefixtures("some_installed")
@pytest.mark.parametrize(
    ("given", "names"),
    [
        (None, ()),
        ("none", ("none",)),
        ("wandb", ("wandb",)),
        ("WandB, mlflow", ("wandb", "mlflow")),
        (["mlflow", "wandb", "mlflow"], ("mlflow", "wandb")),
        ("all", ("all",)),
    ],
)
def test_log_with_when_given_in_any_form_then_names_are_read(given: object, names: tuple[str, ...]) -> None:
    assert from_code(log_with=given).config.trackers == names


@pytest.mark.usefixtures("some_installed")
def test_log_with_when_in_file_and_variable_then_has_the_usual_order(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("log_with: [wandb, mlflow]\nlogging_dir: logs\n")
    layers = [read_file(file)]
    assert resolve(layers).config.trackers == ("wandb", "mlflow")
    layers.append(layer_from_variables({"DRIVETRAIN_LOG_WITH": "mlflow"}))
    assert resolve(layers).config.trackers == ("mlflow",)
    layers.append(layer_from_code({"log_with": "none"}))
    config = resolve(layers).config
    assert (config.trackers, config.logging_dir) == (("none",), "logs")


@pytest.mark.usefixtures("some_installed")
@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ("wandbb", "there is no tracker 'wandbb'; allowed: tensorboard, wandb, mlflow, trackio, all, none", "`wandb`"),
        ("comet_ml", "there is no tracker 'comet_ml'", "Accelerator(log_with=MyTracker)"),
        ("wandb,none", "`none` goes with no other name", "leave it"),
        ("wandb,trackio", "the package 'trackio' is not installed", "pip install 'drivetrain[trackio]'"),
    ],
)
def test_log_with_when_a_name_cannot_be_used_then_is_a_problem_with_its_source(
    given: str, message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        from_code(log_with=given)
    (problem,) = caught.value.problems
    assert (problem.path, problem.source) == ("log_with", "Accelerator(log_with=...)")
    assert problem.message.startswith(message)
    assert hint in (problem.hint or "")


def test_spec_when_its_package_can_be_found_then_is_installed_without_importing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = TrackerSpec(name="x", implementation="", package="wandb_that_nobody_has")
    assert not spec.is_installed
    assert TrackerSpec(name="x", implementation="").is_installed
    monkeypatch.syspath_prepend(STAND_INS)
    assert tracker_specs()["trackio"].is_installed
    assert "trackio" not in sys.modules


def test_specs_when_a_distribution_brings_a_tracker_then_it_is_among_them_and_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = EntryPoint(name="mine", value="a_module_that_nobody_has:MyTracker", group="drivetrain.trackers")
    monkeypatch.setattr(registry, "entry_points", lambda group: EntryPoints([point]).select(group=group))
    tracker_specs.cache_clear()
    try:
        assert from_code(log_with="mine").config.trackers == ("mine",)
        assert tracker_specs()["mine"] == TrackerSpec(name="mine", implementation="a_module_that_nobody_has:MyTracker")
    finally:
        monkeypatch.undo()
        tracker_specs.cache_clear()
