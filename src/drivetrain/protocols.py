"""What the facade needs from a strategy. Nothing here knows how any strategy works.

A *strategy* makes models distributed. It returns an *engine* for each model, which knows when gradients travel, and a
*stepper* for each optimizer, which knows how to apply them. Gradients accumulate in `parameter.grad` or wherever the
strategy keeps them; the facade only asks for them to be reduced, scaled, measured, clipped and applied, in this order:

    engine.begin(sync)          forwards, then strategy.backward(loss), as often as a scope has losses
    engine.synchronize()        now gradients are those of all ranks, divided by `strategy.divisor`
    stepper.unscale(scaler)     only with a loss scaler
    engine.scale_gradients, strategy.clip_grad_norm / clip_grad_value
    stepper.step()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from drivetrain.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """How ranks talk to each other.

    Args:
        backend: of torch.distributed; None for the one that fits the device.
        timeout_seconds: after which a collective that a rank does not join fails.
        needs_group: also on one rank.
    """

    backend: str | None = None
    timeout_seconds: float = 1800.0
    needs_group: bool = False


class Engine(Protocol):
    """One prepared model."""

    @property
    def module(self) -> nn.Module:
        """The user's own model."""

    @property
    def prepared(self) -> nn.Module:
        """What `prepare` returns: the model itself, or a wrapper that forwards attributes to it."""

    def begin(self, *, sync: bool) -> None:
        """Say, before the forwards of a scope, whether its backward is to reduce gradients over ranks.

        A permission, not a promise: where `sync` is False, or the backward cannot reduce, `synchronize` does it later.
        Where gradients have no place to wait whole, a backward reduces all the same; ranks then run equally many.
        """

    def synchronize(self) -> None:
        """Reduce what has accumulated and is not reduced yet; collective where something is missing."""

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients in place."""

    def drop_gradients(self) -> None:
        """Forget all gradients, reduced or not."""

    def keep_gradients(self) -> AbstractContextManager[None]:
        """Return a context that leaves the gradients as it found them, whatever backward runs in it unreduced."""

    def forward_method(self, name: str) -> Callable[..., Any]:
        """Make a method of the model go through the engine as its forward does; return it, to be called on `prepared`.

        Where a call of the method as it is would find parameters that are not there, or leave gradients unreduced, that
        call is an error.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Return all parameters and persistent buffers whole, under the model's own names; collective if sharded."""

    def close(self) -> None:
        """Take off what was hooked on the model."""


class Stepper(Protocol):
    """One prepared optimizer."""

    @property
    def optimizer(self) -> Optimizer:
        """The user's own optimizer."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The models' parameters that it steps, whatever the optimizer's own groups hold."""

    @property
    def has_device_skip(self) -> bool:
        """Whether `step` can leave everything untouched by a flag on the device, without the host reading it."""

    def has_gradients(self) -> bool:
        """Return whether a backward has left anything that is not cleared."""

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clear the gradients, reduced or not."""

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        """Divide the gradients by the loss scale and record whether they are finite."""

    def grad_norm(self) -> Tensor:
        """Return the global L2 norm of this optimizer's gradients, 0-d, the same on every rank."""

    def step(self, *, found_inf: Tensor | None = None) -> None:
        """Apply the gradients, unless `found_inf`, a 0-d float on the device, is not zero.

        Args:
            found_inf: only where `has_device_skip`.
        """


class Strategy(Protocol):
    """A way to spread models over ranks.

    Attributes:
        divisor: what reduced gradients are divided by: the number of ranks for a mean, 1 for a sum.
    """

    divisor: int

    @staticmethod
    def communication(config: RunConfig) -> Communication:
        """Return how ranks are to talk; asked before there is a process group."""

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Sequence[Engine]:
        """Prepare models, in place where possible, with the optimizers that are prepared in the same call; collective.

        Parameters that are replaced are replaced in the optimizers too, by name.
        """

    def attach(self, optimizer: Optimizer) -> Stepper:
        """Prepare an optimizer; its models come before, with or after it. Collective where it completes a model."""

    def backward(
        self, loss: Tensor, engines: Sequence[Engine], *, contributes: bool, retain_graph: bool
    ) -> Sequence[Engine]:
        """Run one backward pass for the engines of a scope.

        Args:
            retain_graph: keep the graph for another backward through it.
            contributes: False for a filler: take part in what is collective, leave every gradient as it was.

        Returns:
            The engines that it has reached, at least where not all ranks need reach the same.
        """

    def clip_grad_norm(
        self, parameters: Iterable[nn.Parameter], *, max_norm: float, norm_type: float, factor: float
    ) -> Tensor:
        """Multiply gradients by `factor`, then scale them so that their global norm is at most `max_norm`.

        Collective over every axis that shards a parameter. Does not synchronise the host.

        Returns:
            The norm between the two, 0-d, a plain tensor, the same on every rank.
        """

    def clip_grad_value(self, parameters: Iterable[nn.Parameter], *, clip_value: float) -> None:
        """Clamp every element to [-clip_value, clip_value]."""
