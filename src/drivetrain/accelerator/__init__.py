"""The facade: one object that a training script talks to."""

from __future__ import annotations

from drivetrain.accelerator.accelerator import Accelerator
from drivetrain.accelerator.updates import Update

__all__ = ["Accelerator", "Update"]
