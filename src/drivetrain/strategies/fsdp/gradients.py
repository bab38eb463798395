"""Functions on gradients of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain.cluster.control import Call, Control
from drivetrain.strategies.common import total_norm


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return this rank's parts of the gradients that are there, as plain tensors; writing to them is seen."""
    found = (parameter.grad for parameter in parameters)
    return [
        gradient._local_tensor if isinstance(gradient, DTensor) else gradient
        for gradient in found
        if gradient is not None
    ]


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply the gradients in place, keeping their dtype."""
    if found := local_gradients(parameters):
        torch._foreach_mul_(found, factor)


@torch.no_grad()
def global_norm(
    parameters: Iterable[nn.Parameter], *, norm_type: float, control: Control, device: torch.device
) -> Tensor:
    """Return the norm of gradients over all ranks, 0-d, plain, the same on every rank; collective.

    Every element lies on one rank only, so the norm of the ranks' norms is that of the whole. The ranks meet on the
    CPU first: one that is elsewhere is found there. Nothing of it reads an accelerator.
    """
    found = local_gradients(parameters)
    # A rank without elements has a norm of the others' type.
    dtype = torch.promote_types(found[0].dtype if found else torch.float32, torch.float32)
    parts = [gradient for gradient in found if gradient.numel()]
    own = total_norm(parts, norm_type) if parts else torch.zeros((), dtype=dtype, device=device)
    if device.type == "cpu":
        meeting = control.start(Call.NORM, tensor=own)
        meeting.wait()
        norms = meeting.tensors
    else:
        control.agree(Call.NORM)
        norms = own.new_empty(control.world_size)
        dist.all_gather_into_tensor(norms, own.reshape(1))
    norm: Tensor = torch.linalg.vector_norm(norms, norm_type).to(own.dtype)
    return norm


@torch.no_grad()
def clip_to(parameters: Iterable[nn.Parameter], norm: Tensor, *, max_norm: float, factor: float) -> None:
    """Multiply gradients by `factor`, and by what brings their norm, taken after the factor, to at most `max_norm`."""
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if found := local_gradients(parameters):
        torch._foreach_mul_(found, coefficient * factor if factor != 1.0 else coefficient)


@torch.no_grad()
def clamp(parameters: Iterable[nn.Parameter], *, limit: float) -> None:
    """Clamp every element of the gradients to [-limit, limit]."""
    if found := local_gradients(parameters):
        torch._foreach_clamp_min_(found, -limit)
        torch._foreach_clamp_max_(found, limit)
