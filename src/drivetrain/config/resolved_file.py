"""The one file that `launch` hands to its workers: every setting with its source, so that no rank has to ask again.

It is JSON, and as such also an ordinary configuration file of drivetrain.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from drivetrain.config.keys import keys
from drivetrain.config.layers import RESOLVED_KEY
from drivetrain.config.resolve import Resolved, flatten
from drivetrain.config.sources import PRECEDENCE, Layer, Source, Value
from drivetrain.errors import ConfigError, Problem


def write_resolved(resolved: Resolved, path: str | os.PathLike[str]) -> None:
    """Write all settings and their sources to a file that `read_resolved` understands."""
    tree: dict[str, Any] = {}
    for setting, value in flatten(resolved.config).items():
        key = keys()[setting]
        holder = tree.setdefault(key.section, {}) if key.section else tree
        holder[key.name] = value
    tree[RESOLVED_KEY] = {setting: source.as_list() for setting, source in resolved.sources.items()}
    Path(path).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def is_resolved(path: str | os.PathLike[str]) -> bool:
    """Return whether a file was written by `write_resolved`; False also for one that cannot be read."""
    return _load(path) is not None


def read_resolved(path: str | os.PathLike[str]) -> Layer:
    """Return the values of a file that `write_resolved` wrote, each with the source that it had then.

    Raises:
        ConfigError: the file is missing, damaged or an ordinary one.
    """
    tree = _load(path)
    try:
        if tree is None:
            raise ValueError
        values = {setting: _value(tree, setting, *record) for setting, record in tree[RESOLVED_KEY].items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        message = "this is not a file of settings that `drivetrain launch` wrote for its processes"
        hint = "it is named by DRIVETRAIN_CONFIG_FILE"
        raise ConfigError([Problem(path="", source=os.fspath(path), message=message, hint=hint)]) from None
    return Layer(by_path=values)


def _load(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return tree if isinstance(tree, dict) and isinstance(tree.get(RESOLVED_KEY), dict) else None


def _value(tree: dict[str, Any], setting: str, kind: Any, place: str) -> Value:
    key = keys()[setting]
    if kind not in PRECEDENCE:
        raise ValueError(kind)
    raw = tree[key.section][key.name] if key.section else tree[key.name]
    return Value(raw=raw, source=Source(kind=kind, place=place), written=setting)
