"""The commands that exist."""

from __future__ import annotations

from collections.abc import Mapping

COMMANDS: Mapping[str, str] = {"launch": "Start a script on one or more processes."}
"""Name and one sentence; `main` finds the code of a command in the module `drivetrain.cli.<name>`."""
