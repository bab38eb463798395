"""The settings that `launch` hands to its processes, each with its source, so that no rank asks again.

The text travels in a variable: children of a rank inherit it, and nothing is left to remove, however the processes end.
"""

from __future__ import annotations

import json

from drivetrain.config.keys import choosers, keys
from drivetrain.config.resolve import Resolved, flatten
from drivetrain.config.sources import PRECEDENCE, Layer, Source, Value
from drivetrain.errors import ConfigError, Problem

SETTINGS_VARIABLE = "DRIVETRAIN_SETTINGS"


def settings_to_text(resolved: Resolved) -> str:
    """Return what is not a default, with its sources, in a form that `settings_from_text` understands."""
    values = flatten(resolved.config)
    said = {path: source for path, source in resolved.sources.items() if source.kind != "default"}
    records = [(path, values[path], source) for path, source in said.items()]
    records += [(name, False, source) for name, source in resolved.declined.items()]
    return json.dumps({path: [value, source.kind, source.place] for path, value, source in records})


def settings_from_text(text: str) -> Layer:
    """Return the values of a text that `settings_to_text` made, each with the source that it had then.

    Raises:
        ConfigError: the text is damaged, or of another version.
    """
    try:
        values = {path: _value(path, *record) for path, record in json.loads(text).items()}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        message = "this is not what `drivetrain launch` of this version hands to its processes"
        hint = f"unset {SETTINGS_VARIABLE}, unless a launch of this version has set it"
        raise ConfigError([Problem(path=SETTINGS_VARIABLE, source="environment", message=message, hint=hint)]) from None
    return Layer(by_path=values)


def _value(path: str, raw: object, kind: str, place: str) -> Value:
    if kind not in PRECEDENCE:
        raise ValueError(kind)
    key = choosers().get(path) or keys()[path]
    return Value(raw=raw, source=Source(kind=kind, place=place), written=key.path)
