"""Starts the ranks of a job: `plan` decides, `start` does it. Neither imports torch for a single rank."""

from __future__ import annotations

from drivetrain.launch.machine import Machine, inspect_machine
from drivetrain.launch.planning import LaunchPlan, plan
from drivetrain.launch.script import Script
from drivetrain.launch.starting import start

__all__ = ["LaunchPlan", "Machine", "Script", "inspect_machine", "plan", "start"]
