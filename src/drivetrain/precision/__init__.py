"""Number formats: what `mixed_precision` means, autocast around a model's forward, loss scaling."""

from __future__ import annotations

from drivetrain.precision.autocast import AutocastHooks
from drivetrain.precision.policy import Precision

__all__ = ["AutocastHooks", "Precision"]
