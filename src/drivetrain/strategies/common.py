"""What strategies share: what they are made from, and functions on gradients that lie whole in `parameter.grad`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_
from torch.optim import Optimizer

from drivetrain.cluster.process_group import Ranks
from drivetrain.precision import AutocastHooks, Precision
from drivetrain.protocols import Communication, Engine

if TYPE_CHECKING:
    from drivetrain.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyContext:
    """What a strategy is made from: where this rank runs, with whom, in which precision, and the settings."""

    device: torch.device
    ranks: Ranks
    precision: Precision
    config: RunConfig


def class_name(module: nn.Module) -> str:
    """Return the name of a model's class as the user wrote it, whatever torch has put around it or made of it."""
    inner = getattr(module, "module", None) if type(module).__module__.startswith("drivetrain.") else None
    kinds = type(inner if isinstance(inner, nn.Module) else module).__mro__
    return next(kind.__name__ for kind in kinds if not kind.__module__.startswith("torch.distributed."))


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients that are there."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float | Tensor) -> None:
    """Multiply the gradients in place, keeping their dtype."""
    if found := gradients(parameters):
        torch._foreach_mul_(found, factor)


@torch.no_grad()
def total_norm(tensors: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all elements together, 0-d, at least in float32, on the device of the first tensor."""
    # torch's get_total_norm sorts the tensors by device and dtype first: for few of them that costs more than the norm.
    norms = list(torch._foreach_norm(tensors, norm_type))
    first = norms[0]
    dtype = torch.promote_types(first.dtype, torch.float32)
    if any(norm.dtype != dtype or norm.device != first.device for norm in norms):
        norms = [norm.to(first.device, dtype) for norm in norms]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[nn.Parameter], *, max_norm: float, norm_type: float, factor: float) -> Tensor:
    """Multiply replicated gradients by `factor` and clip their norm, in one pass over them.

    Does not synchronise the host.

    Returns:
        The norm after the factor and before clipping, 0-d.

    Source: Pascanu et al. 2013, arXiv 1211.5063.
    """
    found = gradients(parameters)
    if not found:
        return torch.zeros(())
    norm = total_norm(found, norm_type)
    if factor != 1.0:
        norm = norm * factor
    # The small number keeps a norm of zero from dividing; torch adds the same one.
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(found, coefficient * factor if factor != 1.0 else coefficient)
    return norm


def clip_grad_value(parameters: Iterable[nn.Parameter], *, clip_value: float) -> None:
    """Clamp every element of the gradients to [-clip_value, clip_value]."""
    clip_grad_value_(list(parameters), clip_value)


class ReplicatedStepper:
    """An optimizer whose parameters and gradients lie whole on every rank."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all groups, in order."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def has_device_skip(self) -> bool:
        """Whether the optimizer is fused: only those read a flag on the device."""
        return all(group.get("fused") for group in self.optimizer.param_groups)

    def has_gradients(self) -> bool:
        """Return whether any parameter has a gradient."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        """Divide the gradients by the loss scale and record whether they are finite."""
        scaler.unscale_(self.optimizer)

    def grad_norm(self) -> Tensor:
        """Return the L2 norm of this optimizer's gradients, 0-d; the same on every rank, as the gradients are."""
        found = gradients(self.parameters)
        return total_norm(found) if found else torch.zeros(())

    def step(self, *, found_inf: Tensor | None = None) -> None:
        """Apply the gradients, unless `found_inf` is not zero."""
        if found_inf is None:
            self.optimizer.step()
            return
        # The channel through which torch's own GradScaler tells a fused optimizer to leave everything untouched.
        self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        try:
            self.optimizer.step()
        finally:
            del self.optimizer.found_inf  # type: ignore[attr-defined]


class ReplicatedStrategy:
    """What single-process and data-parallel training have in common: every rank holds everything."""

    @staticmethod
    def communication(config: RunConfig) -> Communication:
        """Return the defaults."""
        del config
        return Communication()

    def attach(self, optimizer: Optimizer) -> ReplicatedStepper:
        """Prepare an optimizer."""
        return ReplicatedStepper(optimizer)

    clip_grad_norm = staticmethod(clip_grad_norm)
    clip_grad_value = staticmethod(clip_grad_value)


def autocast_hooks(module: nn.Module, context: StrategyContext) -> AutocastHooks | None:
    """Return the hooks that run the model's forward under autocast; None where parameters' own dtype computes."""
    dtype = context.precision.compute_dtype
    return None if dtype is None else AutocastHooks(module, device_type=context.device.type, dtype=dtype)


def replicated_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers, detached, under the names that the model has without torch.compile."""
    state = {name.replace("_orig_mod.", ""): value for name, value in module.state_dict().items()}
    return {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}


class LocalEngine:
    """A model that lies whole on the device of this rank, and of which nothing travels."""

    def __init__(self, module: nn.Module, context: StrategyContext) -> None:
        self.module = module.to(context.device)
        self.prepared: nn.Module = self.module
        self._autocast = autocast_hooks(module, context)

    def begin(self, *, sync: bool) -> None:
        """Nothing travels."""

    def synchronize(self) -> None:
        """Nothing travels."""

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients in place."""
        scale_gradients(self.module.parameters(), factor)

    def gradient_marks(self) -> list[tuple[int, int] | None]:
        """Return what tells whether a backward has come to this model: it changes some of these."""
        found = (parameter.grad for parameter in self.module.parameters())
        return [None if gradient is None else (id(gradient), gradient._version) for gradient in found]

    @contextlib.contextmanager
    def keep_gradients(self) -> Iterator[None]:
        """Leave the gradients as they are, whatever backward runs in this context."""
        kept = [(parameter, parameter.grad) for parameter in self.module.parameters()]
        for parameter, _ in kept:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        self.module.zero_grad(set_to_none=True)

    def forward_method(self, name: str) -> Callable[..., Any]:
        """Make a method of the model run as its forward does, and return it."""
        return forward_method(self.module, name, prepared=self.prepared)

    def state_dict(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers."""
        return replicated_state_dict(self.module)

    def close(self) -> None:
        """Take the autocast hooks off the model."""
        if self._autocast is not None:
            self._autocast.remove()


@runtime_checkable
class Marked(Protocol):
    """An engine that shows whether a backward has come to it."""

    def gradient_marks(self) -> list[tuple[int, int] | None]:
        """Return what a backward that reaches the model changes."""


def run_backward(loss: Tensor, engines: Sequence[Engine], *, retain_graph: bool) -> Sequence[Engine]:
    """Run a backward pass and return the engines that it has reached.

    Whichever way it comes to the only model there is, it is for that; of several, the gradients show which.
    """
    if len(engines) == 1:
        loss.backward(retain_graph=retain_graph)
        return engines
    before = [(engine, engine.gradient_marks()) for engine in engines if isinstance(engine, Marked)]
    loss.backward(retain_graph=retain_graph)
    return [engine for engine, marks in before if engine.gradient_marks() != marks]


def forward_method(module: nn.Module, name: str, *, prepared: nn.Module) -> Callable[..., Any]:
    """Make a method of a model run as its forward does, hooks and all, and return it.

    Args:
        module: whose method it is.
        prepared: what runs the model's forward, and where the method is called from now on.
    """
    method = getattr(module, name)

    @functools.wraps(method)
    def run(*inputs: Any, **kwargs: Any) -> Any:
        usual = module.__dict__.get("forward")

        def give_back() -> None:
            if usual is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = usual

        def take_its_place(*inner: Any, **options: Any) -> Any:
            give_back()
            return method(*inner, **options)

        module.forward = take_its_place
        try:
            return prepared(*inputs, **kwargs)
        finally:
            give_back()

    prepared.__dict__[name] = run
    return run
