"""How one process on one device presents itself: no settings, one rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from drivetrain.config.section import StrategySpec
from drivetrain.errors import Problem

if TYPE_CHECKING:
    from drivetrain.config.schema import CoreConfig


def _check(config: CoreConfig, world_size: int | None) -> Iterator[Problem]:
    ranks = world_size or config.num_processes or 1
    if config.distributed_type == "NO" and ranks > 1:
        known = f"this run has {ranks}" if config.num_processes is None else "`num_processes` asks for more"
        yield Problem(
            path="distributed_type",
            message=f"`NO` is for one process, and {known}",
            hint="leave `distributed_type` out, or choose a type that serves several",
        )


SPEC = StrategySpec(
    name="single",
    title="one process",
    distributed_types=("NO",),
    automatic=lambda world_size: world_size == 1,
    implementation="drivetrain.strategies.single.strategy:SingleStrategy",
    check=_check,
)
