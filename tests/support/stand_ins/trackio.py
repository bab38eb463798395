"""Stands in for trackio 0.43: the calls that its adapter makes, with the real names of their arguments, recorded."""

from __future__ import annotations

from typing import Any

calls: list[tuple[Any, ...]] = []


class Run:
    """What `init` returns."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {"_Username": "somebody"}

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Record the call."""
        calls.append(("log", metrics, step))

    def finish(self) -> None:
        """Record the call."""
        calls.append(("finish",))


def init(project: str, name: str | None = None, group: str | None = None, space_id: str | None = None) -> Run:
    """Record the call."""
    calls.append(("init", project, name, group))
    return Run()
