"""Sharing out data over ranks, and knowing which loader drives the training."""

from __future__ import annotations

from drivetrain.data.drivers import Drivers
from drivetrain.data.loader import LoaderContext, PreparedLoader

__all__ = ["Drivers", "LoaderContext", "PreparedLoader"]
