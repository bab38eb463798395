"""The commands that exist."""

from __future__ import annotations

from collections.abc import Mapping

COMMANDS: Mapping[str, str] = {"launch": "Start a script on one or more processes."}
"""Name and one sentence; `main` finds the code of a command in the module `drivetrain.cli.<name>`."""

ABSENT: Mapping[str, str] = {
    "checkpoint": "`accelerator.save_model` writes the weights",
    "config": "write the file by hand: `drivetrain launch --help` lists its keys, each without `--`",
    "env": "`python -m torch.utils.collect_env` tells about torch and the machine",
    "plan": "`drivetrain launch --dry-run script.py` shows what would be started",
    "test": "`drivetrain launch --dry-run script.py` shows what would be started",
}
"""Commands that do not exist yet, with what helps today."""
