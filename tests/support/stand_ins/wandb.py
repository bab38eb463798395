"""Stands in for W&B 0.31: the calls that its adapter makes, with the real names of their arguments, recorded."""

from __future__ import annotations

from typing import Any

calls: list[tuple[Any, ...]] = []


class Config:
    """Of a run."""

    def update(self, d: dict[str, Any], allow_val_change: bool | None = None) -> None:
        """Record the call."""
        calls.append(("config.update", d, allow_val_change))


class Run:
    """What `init` returns."""

    def __init__(self) -> None:
        self.config = Config()

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """Record the call."""
        calls.append(("log", data, step, commit))

    def finish(self, exit_code: int | None = None) -> None:
        """Record the call."""
        calls.append(("finish", exit_code))


def init(
    entity: str | None = None,
    project: str | None = None,
    dir: str | None = None,  # noqa: A002 - its real name
    name: str | None = None,
    mode: str | None = None,
) -> Run:
    """Record the call."""
    calls.append(("init", project, dir, name, mode))
    return Run()
