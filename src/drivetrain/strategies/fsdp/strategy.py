"""Fully sharded data parallelism: every rank holds a part of every parameter, by torch's FSDP2.

`fully_shard` puts new parameters in the place of a model's own. Optimizers are pointed to the new ones, whether they
are prepared with the model, before or after it, and keep what state they have.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from drivetrain.cluster.control import Call
from drivetrain.cluster.log import say
from drivetrain.cluster.meeting import Meeting
from drivetrain.errors import PrepareError
from drivetrain.protocols import Communication, Engine
from drivetrain.strategies.common import (
    ReplicatedStepper,
    StrategyContext,
    class_name,
    run_backward,
)
from drivetrain.strategies.fsdp.engine import FSDPEngine
from drivetrain.strategies.fsdp.gradients import clamp, clip_to, global_norm
from drivetrain.strategies.fsdp.settings import FSDPSettings
from drivetrain.strategies.fsdp.watch import UnitWatch
from drivetrain.strategies.units import Units, find_units

if TYPE_CHECKING:
    from drivetrain.config import RunConfig

SHARD_AXIS = "dp_shard"

# Torch has no rule for some of their operations, or gives other numbers (Muon).
_NEED_WHOLE = frozenset({"Adafactor", "Muon", "Rprop"})
_FUSED_NEED_WHOLE = frozenset({"Adagrad", "SGD"})


class FSDPStepper(ReplicatedStepper):
    """An optimizer over parts of parameters; it works on them as on whole ones, element by element."""

    def __init__(self, optimizer: Optimizer, strategy: FSDPStrategy) -> None:
        super().__init__(optimizer)
        self._strategy = strategy

    def has_gradients(self) -> bool:
        """Return whether any parameter has a gradient, spread or not."""
        own = self.parameters
        return super().has_gradients() or any(engine.has_whole_gradients(own) for engine in self._strategy.engines)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clear the gradients, spread or not."""
        super().zero_grad(set_to_none=set_to_none)
        for engine in self._strategy.engines:
            engine.drop_whole_gradients(self.parameters)

    def step(self, *, found_inf: Tensor | None = None) -> None:
        """Apply the gradients, unless `found_inf` is not zero."""
        super().step(found_inf=found_inf)
        for engine in self._strategy.engines:
            engine.reshard()

    def grad_norm(self) -> Tensor:
        """Return the L2 norm of this optimizer's gradients over all ranks; collective."""
        return self._strategy.norm(self.parameters, norm_type=2.0)


