"""Finds implementations by name, and imports one only when it is used.

A strategy is a folder `drivetrain/strategies/<name>` whose `settings.py` holds a torch-free `SPEC`. Other
distributions add one through the entry point group `drivetrain.strategies`, whose value is such a `SPEC`.

A tracker is a class; other distributions add theirs through the entry point group `drivetrain.trackers`.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def resolve(target: str) -> Any:
    """Return the object that `module:attribute` names, importing the module."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


@cache
def strategy_specs() -> tuple[Any, ...]:
    """Return the `SPEC` of every strategy, built in ones first, each group in the order of the names.

    Reads settings modules only: no strategy's implementation, and so no torch, is imported.
    """
    folder = Path(__file__).parent / "strategies"
    names = sorted(info.name for info in pkgutil.iter_modules([str(folder)]) if info.ispkg)
    built_in = [resolve(f"drivetrain.strategies.{name}.settings:SPEC") for name in names]
    others = sorted(entry_points(group="drivetrain.strategies"), key=lambda point: point.name)
    return (*built_in, *(point.load() for point in others))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerSpec:
    """Where values can be logged to.

    Args:
        name: as `log_with` has it.
        implementation: `module:class` of the tracker.
        package: what it imports, and what the extra of drivetrain installs that has the tracker's name; empty when
            the tracker came with a distribution of its own.
    """

    name: str
    implementation: str
    package: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether the tracker can be used; looks for its package and does not import it."""
        return not self.package or self.package in sys.modules or find_spec(self.package) is not None


@cache
def tracker_specs() -> Mapping[str, TrackerSpec]:
    """Return every tracker by its name, built in ones first."""
    built_in = {
        "tensorboard": "drivetrain.trackers.tensorboard:TensorBoardTracker",
        "wandb": "drivetrain.trackers.wandb:WandbTracker",
        "mlflow": "drivetrain.trackers.mlflow:MLflowTracker",
        "trackio": "drivetrain.trackers.trackio:TrackioTracker",
    }
    others = sorted(entry_points(group="drivetrain.trackers"), key=lambda point: point.name)
    return {
        **{name: TrackerSpec(name=name, implementation=target, package=name) for name, target in built_in.items()},
        **{point.name: TrackerSpec(name=point.name, implementation=point.value) for point in others},
    }
