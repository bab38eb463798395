"""Data parallelism: every rank holds the model, gradients are averaged by torch's DistributedDataParallel.

DDP reduces gradients once for each forward, while the backward runs. The engine lets it do so whenever the last
backward of a scope follows a forward of that scope, and knows what DDP leaves unreduced: a second loss of one
forward, a scope without a backward. What is left it reduces by one more pass through DDP's own reducer, before the
gradients are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from drivetrain.cluster.control import Call, Control
from drivetrain.errors import TopologyError, TrainingStepError
from drivetrain.protocols import Communication, Engine
from drivetrain.strategies.common import (
    LocalEngine,
    ReplicatedStrategy,
    StrategyContext,
    run_backward,
)
from drivetrain.strategies.ddp.settings import DDPSettings

if TYPE_CHECKING:
    from drivetrain.config import RunConfig

_NAMES_SHOWN = 8
_LAST_WORD_SECONDS = 2.0


class DataParallel(DistributedDataParallel):
    """DDP whose attributes are also those of the model, and whose evaluation needs no other rank.

    Attributes:
        is_armed: whether the reducer waits for the backward of the last forward.
    """

    _control: Control | None = None

    def __init__(self, module: nn.Module, control: Control, **options: Any) -> None:
        super().__init__(module, **options)
        self.is_armed = False
        self._control = control

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; with gradients, prepare the reduction that its backward will do."""
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        output: Any = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        self.is_armed = self.require_backward_grad_sync
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _sync_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks, and say where the ranks are if one does not come. Collective."""
        control = self._control
        if control is None:
            super()._sync_buffers()  # type: ignore[no-untyped-call]
            return
        meeting = control.start(Call.FORWARD)
        try:
            super()._sync_buffers()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            # Torch only knows that a rank is gone.
            meeting.wait(seconds=_LAST_WORD_SECONDS)
            raise TopologyError(
                f"rank {control.rank} could not take over the buffers of rank 0 in a forward after update "
                f"{control.updates}: {error}",
                hint="look for the rank that failed or left first, or for buffers that differ in size between ranks",
            ) from error
        # Also rank 0, which only sends, must not go on without the others.
        meeting.wait()

    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **options: Any) -> Any:
        """Load a state under the model's own names, or under those of the wrapper."""
        if any(name.startswith("module.") for name in state_dict):
            return super().load_state_dict(state_dict, *arguments, **options)
        return self.module.load_state_dict(state_dict, *arguments, **options)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made from: it runs like any DDP model, and is not in the run."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state.pop("_control", None)
        return state

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class DDPEngine(LocalEngine):
    """A model under DDP: whole on every rank, and its gradients travel."""

    def __init__(self, module: nn.Module, context: StrategyContext) -> None:
        super().__init__(module, context)
        settings = context.config.section(DDPSettings)
        self._checks_usage = not (settings.find_unused_parameters or settings.static_graph)
        self._ddp = DataParallel(module, context.ranks.control, **_ddp_options(settings, context.device))
        self.prepared = self._ddp
        self._is_dirty = False
        self._has_own = False
        self._has_rebuilt = False
        self._trained = [value for value in module.named_parameters() if value[1].requires_grad]
        self._frozen = [value for value in module.named_parameters() if not value[1].requires_grad]

    def begin(self, *, sync: bool) -> None:
        """Let the next forwards arm the reducer, or not."""
        self._ddp.require_backward_grad_sync = sync

    def after_backward(self) -> None:
        """Note whether what a backward has left in the gradients is reduced."""
        self._has_own = True
        if self._ddp.is_armed:
            self._ddp.is_armed = False
            self._check_all_parameters_used()
            self._is_dirty = False
            self._rebuild_buckets()
        else:
            self._is_dirty = True

    def join_backward(self) -> None:
        """Stand in for a backward of the other ranks: contribute nothing where they reduce."""
        if self._ddp.is_armed:
            self._ddp.is_armed = False
            self._reduce()
        else:
            self._is_dirty = True

    def synchronize(self) -> None:
        """Reduce what DDP left unreduced.

        What is reduced already may be in there: averaging equal numbers leaves them as they are.

        Raises:
            TrainingStepError: a parameter is trained that was frozen when the model was prepared.
        """
        _check_still_frozen(self._frozen)
        if self._is_dirty:
            self._check_gradients_there()
            self._reduce()
        self._has_own = False

    def drop_gradients(self) -> None:
        """Forget all gradients, reduced or not."""
        super().drop_gradients()
        self._is_dirty = self._has_own = False

    def close(self) -> None:
        """Take the hooks off the model: those of autocast, and DDP's on the gradients."""
        super().close()
        self._ddp.reducer._remove_autograd_hooks()

    def _reduce(self) -> None:
        self._is_dirty = False
        for name, parameter in self._trained:
            if not parameter.requires_grad:
                raise TrainingStepError(
                    f"{name} was trained when the model was prepared and is frozen now, and DDP waits for its gradient",
                    hint="freeze it before prepare(), or only while other models are trained",
                )
        parameters = [parameter for _, parameter in self._trained]
        looks_for_unused = self._ddp.find_unused_parameters
        if looks_for_unused:
            # Those without a gradient are left out, as in a loss that does not use them; one must be there.
            parameters = [parameter for parameter in parameters if parameter.grad is not None] or parameters[:1]
        with torch.enable_grad():
            # In the order in which a backward would come to them, in which DDP then lays out its buckets.
            nothing = _AddZeros.apply(*reversed(parameters))  # type: ignore[no-untyped-call]
        # As DDP does at the end of a forward: from here the reducer waits for every parameter's gradient.
        self._ddp.reducer.prepare_for_backward([nothing] if looks_for_unused else [])
        nothing.backward()
        self._rebuild_buckets()

    def _rebuild_buckets(self) -> None:
        """Lay out DDP's buckets anew after the first reduction, when all ranks are here.

        DDP would do it in the next forward, where a rank that another has left waits without knowing where that is.
        """
        if not self._has_rebuilt:
            self._has_rebuilt = True
            self._ddp.reducer._rebuild_buckets()

    def trainable(self) -> list[nn.Parameter]:
        """Return the parameters that DDP reduces."""
        return [parameter for _, parameter in self._trained]

    def _check_all_parameters_used(self) -> None:
        if not self._checks_usage:
            return
        try:
            self._ddp.reducer._check_reducer_finalized()
        except RuntimeError as error:
            listed = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            numbers = [int(number) for number in listed[1].split()] if listed else []
            raise self._unused([self._trained[number][0] for number in numbers]) from error

    def _check_gradients_there(self) -> None:
        """Refuse a window that has left parameters without a gradient, as DDP does in a single backward."""
        if self._checks_usage and self._has_own and any(value.grad is None for _, value in self._trained):
            raise self._unused([name for name, parameter in self._trained if parameter.grad is None])

    def _unused(self, unused: list[str]) -> TrainingStepError:
        shown = ", ".join(unused[:_NAMES_SHOWN]) + (", ..." if len(unused) > _NAMES_SHOWN else "")
        return TrainingStepError(
            f"the loss does not depend on {len(unused) or 'some'} of the model's parameters "
            f"({shown or 'unknown ones'}), and DDP waits for all gradients",
            hint="use every parameter in every step, freeze them with requires_grad_(False) before prepare(), "
            "or set `ddp_config.find_unused_parameters: true` (--ddp_find_unused_parameters)",
        )


