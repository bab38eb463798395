"""Gathering and reducing nested containers of tensors over ranks.

Before data travels, ranks compare a small signature of it on the CPU: structure, dtypes, and all sizes but those of
dim 0. A difference, or a rank in another call, is an error on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.cluster.control import Call, Control
from drivetrain.cluster.tree import map_tensors, tensors_in
from drivetrain.errors import RankMismatchError


class Collectives:
    """Operations over all ranks of a run; every rank must call each of them.

    Args:
        device: where tensors that travel must be.
        checks: whether signatures are compared first.
    """

    def __init__(self, control: Control, *, device: torch.device, checks: bool) -> None:
        self._control = control
        self._device = device
        self._checks = checks

    def gather(self, value: Any) -> Any:
        """Return the ranks' tensors joined along dim 0, by rank; a 0-d tensor counts as one row. Collective.

        Raises:
            RankMismatchError: ranks gave other structures, dtypes or sizes; dim 0 alone may differ.
        """
        if self._control.world_size == 1:
            return map_tensors(value, _with_rows)
        sizes = self._row_counts(value)
        position = iter(range(len(sizes[0])))
        return map_tensors(value, lambda tensor: self._gather_tensor(tensor, sizes, next(position)))

    def gather_object(self, value: Sequence[Any]) -> list[Any]:
        """Return the ranks' lists joined, by rank; any object that can be pickled. Collective."""
        if self._control.world_size == 1:
            return list(value)
        self._control.agree(Call.GATHER)
        return [item for part in self._control.exchange(list(value)) for item in part]

    def reduce(self, value: Any, *, reduction: Literal["sum", "mean", "none"], scale: float) -> Any:
        """Return the ranks' tensors added up or averaged, elementwise, times `scale`. Collective.

        Raises:
            RankMismatchError: ranks gave other structures, dtypes or sizes.
        """
        if self._control.world_size > 1 and reduction != "none":
            self._compare(Call.REDUCE, _signature(value, keeps_rows=True))
        return map_tensors(value, lambda tensor: self._reduce_tensor(tensor, reduction, scale))

    def _row_counts(self, value: Any) -> list[list[int]]:
        """Return the rows of each tensor, by rank."""
        own = [_num_rows(tensor) for tensor in tensors_in(value)]
        if not self._checks:
            return self._control.exchange(own)
        self._compare(Call.GATHER, _signature(value, keeps_rows=False))
        if self._control.all_equal(Call.GATHER, repr(own)):
            return [own] * self._control.world_size
        return self._control.exchange(own)

    def _compare(self, call: Call, signature: str) -> None:
        if not self._checks or self._control.all_equal(call, signature):
            return
        signatures = self._control.exchange(signature)
        lines = [f"\n  rank {rank}: {other}" for rank, other in enumerate(signatures)]
        raise RankMismatchError(
            f"ranks gave unlike values to {call.name.lower()}():{''.join(lines)}",
            hint="structure, dtype and all sizes but that of dim 0 must agree; pad them first",
        )

    def _gather_tensor(self, tensor: Tensor, sizes: list[list[int]], position: int) -> Tensor:
        rows = [by_tensor[position] for by_tensor in sizes]
        # Booleans travel as bytes, and every rank sends as many rows as the longest has: gloo asks for both.
        own = _as_bytes(_with_rows(tensor.detach())).to(self._device).contiguous()
        longest = max(rows)
        if own.shape[0] < longest:
            own = torch.cat([own, own.new_zeros((longest - own.shape[0], *own.shape[1:]))])
        parts = [torch.empty_like(own) for _ in rows]
        dist.all_gather(parts, own)
        joined = torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])
        return joined.bool() if tensor.dtype is torch.bool else joined

    def _reduce_tensor(self, tensor: Tensor, reduction: str, scale: float) -> Tensor:
        result = tensor.detach().to(self._device, copy=True).contiguous()
        if self._control.world_size > 1 and reduction != "none":
            dist.all_reduce(result)
            if reduction == "mean":
                result = result / self._control.world_size
        return result if scale == 1.0 else result * scale


def _with_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def _num_rows(tensor: Tensor) -> int:
    return 1 if tensor.dim() == 0 else tensor.shape[0]


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor


def _signature(value: Any, *, keeps_rows: bool) -> str:
    """Return what ranks must agree on: containers by kind and key, tensors by dtype and sizes."""

    def describe(tensor: Tensor) -> str:
        sizes = tuple(tensor.shape) if keeps_rows else ("*", *tuple(_with_rows(tensor).shape)[1:])
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(sizes)}".replace("'", "")

    return str(map_tensors(value, lambda tensor: _Text(describe(tensor))))


class _Text(str):
    """Text that stands for a tensor, shown without quotes."""

    def __repr__(self) -> str:
        return str(self)
