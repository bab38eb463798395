"""Where the values of a run are logged to: a file of JSON lines always, trackers as asked for.

A `Tracker` records plain values in one place; `RunTrackers` holds those of a run. What a script logs becomes plain
first, in `values`: no tracker ever sees a tensor. Trackers exist on the main rank alone.
"""

from __future__ import annotations

from drivetrain.trackers.run import RunTrackers, TrackerLike
from drivetrain.trackers.tracker import SilentTracker, Tracker
from drivetrain.trackers.values import Scalar

__all__ = ["RunTrackers", "Scalar", "SilentTracker", "Tracker", "TrackerLike"]
