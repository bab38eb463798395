"""Making tensors longer in one dim, as ranks do before they gather what has unequal sizes; pure."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drivetrain.cluster.tree import tensors_in
from drivetrain.errors import DataError


def has_dim(tensor: Tensor, dim: int) -> bool:
    """Return whether a tensor has a dim; negative ones count from the end."""
    return -tensor.dim() <= dim < tensor.dim()


def size_along(tensor: Tensor, dim: int) -> int:
    """Return the size of a dim; 0 where there is none."""
    return tensor.shape[dim] if has_dim(tensor, dim) else 0


def padded(tensor: Tensor, *, dim: int, size: int, fill: float, first: bool) -> Tensor:
    """Return a tensor whose `dim` has `size`, filled up at the end or, if `first`, at the beginning.

    One that is long enough, or has no such dim, comes back as it is.
    """
    missing = size - size_along(tensor, dim)
    if not has_dim(tensor, dim) or missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    filler = tensor.new_full(shape, fill)
    return torch.cat([filler, tensor] if first else [tensor, filler], dim=dim)


def padding_problem(value: Any, *, dim: object, fill: object) -> DataError | None:
    """Return why the tensors in `value` cannot be padded; None if they can."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        return DataError(
            f"dim={dim!r} is no dim of a tensor", hint="give a whole number; negative ones count from the end"
        )
    for dtype in {tensor.dtype for tensor in tensors_in(value)}:
        if not _can_hold(dtype, fill):
            name = str(dtype).removeprefix("torch.")
            return DataError(
                f"pad_index={fill!r} is no value of {name}", hint="give another one, or convert the tensor before"
            )
    return None


def _can_hold(dtype: torch.dtype, fill: Any) -> bool:
    try:
        held = torch.full((), fill, dtype=dtype)
    except (RuntimeError, TypeError, OverflowError):
        return False
    is_whole = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
    return not is_whole or held.tolist() == fill
