"""What drivetrain says while it runs: lines on standard error, that begin with its name."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Print a line; who is to say it is the caller's business."""
    print(f"drivetrain: {line}", file=sys.stderr, flush=True)
