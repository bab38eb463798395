"""The settings as flags of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from drivetrain.config.keys import Key, choosers, keys
from drivetrain.config.sources import show


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
        stands_for: the `distributed_type` that a chooser is short for; None for a setting.
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
    return tuple(_flag(key) for key in (*choosers().values(), *keys().values()))


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
        stands_for=key.stands_for,
    )


def _spelled(name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))
