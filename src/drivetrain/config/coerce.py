"""Gives a raw value the type of its setting, or says why that cannot be.

pydantic alone is too generous for files (`true` is 1, `2.0` is 2) and too strict for text (`"2"` is no choice among
numbers), so this comes first; bounds are left to pydantic.
"""

from __future__ import annotations

import contextlib
import os
import re

from drivetrain.config.keys import Key, did_you_mean
from drivetrain.config.migrate import absent_value
from drivetrain.config.sources import WORDS, Value, show

_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")


class Unfit(Exception):
    """A value does not have the type of its setting."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def coerce(key: Key, value: Value) -> object:
    """Return the value with the type of its setting.

    Text from files, variables and flags is read as what it spells; text from code is text.

    Raises:
        Unfit: the value has another type, or is not among the choices.
    """
    raw = value.raw
    if isinstance(raw, str) and value.source.kind != "code":
        raw = _spelled(key, raw.strip())
    match key.kind:
        case "bool":
            return _bool(raw)
        case "int":
            return _int(raw)
        case "float":
            return _float(raw)
        case "text":
            return _text(_joined(raw) if key.setting.is_list and isinstance(raw, list) else raw)
        case "choice":
            return _choice(raw, path=key.path, choices=key.choices)


def _spelled(key: Key, text: str) -> object:
    """Return what a text means for this setting, or the text itself when it means nothing."""
    if key.kind == "bool":
        return WORDS.get(text.lower(), text)
    if key.kind == "float":
        with contextlib.suppress(ValueError):
            return float(text)
    counts = key.kind == "int" or (key.kind == "choice" and isinstance(key.choices[0], int))
    return int(text) if counts and _INTEGER.fullmatch(text) else text


def _bool(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in WORDS:
        raise Unfit(f"the text `{raw}` is neither `true` nor `false`", hint="write it without quotes")
    raise Unfit(f"{_named(raw)} is neither `true` nor `false`")


def _int(raw: object) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    hint = f"write `{int(raw)}`" if isinstance(raw, float) and raw.is_integer() else None
    raise Unfit(f"{_named(raw)} is not a whole number", hint=hint)


def _float(raw: object) -> float:
    if isinstance(raw, (int, float)) and not isinstance(raw, bool):
        return float(raw)
    raise Unfit(f"{_named(raw)} is not a number")


def _text(raw: object) -> str:
    if isinstance(raw, str):
        return raw
    if isinstance(raw, os.PathLike):
        return str(os.fspath(raw))
    # An unquoted `gpu_ids: 0` is a number to YAML.
    if isinstance(raw, int) and not isinstance(raw, bool):
        return str(raw)
    raise Unfit(f"{_named(raw)} is not text", hint="put it in quotes" if isinstance(raw, (bool, float)) else None)


def _joined(items: list[object]) -> str:
    """Return a list as one text with commas."""
    if strange := [item for item in items if not isinstance(item, str | int) or isinstance(item, bool)]:
        raise Unfit(f"{_named(strange[0])} in this list is not text")
    return ",".join(str(item) for item in items)


def _choice(raw: object, *, path: str, choices: tuple[str | int, ...]) -> str | int:
    for choice in choices:
        # A reader of YAML 1.1 makes False of an unquoted `no`.
        if (type(raw) is type(choice) and raw == choice) or (raw is False and str(choice).lower() == "no"):
            return choice
    *others, last = (f"`{choice}`" for choice in choices)
    allowed = f"{', '.join(others)} or {last}" if others else last
    if absent := absent_value(path, raw):
        raise Unfit(f"{absent}; allowed: {allowed}")
    raise Unfit(f"allowed: {allowed}", hint=did_you_mean(str(raw), map(str, choices)))


def _named(raw: object) -> str:
    if isinstance(raw, list):
        return "a list"
    if isinstance(raw, dict):
        return "a group of `key: value` pairs"
    return f"`{show(raw)}`"