class FSDPStrategy:
    """Training with sharded parameters, gradients and optimizer states."""

    def __init__(self, context: StrategyContext) -> None:
        self._context = context
        self._settings = context.config.section(FSDPSettings)
        control = context.ranks.control
        is_watched = context.config.check_collectives == "always" and context.device.type == "cpu"
        self._watch = UnitWatch(control) if is_watched and control.world_size > 1 else None
        self._meeting = None if self._watch else Meeting(control, device=context.device)
        self._mesh: DeviceMesh | None = None
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._replaced: dict[int, tuple[weakref.ref[nn.Parameter], weakref.ref[nn.Parameter]]] = {}
        self.engines: weakref.WeakSet[FSDPEngine] = weakref.WeakSet()
        # Torch averages what it spreads.
        self.divisor = context.ranks.world_size

    @staticmethod
    def communication(config: RunConfig) -> Communication:
        """Return the defaults, with a process group also for one rank: a mesh lies over one."""
        del config
        return Communication(needs_group=True)

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Sequence[Engine]:
        """Shard models in place, as rank 0 has them, and point optimizers to the parts; collective."""
        engines = [self._engine(model, names) for model, names in self._named_units(models)]
        for optimizer in {*self._optimizers, *optimizers}:
            self._point_to_parts(optimizer)
        return engines

    def attach(self, optimizer: Optimizer) -> FSDPStepper:
        """Prepare an optimizer, built before or after its models were sharded.

        Raises:
            PrepareError: its step needs whole parameters.
        """
        _check_elementwise(optimizer)
        self._point_to_parts(optimizer)
        self._optimizers.add(optimizer)
        return FSDPStepper(optimizer, self)

    def backward(
        self, loss: Tensor, engines: Sequence[Engine], *, contributes: bool, retain_graph: bool
    ) -> Sequence[Engine]:
        """Run the backward pass; every rank gathers and spreads in it, also where it contributes nothing."""
        sharded = [engine for engine in engines if isinstance(engine, FSDPEngine)]
        if self._watch is not None:
            self._watch.begin_pass(Call.BACKWARD)
        if self._meeting is not None:
            self._meeting.hold(Call.BACKWARD)
        with contextlib.ExitStack() as stack:
            if not contributes:
                for engine in sharded:
                    stack.enter_context(engine.contribute_nothing())
            try:
                reached = run_backward(loss, sharded, retain_graph=retain_graph)
            except BaseException:
                for engine in sharded:
                    engine.break_off()
                raise
        if self._meeting is not None:
            self._meeting.end()
        for engine in sharded:
            if engine in reached:
                engine.after_backward()
        return reached

    def clip_grad_norm(
        self, parameters: Iterable[nn.Parameter], *, max_norm: float, norm_type: float, factor: float
    ) -> Tensor:
        """Multiply gradients by `factor` and clip their norm over all ranks; collective.

        Source: Pascanu et al. 2013, arXiv 1211.5063.
        """
        chosen = list(parameters)
        norm = self.norm(chosen, norm_type=norm_type)
        if factor != 1.0:
            norm = norm * factor
        clip_to(chosen, norm, max_norm=max_norm, factor=factor)
        return norm

    def clip_grad_value(self, parameters: Iterable[nn.Parameter], *, clip_value: float) -> None:
        """Clamp every element to [-clip_value, clip_value]."""
        clamp(parameters, limit=clip_value)

    def norm(self, parameters: Iterable[nn.Parameter], *, norm_type: float) -> Tensor:
        """Return the norm of gradients over all ranks; collective."""
        return global_norm(
            parameters, norm_type=norm_type, control=self._context.ranks.control, device=self._context.device
        )

    def _named_units(self, models: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, Sequence[str]]]:
        """Yield each model with the classes that are named for it; each must be in one of the models."""
        classes = [{type(part).__name__ for part in model.modules()} for model in models]
        nowhere = [name for name in self._settings.unit_names if not any(name in known for known in classes)]
        for model, known in zip(models, classes, strict=True):
            yield model, [name for name in self._settings.unit_names if name in known] + nowhere

    def _engine(self, model: nn.Module, names: Sequence[str]) -> FSDPEngine:
        wraps = self._settings.auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
        if not wraps:
            units = Units(modules=(), reason="NO_WRAP")
        elif self._settings.unit_names and not names:
            units = Units(modules=(), reason="the blocks that are named are those of other models")
        else:
            units = find_units(model, names)
        if self._mesh is None:
            self._mesh = init_device_mesh(
                self._context.device.type, (self._context.ranks.world_size,), mesh_dim_names=(SHARD_AXIS,)
            )
        former = dict(model.named_parameters())
        engine = FSDPEngine(
            model,
            units,
            self._context,
            mesh=self._mesh,
            reshards=self._settings.reshard_after_forward,
            watch=self._watch,
        )
        self.engines.add(engine)
        for name, part in model.named_parameters():
            self._replaced[id(former[name])] = weakref.ref(former[name]), weakref.ref(part)
        if self._context.ranks.rank == 0:
            say(f"{class_name(model)} is sharded over {_ranks(self._context.ranks.world_size)}, units: {units}")
            if not wraps:
                say("NO_WRAP gathers the whole model at once: no memory is saved while forward and backward run")
        return engine

    def _point_to_parts(self, optimizer: Optimizer) -> None:
        """Put the parts in the place of parameters that have been replaced, in groups and state."""
        for group in optimizer.param_groups:
            group["params"] = [self._part_of(parameter) for parameter in group["params"]]
        for parameter in list(optimizer.state):
            part = self._part_of(parameter)  # type: ignore[arg-type]
            if part is not parameter:
                state = optimizer.state.pop(parameter)
                optimizer.state[part] = {name: _cut(value, like=part) for name, value in state.items()}

    def _part_of(self, parameter: nn.Parameter) -> nn.Parameter:
        former, part = self._replaced.get(id(parameter), (None, None))
        if former is None or part is None or former() is not parameter:
            return parameter
        found = part()
        return parameter if found is None else found


def _check_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer of torch's that cannot work on parts of parameters."""
    name = type(optimizer).__name__
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    if name in _NEED_WHOLE or (is_fused and name in _FUSED_NEED_WHOLE):
        raise PrepareError(
            f"{name}{' with `fused=True`' if name not in _NEED_WHOLE else ''} does not work on sharded parameters",
            hint="use AdamW, Adam or SGD" if name in _NEED_WHOLE else "leave `fused` out",
        )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _cut(value: object, *, like: nn.Parameter) -> object:
    """Return this rank's part of a tensor in an optimizer's state that has the shape of its parameter."""
    if not isinstance(value, Tensor) or value.shape != like.shape or not isinstance(like.data, DTensor):
        return value
    with torch.no_grad():
        return distribute_tensor(value, like.data.device_mesh, like.data.placements, src_data_rank=None)
