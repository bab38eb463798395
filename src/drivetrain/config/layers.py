"""Turns what a file, the environment, the command line or code says into a layer of values with canonical paths.

A key that cannot be placed is kept as a problem of the layer, so that `resolve` can name the faults of all layers
at once. Values are not looked at here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from drivetrain.config.keys import VARIABLE_PREFIX, Key, by_flat_name, choosers, did_you_mean, keys, sections
from drivetrain.config.migrate import RENAMED, absent_key, rule_for
from drivetrain.config.section import Dropped, Section
from drivetrain.config.sources import Entry, Layer, Source, SourceKind, Value, plain, show
from drivetrain.errors import Problem

if TYPE_CHECKING:
    from drivetrain.config.flags import Flag

OWN_VARIABLES = frozenset(
    {
        "DRIVETRAIN_CONFIG_FILE",
        "DRIVETRAIN_HOME",
        "DRIVETRAIN_RENDEZVOUS",
        "DRIVETRAIN_RUN_ID",
        "DRIVETRAIN_SETTINGS",
    }
)
"""Variables that drivetrain sets or reads and that are no settings."""


def read_file(path: str | os.PathLike[str]) -> Layer:
    """Return what a YAML or JSON file says.

    Raises:
        ConfigError: the file as a whole cannot be used. Unknown keys are left to `resolve`.
    """
    # The YAML library loads only where a file is read.
    from drivetrain.config.reader import read_entries

    return _Placement(kind="file").place_all(read_entries(path))


def layer_from_mapping(mapping: Mapping[str, object], *, place: str) -> Layer:
    """Return what a mapping in the form of a file says; it stands where the file stands."""
    return _Placement(kind="file").place_all(_entries(mapping, place))


def layer_from_code(arguments: Mapping[str, object], *, call: str = "Accelerator") -> Layer:
    """Return what the arguments of a call say; None means "not given", a section is a dict or a settings model."""
    aliases = {alias: key.path for key in keys().values() for alias in key.setting.aliases}
    placement = _Placement(kind="code")
    for name, value in arguments.items():
        for entry in _entries({aliases.get(name, name): value}, f"{call}({name}=...)"):
            placement.place(entry)
    return placement.layer()


def layer_from_variables(variables: Mapping[str, str]) -> Layer:
    """Return what the variables `DRIVETRAIN_<KEY>` say; an empty one says nothing, others are ignored."""
    table = {key.variable: key for key in (*choosers().values(), *keys().values())}
    values: dict[str, Value] = {}
    problems: list[Problem] = []
    for name, text in variables.items():
        if not name.startswith(VARIABLE_PREFIX) or name in OWN_VARIABLES or not text:
            continue
        source = Source(kind="environment", place=name)
        if key := table.get(name):
            values[key.path] = Value(raw=text, source=source, written=key.path)
        else:
            rule = rule_for(name.removeprefix(VARIABLE_PREFIX).lower())
            message = rule.reason if rule else "no setting has this name"
            hint = rule.hint if rule else did_you_mean(name, table)
            problems.append(Problem(path=name, value=show(text), source="environment", message=message, hint=hint))
    return Layer(by_path=values, problems=tuple(problems))


def layer_from_flags(pairs: Sequence[tuple[Flag, str, str]]) -> Layer:
    """Return what typed flags say: each with its flag, the spelling that was typed, and the text after it."""
    values: dict[str, Value] = {}
    problems: list[Problem] = []
    for flag, spelling, text in pairs:
        value = Value(raw=text, source=Source(kind="flag", place=spelling), written=flag.path)
        earlier = values.setdefault(flag.path, value)
        if earlier.raw != text:
            message = f"{earlier.source} says {show(earlier.raw)}"
            problems.append(value.problem(message, hint="give the flag once"))
    return Layer(by_path=values, problems=tuple(problems))


class _Placement:
    """Finds the setting that each entry of a tree means, and collects what it found."""

    def __init__(self, *, kind: SourceKind) -> None:
        self._kind = kind
        self._values: dict[str, Value] = {}
        self._problems: list[Problem] = []
        self._notes: list[str] = []

    def layer(self) -> Layer:
        return Layer(by_path=self._values, problems=tuple(self._problems), notes=tuple(self._notes))

    def place_all(self, entries: Iterable[Entry]) -> Layer:
        for entry in entries:
            self.place(entry)
        return self.layer()

    def place(self, entry: Entry) -> None:
        """Place one entry of the top level."""
        if entry.key in sections() and entry.key:
            self._place_section(entry)
        elif key := sections()[""].get(entry.key) or choosers().get(entry.key):
            self._add(key.path, self._value(entry))
        elif self._kind == "file" and entry.key in RENAMED:
            self._rename(entry)
        elif rule := rule_for(entry.key):
            self._drop(entry, rule)
        else:
            self._refuse(entry, entry.key, "there is no such setting", hint=_hint_for_top(entry.key))

    def _place_section(self, entry: Entry) -> None:
        if entry.value is None:
            return
        if not isinstance(entry.value, tuple):
            self._refuse(entry, entry.key, "this is a section and needs `key: value` pairs under it", hint=None)
            return
        table = sections()[entry.key]
        for inner in entry.value:
            written = f"{entry.key}.{inner.key}"
            if key := table.get(inner.key):
                self._add(key.path, self._value(inner, written=written))
            elif rule := absent_key(entry.key, inner.key):
                self._drop(inner, rule, written=written)
            else:
                hint = did_you_mean(inner.key, _like(inner.key, table))
                self._refuse(inner, written, f"`{entry.key}` has no key `{inner.key}`", hint=hint)

    def _rename(self, entry: Entry) -> None:
        rule = RENAMED[entry.key]
        raw = rule.translate(plain(entry.value))
        if raw is None:
            return
        old = self._value(entry)
        self._add(rule.path, replace(old, raw=raw), shown=old)
        self._notes.append(f"{entry.place}: `{entry.key}: {show(old.raw)}` is read as `{rule.path}: {show(raw)}`")

    def _drop(self, entry: Entry, rule: Dropped, *, written: str | None = None) -> None:
        if not rule.accepts(plain(entry.value)):
            self._refuse(entry, written or entry.key, rule.reason, hint=rule.hint)

    def _add(self, path: str, value: Value, *, shown: Value | None = None) -> None:
        if value.raw is None:
            return
        earlier = self._values.setdefault(path, value)
        if earlier is not value:
            other = "" if earlier.written == value.written else f" as `{earlier.written}`"
            message = f"{earlier.source} gives it too{other}: {show(earlier.raw)}"
            self._problems.append((shown or value).problem(message, hint="keep one of them"))

    def _refuse(self, entry: Entry, written: str, message: str, *, hint: str | None) -> None:
        self._problems.append(self._value(entry, written=written).problem(message, hint=hint))

    def _value(self, entry: Entry, *, written: str | None = None) -> Value:
        source = Source(kind=self._kind, place=entry.place)
        return Value(raw=plain(entry.value), source=source, written=written or entry.key)


def _entries(mapping: Mapping[str, object], place: str) -> tuple[Entry, ...]:
    return tuple(Entry(key=str(key), value=_nested(value, place), place=place) for key, value in mapping.items())


def _nested(value: object, place: str) -> object:
    if isinstance(value, Section):
        return _entries({name: getattr(value, name) for name in sorted(value.model_fields_set)}, place)
    if isinstance(value, Mapping):
        return _entries(value, place)
    return list(value) if isinstance(value, tuple) else value


def _hint_for_top(name: str) -> str | None:
    key = by_flat_name().get(name)
    if key is not None:
        return f"it belongs under `{key.section}`"
    return did_you_mean(name, [*sections()[""], *choosers(), *filter(None, sections())])


def _like(name: str, table: Mapping[str, Key]) -> list[str]:
    """Return the spellings of a section's keys that are formed like the user's: all with prefix, or all without."""
    prefixed = [key.flat for key in table.values()]
    prefix = prefixed[0].removesuffix(next(iter(table.values())).name)
    return prefixed if prefix and name.startswith(prefix) else [key.name for key in table.values()]
