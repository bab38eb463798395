"""Where values come from: a `Value` has one `Source`; a `Layer` is all that one place says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from drivetrain.errors import Problem

SourceKind = Literal["default", "file", "environment", "flag", "code"]

PRECEDENCE: tuple[SourceKind, ...] = ("default", "file", "environment", "flag", "code")
"""From weak to strong."""

_PREFIX: Mapping[SourceKind, str] = {"environment": "variable ", "flag": "flag "}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where one value comes from.

    Args:
        kind: decides precedence.
        place: file and line, name of the variable or flag, or the call in code.
    """

    kind: SourceKind
    place: str = ""

    def __str__(self) -> str:
        return _PREFIX.get(self.kind, "") + self.place if self.place else self.kind


DEFAULT = Source(kind="default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One value before validation.

    Args:
        raw: as read: text from flags and variables, plain values from files and code.
        source: where it was read.
        written: the dotted key as the user spelled it.
    """

    raw: object
    source: Source
    written: str

    def problem(self, message: str, *, hint: str | None = None) -> Problem:
        """Return what is wrong with the value, shown with its key and source."""
        return Problem(path=self.written, value=show(self.raw), source=str(self.source), message=message, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(Mapping[str, Value]):
    """What one place says, by canonical dotted path.

    Args:
        by_path: at most one value per path.
        problems: keys that could not be placed; they become part of the one error of `resolve`.
        notes: translations to tell the user once.
    """

    by_path: Mapping[str, Value] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    def __getitem__(self, path: str) -> Value:
        return self.by_path[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_path)

    def __len__(self) -> int:
        return len(self.by_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One key of a mapping with what stands under it.

    Args:
        key: as written.
        value: a plain value, a list of such, or a tuple of entries for a mapping.
        place: file and line, such as `run.yaml line 9`.
    """

    key: str
    value: object
    place: str


def plain(value: object) -> object:
    """Return entries as a dict, and everything else as it is."""
    if isinstance(value, tuple):
        return {entry.key: plain(entry.value) for entry in value}
    return value


WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
"""What a text means where true or false is asked for."""


def show(raw: object) -> str:
    """Return a value as a configuration file would spell it, on one line, shortened to 60 characters."""
    if raw is None:
        return "null"
    if isinstance(raw, bool):
        return "true" if raw else "false"
    text = " ".join(str(raw).split()) if str(raw).strip() else repr(raw)
    return text if len(text) <= 60 else f"{text[:57]}..."
