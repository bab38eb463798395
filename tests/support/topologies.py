"""Every way to spread a run that the registry knows, on as many CPU ranks as it takes: what contract tests run over."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from drivetrain.config import RunConfig
from drivetrain.registry import strategy_specs

RANKS = (1, 2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A strategy on a number of ranks.

    Args:
        distributed_type: the setting that chooses the strategy.
    """

    strategy: str
    distributed_type: str
    ranks: int

    @property
    def settings(self) -> dict[str, object]:
        """Arguments of `Accelerator(...)` that choose it."""
        return {"distributed_type": self.distributed_type, "cpu": True}

    def __str__(self) -> str:
        return f"{self.strategy}-{self.ranks}"


def topologies(*ranks: int) -> list[Topology]:
    """Return all topologies with these numbers of ranks."""
    return [
        Topology(strategy=spec.name, distributed_type=kind, ranks=count)
        for spec in strategy_specs()
        for kind in spec.distributed_types[:1]
        for count in ranks
        if (spec.automatic(count) or not any(map(spec.automatic, RANKS)))
        and not any(spec.check(RunConfig(use_cpu=True, distributed_type=kind), count))
    ]


every_topology = pytest.mark.parametrize("topology", topologies(*RANKS), ids=str)
two_ranks = pytest.mark.parametrize("topology", topologies(2), ids=str)
