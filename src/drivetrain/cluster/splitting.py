"""A rank's part of a list, a tensor or a data set that every rank has whole; pure.

Parts are contiguous and in the order of the ranks, so that joined by rank they are the whole again. Without filling
up, they differ by at most one item, and a rank can be left without any. With it, the last item is repeated at the end
until all parts are equal, so that what is too much of the joined whole is its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from drivetrain.cluster.tree import with_items
from drivetrain.errors import DataError

_TAKEN = "it takes lists, tuples, tensors, arrays, data sets with a length, and dicts of those"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which of `length` items are a rank's own.

    Args:
        fills: make all parts equal.
    """

    rank: int
    num_ranks: int
    fills: bool

    def positions(self, length: int) -> Sequence[int]:
        """Return the positions of the items; a range where none is repeated."""
        share, extra = divmod(length, self.num_ranks)
        if self.fills and extra:
            start = self.rank * (share + 1)
            return [min(position, length - 1) for position in range(start, start + share + 1)]
        start = self.rank * share + min(self.rank, extra)
        return range(start, start + share + int(self.rank < extra))


def part_of(whole: Any, part: Part) -> Any:
    """Return a rank's part, of the kind of the whole; a torch data set becomes a `Subset`.

    Raises:
        DataError: it is of no kind that can be split, or the items of a dict have unlike lengths.
    """
    columns = _columns(whole)
    if columns is not None:
        _check_lengths(columns)
    elif not _is_splittable(whole):
        raise DataError(f"split_between_processes() cannot split {_described(whole)}", hint=_TAKEN)
    if columns is None:
        return whole if part.num_ranks == 1 else _pick(whole, part.positions(len(whole)))
    parts = {key: part_of(column, part) for key, column in columns.items()}
    if part.num_ranks == 1:
        return whole
    return with_items(whole, parts) if isinstance(whole, Mapping) else type(whole)(**parts)


def _columns(whole: Any) -> dict[Any, Any] | None:
    """Return what is split item by item in a mapping or a named tuple; None for what is split itself."""
    if isinstance(whole, Mapping):
        return dict(whole)
    return dict(zip(whole._fields, whole, strict=True)) if hasattr(whole, "_fields") else None


def _is_splittable(whole: Any) -> bool:
    if isinstance(whole, Tensor | np.ndarray):
        return whole.ndim > 0
    if isinstance(whole, str | bytes | bytearray | IterableDataset) or not isinstance(whole, Sized):
        return False
    return isinstance(whole, Sequence | Dataset) or hasattr(whole, "select")


def _pick(whole: Any, positions: Sequence[int]) -> Any:
    if hasattr(whole, "select") and not isinstance(whole, Tensor | Sequence):
        return whole.select(positions)
    if isinstance(whole, Dataset) and not isinstance(whole, Sequence):
        return Subset(whole, positions)
    if isinstance(whole, Tensor | np.ndarray):
        return whole[positions.start : positions.stop] if isinstance(positions, range) else whole[positions]
    items = [whole[position] for position in positions]
    return tuple(items) if isinstance(whole, tuple) else items


def _check_lengths(columns: Mapping[Any, Any]) -> None:
    lengths = {key: len(column) for key, column in columns.items() if _is_splittable(column)}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key!r} has {length}" for key, length in lengths.items())
        raise DataError(
            f"the items of the dict given to split_between_processes() have unlike lengths: {listed}",
            hint="give every key as many items as the others",
        )


def _described(whole: Any) -> str:
    if isinstance(whole, Tensor | np.ndarray):
        return f"a 0-d {type(whole).__name__}"
    if isinstance(whole, IterableDataset):
        return f"{type(whole).__name__}, a stream without a length"
    return f"a value of type {type(whole).__name__}"
