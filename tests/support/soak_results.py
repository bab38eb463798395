"""Writes the table of a soak run: what ran, how often, how it ended and how long it took."""

from __future__ import annotations

import platform
from collections import defaultdict
from dataclasses import dataclass, field
from importlib.metadata import version

import pytest


@dataclass(slots=True)
class Row:
    """All repeats of one test function."""

    repeats: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def add(self, report: pytest.TestReport) -> None:
        """Count one phase of one repeat; `repeats` are calls, so a failing set-up adds a failure without one."""
        self.seconds += report.duration
        self.repeats += report.when == "call" and not report.skipped
        self.failed += report.failed
        self.skipped += report.skipped
        self.notes += [f"{name}: {value}" for name, value in report.user_properties if report.when == "teardown"]

    @property
    def outcome(self) -> str:
        """Say it in words that can be compared between runs."""
        if self.failed:
            return f"{self.failed} failed"
        return "passed" if self.repeats else "skipped"


class SoakResults:
    """A pytest plug-in that collects reports and renders them."""

    def __init__(self) -> None:
        self._rows: defaultdict[str, Row] = defaultdict(Row)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a report to the row of its test function, whatever its parameters."""
        self._rows[report.nodeid.partition("[")[0]].add(report)

    def render(self) -> str:
        """Return the page. It has no date: the same results give the same text, up to the seconds."""
        lines = [
            "# Soak results",
            "",
            f"`make soak` with Python {platform.python_version()}, torch {version('torch')}, {platform.system()}.",
            "",
            "| test | repeats | outcome | seconds | notes |",
            "|---|---|---|---|---|",
        ]
        for name, row in sorted(self._rows.items()):
            notes = "; ".join(dict.fromkeys(row.notes))
            lines.append(f"| `{name}` | {row.repeats} | {row.outcome} | {row.seconds:.0f} | {notes} |")
        return "\n".join([*lines, ""])
