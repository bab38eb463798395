"""drivetrain: one PyTorch training script on any topology, with the same numbers, checkpoint and configuration."""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator, Update
    from drivetrain.cluster.log import get_logger
    from drivetrain.cluster.seed import set_seed
    from drivetrain.config import RunConfig
    from drivetrain.errors import DrivetrainError

__version__ = "0.1.0"

__all__ = ["Accelerator", "DrivetrainError", "RunConfig", "Update", "__version__", "get_logger", "set_seed"]

_HOMES = {
    "Accelerator": "drivetrain.accelerator",
    "DrivetrainError": "drivetrain.errors",
    "RunConfig": "drivetrain.config",
    "Update": "drivetrain.accelerator",
    "get_logger": "drivetrain.cluster.log",
    "set_seed": "drivetrain.cluster.seed",
}


def __getattr__(name: str) -> object:
    # Resolved on use, so that `drivetrain --help` never waits for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")
    # With torch loaded, one collection walks all of its objects: half the time that this import would take.
    collects = gc.isenabled()
    gc.disable()
    try:
        return getattr(import_module(_HOMES[name]), name)
    finally:
        if collects:
            gc.enable()


def __dir__() -> list[str]:
    return sorted(__all__)
