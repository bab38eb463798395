"""The table of all settings in Markdown: `python -m drivetrain.config.reference`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from drivetrain.config.keys import Key, keys
from drivetrain.config.sources import show

_HEAD = ("| setting | values | default | meaning |", "|---|---|---|---|")


def reference() -> str:
    """Return one table per panel, in the order of the schema."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    for number, (panel, group) in enumerate(groupby(keys().values(), key=lambda key: key.setting.panel)):
        yield from ("",) * (number > 0)
        yield from (f"## {panel[:1].upper()}{panel[1:]}", "", *_HEAD)
        yield from map(_row, group)


def _row(key: Key) -> str:
    names = [key.path, *(f"--{alias}" for alias in key.setting.aliases)]
    values = ", ".join(f"`{choice}`" for choice in key.choices) or {"bool": "`true`, `false`"}.get(key.kind, key.kind)
    default = "" if key.default is None else f"`{show(key.default)}`"
    return f"| {', '.join(f'`{name}`' for name in names)} | {values} | {default} | {key.help} |"


if __name__ == "__main__":
    print(reference(), end="")
