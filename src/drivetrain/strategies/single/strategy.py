"""One process, one device: models stay as they are, nothing travels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.protocols import Engine
from drivetrain.strategies.common import LocalEngine, ReplicatedStrategy, StrategyContext, run_backward


class SingleStrategy(ReplicatedStrategy):
    """Training on one process."""

    divisor = 1

    def __init__(self, context: StrategyContext) -> None:
        self._context = context

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Sequence[Engine]:
        """Put the models on the device."""
        del optimizers
        return [LocalEngine(model, self._context) for model in models]

    def backward(
        self, loss: Tensor, engines: Sequence[Engine], *, contributes: bool, retain_graph: bool
    ) -> Sequence[Engine]:
        """Run the backward pass."""
        return run_backward(loss, engines, retain_graph=retain_graph) if contributes else engines
