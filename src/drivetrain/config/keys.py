"""The table of all settings, derived from the schema, and the search for what a misspelled name meant."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from drivetrain.config.schema import run_config
from drivetrain.config.section import Section, Setting, StrategySpec
from drivetrain.registry import strategy_specs

KeyKind = Literal["bool", "int", "float", "text", "choice"]

VARIABLE_PREFIX = "DRIVETRAIN_"

_KINDS: Mapping[object, KeyKind] = {bool: "bool", int: "int", float: "float", str: "text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One setting and its names.

    Args:
        path: canonical dotted path, such as `ddp_config.bucket_cap_mb`.
        section: `ddp_config`; empty for a setting at the top.
        name: `bucket_cap_mb`.
        flat: `ddp_bucket_cap_mb`, the name on the command line and in variables.
        kind: what its text must look like.
        choices: the allowed values of a choice.
        default: what holds when nobody says anything.
        help: the text under the field, on one line.
        setting: panel, aliases and scope.
        stands_for: the `distributed_type` that a chooser is short for; None for a setting.
    """

    path: str
    section: str
    name: str
    flat: str
    kind: KeyKind
    choices: tuple[str | int, ...]
    default: object
    help: str
    setting: Setting
    stands_for: str | None = None

    @property
    def variable(self) -> str:
        """Name of the environment variable that sets it."""
        return VARIABLE_PREFIX + self.flat.upper()

    @property
    def spellings(self) -> tuple[str, ...]:
        """What the key may be called inside its section of a file, the canonical name first."""
        return (self.name,) if self.flat == self.name else (self.name, self.flat)


@cache
def keys() -> Mapping[str, Key]:
    """Return every setting by its path, in the order of the schema."""
    model = run_config()
    found = [_key(name, field) for name, field in model.model_fields.items() if not _is_section(field)]
    for spec in strategy_specs():
        if spec.section is None or spec.settings is None:
            continue
        for name, field in spec.settings.model_fields.items():
            found.append(_key(name, field, section=spec.section, prefix=spec.flag_prefix, panel=spec.title))
    return {key.path: key for key in found}


@cache
def sections() -> Mapping[str, Mapping[str, Key]]:
    """Return, for each section of a file, its keys by all their spellings; the top is the section ``""``."""
    table: dict[str, dict[str, Key]] = {"": {}}
    for key in keys().values():
        table.setdefault(key.section, {}).update(dict.fromkeys(key.spellings, key))
    return table


@cache
def choosers() -> Mapping[str, Key]:
    """Return, by its name, what chooses a strategy by true or false, such as `use_fsdp`; no setting of its own."""
    return {spec.flag: _chooser(spec, spec.flag) for spec in strategy_specs() if spec.flag is not None}


@cache
def by_flat_name() -> Mapping[str, Key]:
    """Return every setting by its name outside files: `use_cpu`, `ddp_timeout`."""
    return {key.flat: key for key in keys().values()}


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that a misspelled name most probably meant."""
    names = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return names[matches[0]] if matches else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str | None:
    """Return the hint for a misspelled name, or None when nothing is near."""
    match = nearest(name, candidates)
    return None if match is None else f"did you mean `{match}`?"


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def _chooser(spec: StrategySpec, name: str) -> Key:
    kind = spec.distributed_types[0]
    return Key(
        path=name,
        section="",
        name=name,
        flat=name,
        kind="bool",
        choices=(),
        default=None,
        help=f"Train with {spec.title}: short for `--distributed_type {kind}`.",
        setting=Setting(panel=spec.title),
        stands_for=kind,
    )


def _key(name: str, field: FieldInfo, *, section: str = "", prefix: str = "", panel: str = "") -> Key:
    setting = next((item for item in field.metadata if isinstance(item, Setting)), Setting())
    kind, choices = _shape(field.annotation)
    return Key(
        path=f"{section}.{name}" if section else name,
        section=section,
        name=name,
        flat=prefix + name,
        kind=kind,
        choices=choices,
        default=field.default,
        help=" ".join((field.description or "").split()),
        setting=setting if setting.panel else replace(setting, panel=panel),
    )


def _shape(annotation: Any) -> tuple[KeyKind, tuple[str | int, ...]]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _shape(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        inner = [item for item in get_args(annotation) if item is not type(None)]
        if len(inner) == 1:
            return _shape(inner[0])
    if origin is Literal:
        return "choice", get_args(annotation)
    if annotation in _KINDS:
        return _KINDS[annotation], ()
    raise TypeError(f"a setting cannot be of type {annotation}")
