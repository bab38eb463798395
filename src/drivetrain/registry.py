"""Finds implementations by name, and imports one only when it is used.

A strategy is a folder `drivetrain/strategies/<name>` whose `settings.py` holds a torch-free `SPEC`. Other
distributions add one through the entry point group `drivetrain.strategies`, whose value is such a `SPEC`.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
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
