"""The log that every run has: a file with one JSON object per call of `log`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.errors import TrackerError
from drivetrain.trackers.tracker import Tracker
from drivetrain.trackers.values import Scalar

FILE = "metrics.jsonl"
CONFIGURATION = "metrics.config.json"
_OWN_KEYS = ("step", "time")


class JsonLines(Tracker):
    """Appends to `metrics.jsonl`: `step`, `time` (seconds since 1970) and the values, in one flat object per line.

    JSON knows no NaN and no infinities: they are the texts "NaN", "Infinity" and "-Infinity". What the run was
    started with goes into a file beside it. A line is handed to the system before `log` returns.

    Args:
        project_name: for that file.
        logging_dir: made if it is not there.
    """

    name = "jsonl"

    def __init__(self, project_name: str, *, logging_dir: Path) -> None:
        self.path = logging_dir / FILE
        self._project_name = project_name
        logging_dir.mkdir(parents=True, exist_ok=True)
        _cut_broken_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    @property
    def tracker(self) -> Path:
        """The file."""
        return self.path

    def store_init_configuration(self, values: Mapping[str, object]) -> None:
        """Write the configuration to `metrics.config.json`, over that of an earlier run."""
        stored = {"project_name": self._project_name, "time": time.time(), "config": values}
        text = json.dumps(_strict(stored), indent=2, allow_nan=False)
        self.path.with_name(CONFIGURATION).write_text(text + "\n", encoding="utf-8")

    def log(self, values: Mapping[str, Scalar], step: int, **options: Any) -> None:
        """Append one line."""
        if options:
            raise TrackerError(f"{self.name} takes no `log_kwargs`, and got {', '.join(map(repr, options))}")
        for key in _OWN_KEYS:
            if key in values:
                raise TrackerError(
                    f"the value {key!r} cannot be logged: each record has its own `step` and `time`",
                    hint="pass log(values, step=...)" if key == "step" else "give it another name, such as 'seconds'",
                )
        record = _strict({"step": step, "time": round(time.time(), 6), **values})
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def finish(self) -> None:
        """Close the file."""
        self._file.close()


def _strict(value: object) -> object:
    """Return the value without numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _strict(inner) for key, inner in value.items()}
    return [_strict(inner) for inner in value] if isinstance(value, list) else value


def _cut_broken_line(path: Path) -> None:
    """Remove the part of a line that a full disk may have left at the end, so that the next one is readable."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, 2)
        while end > 0:
            file.seek(end - 1)
            if file.read(1) == b"\n":
                break
            end -= 1
        file.truncate(end)
