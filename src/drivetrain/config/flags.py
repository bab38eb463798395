"""The settings as flags of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from drivetrain.config.keys import Key, keys
from drivetrain.config.section import StrategySpec
from drivetrain.config.sources import show
from drivetrain.registry import strategy_specs


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One setting on the command line.

    Args:
        path: the setting.
        names: spellings with underscores and with hyphens.
        aliases: further names, such as `--cpu`.
        kind: a bool may stand alone and then means true; a value needs text after it.
        metavar: what the text is, for the help page; `true|false` for a bool whose default is true, else empty.
        choices: allowed texts, if the list is closed.
        help: one or more sentences.
        panel: heading on the help page.
        default_text: the default as text; empty when the help says what holds without it.
        stands_for: the value of `path` that a flag without value gives; None for all others.
    """

    path: str
    names: tuple[str, ...]
    aliases: tuple[str, ...]
    kind: Literal["bool", "value"]
    metavar: str
    choices: tuple[str, ...]
    help: str
    panel: str
    default_text: str
    stands_for: str | None = None


@cache
def flags() -> tuple[Flag, ...]:
    """Return a flag for every setting, in the order of the schema, after those that choose a strategy."""
    return (*(_chooser(spec) for spec in strategy_specs() if spec.flag), *(_flag(key) for key in keys().values()))


def _chooser(spec: StrategySpec) -> Flag:
    kind = spec.distributed_types[0]
    return Flag(
        path="distributed_type",
        names=_spelled(str(spec.flag)),
        aliases=(),
        kind="bool",
        metavar="",
        choices=(),
        help=f"Train with {spec.title}: short for `--distributed_type {kind}`.",
        panel=spec.title,
        default_text="",
        stands_for=kind,
    )


def _flag(key: Key) -> Flag:
    return Flag(
        path=key.path,
        names=_spelled(key.flat),
        aliases=tuple(spelling for alias in key.setting.aliases for spelling in _spelled(alias)),
        kind="bool" if key.kind == "bool" else "value",
        metavar={
            "bool": "true|false" if key.default is True else "",
            "int": "INT",
            "float": "NUMBER",
            "text": "TEXT",
            "choice": "CHOICE",
        }[key.kind],
        choices=tuple(str(choice) for choice in key.choices),
        help=key.help,
        panel=key.setting.panel,
        default_text="" if key.default is None else show(key.default),
    )


def _spelled(name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))