class FrozenEngine(LocalEngine):
    """A model without trained parameters: the same on every rank, and nothing of it travels."""

    def synchronize(self) -> None:
        """Nothing travels.

        Raises:
            TrainingStepError: a parameter is trained that was frozen when the model was prepared.
        """
        _check_still_frozen(self.module.named_parameters())


def _check_still_frozen(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    for name, parameter in parameters:
        if parameter.requires_grad:
            raise TrainingStepError(
                f"{name} is trained now and was frozen when the model was prepared, so DDP does not reduce it",
                hint="prepare the model with every parameter that will be trained unfrozen",
            )


class _AddZeros(torch.autograd.Function):
    """A number whose gradient is zero for every input, whatever the inputs are."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        del gradients
        return tuple(parameter.new_zeros(()).expand_as(parameter) for parameter in ctx.saved_tensors)


class DDPStrategy(ReplicatedStrategy):
    """Data parallel training."""

    def __init__(self, context: StrategyContext) -> None:
        self._context = context
        self.divisor = context.ranks.world_size

    @staticmethod
    def communication(config: RunConfig) -> Communication:
        """Return the backend and the time-out of the settings."""
        settings = config.section(DDPSettings)
        default = Communication()
        return Communication(backend=settings.backend, timeout_seconds=settings.timeout or default.timeout_seconds)

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Sequence[Engine]:
        """Put the models on the device, as rank 0 has them, and wrap those that are trained; collective."""
        del optimizers
        return [self._engine(model) for model in models]

    def backward(
        self, loss: Tensor, engines: Sequence[Engine], *, contributes: bool, retain_graph: bool
    ) -> Sequence[Engine]:
        """Run the backward pass; where a forward armed the reducer, gradients are averaged on the way."""
        if not contributes:
            trained = [engine for engine in engines if isinstance(engine, DDPEngine)]
            expected = _reached(loss, trained, retain_graph=retain_graph)
            for stand_in in expected:
                stand_in.join_backward()
            return expected
        reached = run_backward(loss, engines, retain_graph=retain_graph)
        for engine in reached:
            if isinstance(engine, DDPEngine):
                engine.after_backward()
        return reached

    def _engine(self, model: nn.Module) -> Engine:
        if self.divisor > 1 and any(parameter.requires_grad for parameter in model.parameters()):
            return DDPEngine(model, self._context)
        if self.divisor == 1:
            return LocalEngine(model, self._context)
        engine = FrozenEngine(model, self._context)
        with torch.no_grad():
            for value in (*model.parameters(), *model.buffers()):
                dist.broadcast(value, src=0)
        return engine


def _ddp_options(settings: DDPSettings, device: torch.device) -> dict[str, Any]:
    """Return DDP's arguments: what differs from its defaults, and the device where it wants to know it."""
    options = settings.model_dump(exclude={"backend", "timeout"}, exclude_defaults=True)
    return options if device.type == "cpu" else {**options, "device_ids": [device.index]}


def _reached(loss: Tensor, engines: Sequence[DDPEngine], *, retain_graph: bool) -> Sequence[DDPEngine]:
    """Return the engines whose output the loss depends on, without touching a gradient."""
    if len(engines) < 2:
        return engines
    counts = [len(engine.trainable()) for engine in engines]
    parameters = [parameter for engine in engines for parameter in engine.trainable()]
    try:
        found = iter(torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=retain_graph))
    except RuntimeError:  # reentrant checkpoints allow no such look; then as the other ranks do, most likely
        return engines
    by_engine = [[next(found) for _ in range(count)] for count in counts]
    return [
        engine
        for engine, gradients in zip(engines, by_engine, strict=True)
        if any(gradient is not None for gradient in gradients)
    ]
