"""Reads YAML and JSON as data and nothing else: every key with its line, no tags, no anchors, bounded size and depth.

It walks the parse events of ruamel.yaml and makes plain values itself, by the core schema of YAML 1.2: `no`, `off`
and `12:30` stay text. JSON is read by the same way, as YAML contains it.

Source: YAML 1.2.2, section 10.3 (core schema).
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    StreamEndEvent,
    StreamStartEvent,
)

from drivetrain.config.sources import Entry, plain
from drivetrain.errors import ConfigError, Problem

MAX_BYTES = 1_000_000
MAX_DEPTH = 12

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
# 18 digits fit into 64 bits; anything longer is not a number that a setting takes, and int() has limits of its own.
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
_BASED = re.compile(r"0o[0-7]{1,20}|0x[0-9a-fA-F]{1,15}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+")
_SPECIAL = re.compile(r"([-+]?)(\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def read_entries(path: str | os.PathLike[str]) -> tuple[Entry, ...]:
    """Return the top-level entries of a YAML or JSON file; none for an empty one.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds something other than a mapping of plain values.
    """
    name = os.fspath(path)
    return parse(_text(path, name), name=name)


def parse(text: str, *, name: str) -> tuple[Entry, ...]:
    """Return the top-level entries of a text; `name` stands for it in messages."""
    try:
        return _Parser(YAML(typ="safe", pure=True).parse(text), name).document()
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        reason = " ".join(part for part in (error.context, error.problem) if part)
        _refuse(name, line, f"this is not valid YAML or JSON: {reason or 'syntax error'}")
    except YAMLError as error:
        position = getattr(error, "position", None)
        line = None if position is None else text.count("\n", 0, position) + 1
        _refuse(name, line, f"this is not valid YAML or JSON: {getattr(error, 'reason', 'syntax error')}")


def _text(path: str | os.PathLike[str], name: str) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        _refuse(name, None, f"the file cannot be read: {error.strerror or error}")
    if len(data) > MAX_BYTES:
        _refuse(name, None, f"the file is larger than {MAX_BYTES:,} bytes, so it is no configuration file")
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        _refuse(name, line, f"the file is not {encoding.removesuffix('-sig').upper()} text")


def _refuse(name: str, line: int | None, message: str, *, hint: str | None = None) -> NoReturn:
    source = name if line is None else f"{name} line {line}"
    raise ConfigError([Problem(path="", source=source, message=message, hint=hint)])


class _Parser:
    """Builds entries from parse events; the depth bound also bounds its recursion."""

    def __init__(self, events: Iterable[Any], name: str) -> None:
        self._events: Iterator[Any] = iter(events)
        self._name = name

    def document(self) -> tuple[Entry, ...]:
        event = self._next()
        while isinstance(event, (StreamStartEvent, DocumentStartEvent)):
            event = self._next()
        if isinstance(event, StreamEndEvent):
            return ()
        root = self._value(event, depth=0)
        if not isinstance(root, tuple):
            if root is not None:
                self._fail(event, "the file must hold `key: value` pairs at its top", hint=None)
            root = ()
        event = self._next()
        while not isinstance(event, StreamEndEvent):
            if isinstance(event, DocumentStartEvent):
                self._fail(event, "a second document begins here", hint="keep one document in a file")
            event = self._next()
        return root

    def _value(self, event: Any, *, depth: int) -> object:
        self._check(event)
        if isinstance(event, ScalarEvent):
            return self._scalar(event)
        if depth >= MAX_DEPTH:
            self._fail(event, f"values are nested deeper than {MAX_DEPTH}", hint=None)
        if isinstance(event, MappingStartEvent):
            return tuple(self._entries(depth=depth))
        items = []
        while not isinstance(item := self._next(), SequenceEndEvent):
            items.append(plain(self._value(item, depth=depth + 1)))
        return items

    def _entries(self, *, depth: int) -> Iterator[Entry]:
        while not isinstance(event := self._next(), MappingEndEvent):
            self._check(event)
            if not isinstance(event, ScalarEvent):
                self._fail(event, "a key must be text", hint=None)
            value = self._value(self._next(), depth=depth + 1)
            yield Entry(key=event.value, value=value, place=f"{self._name} line {event.start_mark.line + 1}")

    def _scalar(self, event: Any) -> object:
        text: str = event.value
        if _SURROGATE.search(text):
            # JSON writes a character beyond the basic plane as two escapes.
            try:
                text = text.encode("utf-16", "surrogatepass").decode("utf-16")
            except UnicodeDecodeError:
                self._fail(event, "half of a surrogate pair is not text", hint=None)
        return text if event.style else plain_scalar(text)

    def _check(self, event: Any) -> None:
        if isinstance(event, AliasEvent):
            self._fail(event, f"`*{event.anchor}` is an alias", hint="write the value out")
        if event.anchor is not None:
            self._fail(event, f"`&{event.anchor}` is an anchor", hint="write the value out where it is needed")
        if event.tag is not None:
            self._fail(event, f"`{event.tag}` is a tag, and files are data only", hint="leave the tag out")

    def _fail(self, event: Any, message: str, *, hint: str | None) -> NoReturn:
        _refuse(self._name, event.start_mark.line + 1, message, hint=hint)

    def _next(self) -> Any:
        return next(self._events)


def plain_scalar(text: str) -> object:
    """Return the value of an unquoted scalar by the core schema of YAML 1.2."""
    if text in _NULL:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL.fullmatch(text):
        return float(text.lower().replace(".", ""))
    return text
