"""The optimizer and the scheduler that `prepare` returns: the user's own, which act once per update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from drivetrain.accelerator.ledger import Ledger
from drivetrain.accelerator.updates import Updates
from drivetrain.errors import PrepareError, TrainingStepError
from drivetrain.protocols import Engine, Stepper


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standing:
    """Where an optimizer stands among models and other optimizers, as of a version of the ledger.

    Args:
        is_alone: whether no other optimizer steps its models.
    """

    version: int
    updates: Updates
    engines: list[Engine]
    is_alone: bool


class PreparedOptimizer(Optimizer):
    """An optimizer that steps at the end of a window and does nothing inside it.

    It is the user's optimizer seen through: groups, state and every other attribute are those of `optimizer`.

    Attributes:
        optimizer: the one that was given to `prepare`.
        owner: the accelerator that prepared it.
    """

    def __init__(self, stepper: Stepper, ledger: Ledger, *, owner: object) -> None:
        # Optimizer.__init__ would make groups and state of its own.
        self.optimizer = stepper.optimizer
        self.owner = owner
        self.stepper = stepper
        self._ledger = ledger
        self._engines: list[Engine] | None = None
        self._standing: _Standing | None = None
        self._skipped: bool | Tensor = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the user's optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The state of the user's optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default hyper-parameters of the user's optimizer."""
        return self.optimizer.defaults

    @property
    def engines(self) -> list[Engine]:
        """The engines of the models whose parameters it steps.

        Raises:
            PrepareError: it steps parameters of a model that is not prepared.
        """
        if self._engines is None:
            parameters = self.stepper.parameters
            if count := self._ledger.strangers(parameters):
                raise PrepareError(
                    f"{type(self.optimizer).__name__} steps {count} of {len(parameters)} parameters that belong to no "
                    "model that this accelerator has prepared",
                    hint="prepare the model that the optimizer was built for, with it or before the first step",
                )
            self._engines = self._ledger.owners(parameters)
        return self._engines

    def check_models(self) -> None:
        """Refuse an optimizer that knows none of the prepared models; some of its models may still come.

        Raises:
            PrepareError: it steps parameters of other models only.
        """
        if not self._ledger.owners(self.stepper.parameters):
            _ = self.engines

    @property
    def updates(self) -> Updates:
        """The updates that its models are in."""
        return self._stand().updates

    def _stand(self) -> _Standing:
        standing, version = self._standing, self._ledger.version
        if standing is None or standing.version != version:
            updates = self._ledger.updates_of(self.engines)
            is_alone = self._ledger.num_optimizers(updates) == 1
            standing = _Standing(version=version, updates=updates, engines=self.engines, is_alone=is_alone)
            self._standing = standing
        return standing

    @property
    def step_was_skipped(self) -> bool | Tensor:
        """Whether the last step left the weights as they were; a tensor where only the device knows."""
        return self._skipped

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply the gradients of a window; nothing inside one. Collective at its end.

        Raises:
            NonFiniteError: gradients are not finite and `non_finite` is `raise`.
            TrainingStepError: gradients are not in a state to be applied.
        """
        if closure is not None:
            raise TrainingStepError(
                "optimizer.step(closure) evaluates the loss several times per update, which is not supported",
                hint="call backward() yourself and step() without a closure",
            )
        standing = self._stand()
        skipped = standing.updates.step(self.stepper, standing.engines)
        self._skipped = False if skipped is None else skipped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, unless a window holds them that is not stepped yet."""
        standing = self._stand()
        standing.updates.zero_grad(self.stepper, standing.engines, set_to_none=set_to_none, is_alone=standing.is_alone)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the user's optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state into the user's optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the user's optimizer."""
        self.optimizer.add_param_group(param_group)
        self._engines = None
        self._standing = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"


class PreparedScheduler:
    """A learning rate schedule that advances once per update, whatever the number of ranks and micro-batches.

    Inside a window, and after an update that was skipped, `step` does nothing.

    Attributes:
        scheduler: the one that was given to `prepare`.
        owner: the accelerator that prepared it.
    """

    def __init__(self, scheduler: LRScheduler, optimizer: PreparedOptimizer, *, owner: object) -> None:
        self.scheduler = scheduler
        self.owner = owner
        self._optimizer = optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule by one update."""
        if self._optimizer.updates.is_between_steps:
            return
        skipped = self._optimizer.step_was_skipped
        # A tensor stays on the device: the schedule advances rather than wait for it.
        if isinstance(skipped, torch.Tensor) or not skipped:
            self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["scheduler"], name)
