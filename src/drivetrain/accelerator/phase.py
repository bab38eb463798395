"""What comes between two steps within a window: one phase for one optimizer, mostly.

A phase collects losses over the scopes of a window. In the last scope ranks agree on it, once; from then on its
gradients are final, and made ready, each thing once, by whoever asks first: clipping, unscaling or the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from drivetrain.accelerator.totals import Totals
from drivetrain.protocols import Engine, Stepper, Strategy
from drivetrain.window import Window


class Phase:
    """One phase of a window, used again for the same place in the next one.

    Attributes:
        totals: the losses of this rank, and their sums over ranks.
        is_agreed: whether ranks have told each other what there is.
        items, loss: over all ranks and scopes, once agreed; the loss is a mean.
        factor: what the gradients are still to be multiplied by, once agreed.
        norm: of the gradients before they were clipped; None where they were not.
        reduced: models whose gradients are those of all ranks.
        steppers: optimizers that have used these gradients.
    """

    __slots__ = ("_clipped", "_scaled", "factor", "is_agreed", "items", "loss", "norm", "reduced", "steppers", "totals")

    def __init__(self, totals: Totals) -> None:
        self.totals = totals
        self.reduced: set[Engine] = set()
        self.steppers: set[Stepper] = set()
        self._scaled: set[Engine] = set()
        self._clipped: set[int] = set()
        self.is_agreed = False
        self.factor = 1.0
        self.items = 0.0
        self.loss: Tensor | None = None
        self.norm: Tensor | None = None

    def reset(self) -> None:
        """Forget everything, for the next window."""
        self.totals.reset()
        self.is_agreed = False
        self.norm = None
        self.reduced.clear()
        self.steppers.clear()
        self._scaled.clear()
        self._clipped.clear()

    def agree(self, window: Window, place: Sequence[float]) -> None:
        """Learn from the other ranks what the update holds; collective.

        Args:
            place: further numbers that must be the same on all ranks.

        Raises:
            RankMismatchError: ranks are at different places.
        """
        self.items, self.loss = self.totals.agree(window, place)
        self.factor = window.factor(self.items) if self.items else 1.0
        self.is_agreed = True

    def synchronize(self, engines: Iterable[Engine]) -> None:
        """Make the gradients of these models those of all ranks, once; collective."""
        for engine in engines:
            if engine not in self.reduced:
                self.reduced.add(engine)
                engine.synchronize()

    def scale(self, engines: Iterable[Engine]) -> None:
        """Apply the factor that is left on the final gradients of these models, once."""
        if self.factor == 1.0:
            return
        for engine in engines:
            if engine not in self._scaled:
                self._scaled.add(engine)
                engine.scale_gradients(self.factor)

    def clip_grad_norm(
        self,
        strategy: Strategy,
        parameters: Sequence[nn.Parameter],
        engines: Sequence[Engine],
        *,
        max_norm: float,
        norm_type: float,
    ) -> Tensor:
        """Clip final gradients; a factor that is left is applied on the way where all of the models are clipped."""
        chosen = {id(parameter) for parameter in parameters}
        factor = 1.0
        if self.factor != 1.0 and self._scaled.isdisjoint(engines) and _trained(engines) <= chosen:
            self._scaled.update(engines)
            factor = self.factor
        else:
            self.scale(engines)
        self.norm = strategy.clip_grad_norm(parameters, max_norm=max_norm, norm_type=norm_type, factor=factor)
        self._clipped = chosen if norm_type == 2.0 else set()
        return self.norm

    def norm_of(self, stepper: Stepper) -> Tensor:
        """Return a norm that is finite only if all gradients of an optimizer are: the known one, if it has them all."""
        trained = (id(parameter) for parameter in stepper.parameters if parameter.requires_grad)
        return self.norm if self.norm is not None and self._clipped.issuperset(trained) else stepper.grad_norm()


def _trained(engines: Iterable[Engine]) -> set[int]:
    parameters = (parameter for engine in engines for parameter in engine.module.parameters())
    return {id(parameter) for parameter in parameters if parameter.requires_grad}
