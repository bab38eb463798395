"""Containers of the kinds that models return and metrics take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Scores(NamedTuple):
    values: Any
    names: Any


@dataclass
class Output:
    loss: Any
    logits: Any = None
