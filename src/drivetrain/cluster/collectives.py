"""Gathering and reducing nested containers of tensors over ranks.

Before data travels, ranks compare a small signature of it on the CPU: structure, dtypes, and all sizes but those of
dim 0. A difference, or a rank in another call, is an error on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.cluster.control import Call, Control
from drivetrain.cluster.tree import leaves_in, map_tensors, tensors_in
from drivetrain.errors import DataError, RankMismatchError

Reduction = Literal["sum", "mean", "none"]


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

    def gather(self, value: Any, *, contributes: bool = True) -> Any:
        """Return the ranks' tensors joined along dim 0, by rank; a 0-d tensor counts as one row. Collective.

        The result is detached from the graph, and on the device of this rank.

        Args:
            contributes: False for a rank whose rows are not to be in the result.

        Raises:
            DataError: something in `value` is neither a tensor nor None.
            RankMismatchError: ranks gave other structures, dtypes or sizes; dim 0 alone may differ.
        """
        _check_leaves(value, Call.GATHER)
        if not contributes:
            value = map_tensors(value, lambda tensor: _with_rows(tensor)[:0])
        if self._control.world_size == 1:
            return map_tensors(value, self._own_rows)
        rows = iter(zip(*self._row_counts(value), strict=True))
        return map_tensors(value, lambda tensor: self._gather_tensor(tensor, next(rows)))

    def gather_object(self, values: Iterable[Any], *, contributes: bool = True) -> list[Any]:
        """Return the ranks' lists joined, by rank; of any objects that can be pickled. Collective.

        Args:
            contributes: False for a rank whose objects are not to be in the result.

        Raises:
            DataError: it is no list.
            RankMismatchError: other ranks gave tensors.
        """
        if isinstance(values, Mapping | str | bytes) or not isinstance(values, Iterable):
            raise DataError(
                f"objects are gathered from lists, one per row of the batch, and this is a {type(values).__name__}",
                hint="put the object into a list, also where it is a single one",
            )
        own = list(values) if contributes else []
        if self._control.world_size == 1:
            return own
        self._compare(Call.GATHER, "a list of objects")
        return [item for part in self._control.exchange(own) for item in part]

    def reduce(self, value: Any, *, reduction: Reduction, scale: float) -> Any:
        """Return the ranks' tensors added up or averaged, elementwise, times `scale`. Collective.

        Integers and booleans add up to int64, as in torch; their mean has the default dtype.

        Raises:
            DataError: something in `value` is neither a tensor nor None, or there is no such reduction.
            RankMismatchError: ranks gave other structures, dtypes or sizes.
        """
        if reduction not in get_args(Reduction):
            raise DataError(f"reduction={reduction!r} is none of {', '.join(get_args(Reduction))}")
        _check_leaves(value, Call.REDUCE)
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

    def _own_rows(self, tensor: Tensor) -> Tensor:
        return _with_rows(tensor.detach()).to(self._device)

    def _gather_tensor(self, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        own = self._own_rows(tensor)
        shape = own.shape[1:]
        longest = max(rows)
        if own.shape[0] < longest:  # backends want the same number from every rank
            own = torch.cat([own, own.new_zeros((longest - own.shape[0], *shape))])
        # As bytes, because no backend knows every dtype.
        sent = own.contiguous().reshape(-1).view(torch.uint8)
        parts = [torch.empty_like(sent) for _ in rows]
        dist.all_gather(parts, sent)
        row_bytes = shape.numel() * own.itemsize
        joined = torch.cat([part[: count * row_bytes] for part, count in zip(parts, rows, strict=True)])
        return joined.view(own.dtype).reshape(sum(rows), *shape)

    def _reduce_tensor(self, tensor: Tensor, reduction: Reduction, scale: float) -> Tensor:
        result = tensor.detach().to(self._device, copy=True).contiguous()
        if reduction != "none":
            if not (result.is_floating_point() or result.is_complex()):
                result = result.long()  # backends add booleans up to at most one, and do not know every integer
            if self._control.world_size > 1:
                dist.all_reduce(result)
            if reduction == "mean":
                result = result / self._control.world_size
        return result if scale == 1.0 else result * scale


def _check_leaves(value: Any, call: Call) -> None:
    """Refuse numbers and other objects: passed on as they are, they would look like a result."""
    strange = next((leaf for leaf in leaves_in(value) if not isinstance(leaf, Tensor) and leaf is not None), None)
    if strange is not None:
        raise DataError(
            f"{call.name.lower()}() takes tensors in nested containers, and found a {type(strange).__name__}",
            hint="make a tensor of a number; gather other objects apart, as a list, with gather_for_metrics()",
        )


def _with_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def _num_rows(tensor: Tensor) -> int:
    return 1 if tensor.dim() == 0 else tensor.shape[0]


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
