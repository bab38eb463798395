"""What ranks do with each other's values: nested containers of tensors, and lists of objects.

Before data travels, ranks compare a small signature of it on the CPU: structure, dtypes, and all sizes but those that
may differ. A difference, or a rank in another call, is an error on every rank. Tensors that are given stay as they
are; those that come back are on the device of this rank and, but for padded ones, detached from the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.cluster.control import Call, Control
from drivetrain.cluster.offers import Offer, Sizes, compare, problem_in, signature_of, unpicklable
from drivetrain.cluster.padding import padded, padding_problem, size_along
from drivetrain.cluster.tree import map_tensors, named_leaves, tensors_in
from drivetrain.errors import DataError, TopologyError

Reduction = Literal["sum", "mean", "none"]

_ROWS_MAY_DIFFER = "structure, dtype and all sizes but that of dim 0 must agree; pad them first"
_PADDED_MAY_DIFFER = "structure, dtype and all sizes but those of dim 0 and of the padded dim must agree"
_ALL_AGREE = "structure, dtype, all sizes and the other arguments must agree"


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

    def gather(self, value: Any, *, contributes: bool = True, rows: int | None = None) -> Any:
        """Return the ranks' tensors joined along dim 0, by rank; a 0-d tensor counts as one row. Collective.

        Args:
            contributes: False for a rank whose rows are not to be in the result.
            rows: how many each tensor of this rank must have; None for any number.

        Raises:
            DataError: something in `value` is neither a tensor nor None, or a tensor has another number of rows.
            RankMismatchError: ranks gave other structures, dtypes or sizes; dim 0 alone may differ.
        """
        problem = problem_in(value, Call.GATHER) or _row_problem(value, rows)
        if not contributes:
            value = map_tensors(value, lambda tensor: _with_rows(tensor)[:0])
        by_rank = self._meet(
            Call.GATHER,
            lambda: signature_of(value, lambda tensor: _starred(_with_rows(tensor), 0)),
            rule=_ROWS_MAY_DIFFER,
            sizes=[_num_rows(tensor) for tensor in tensors_in(value)],
            problem=problem,
        )
        if self._control.world_size == 1:
            return map_tensors(value, self._own_rows)
        rows_by_rank = iter(list(zip(*by_rank, strict=True)))
        return map_tensors(value, lambda tensor: self._gather_tensor(tensor, next(rows_by_rank)))

    def gather_object(self, values: Iterable[Any], *, contributes: bool = True) -> list[Any]:
        """Return the ranks' lists joined, by rank; of any objects that can be pickled. Collective.

        Tensors in them come back on the CPU.

        Args:
            contributes: False for a rank whose objects are not to be in the result.

        Raises:
            DataError: it is no list, or an object cannot be pickled.
            RankMismatchError: other ranks gave tensors.
        """
        problem, own = _list_problem(values), []
        if problem is None:
            own = list(values) if contributes else []
            own = map_tensors(own, _to_host)
            problem = self._pickling_problem(own, Call.GATHER)
        self._meet(Call.GATHER, lambda: "a list of objects", rule=_ROWS_MAY_DIFFER, problem=problem)
        with self._travelling(Call.GATHER):
            return [item for part in self._control.exchange(own) for item in part]

    def reduce(self, value: Any, *, reduction: Reduction, scale: float) -> Any:
        """Return the ranks' tensors added up or averaged, elementwise, times `scale`. Collective.

        Integers and booleans add up to int64, as in torch; their mean has the default dtype.

        Raises:
            DataError: something in `value` is neither a tensor nor None, or there is no such reduction.
            RankMismatchError: ranks gave other structures, dtypes or sizes, or asked for another reduction.
        """
        problem = problem_in(value, Call.REDUCE)
        if reduction not in get_args(Reduction):
            problem = DataError(f"reduction={reduction!r} is none of {', '.join(get_args(Reduction))}")
        asked = "" if (reduction, scale) == ("sum", 1.0) else f", reduction={reduction!r}, scale={scale}"
        self._meet(Call.REDUCE, lambda: _exact(value) + asked, rule=_ALL_AGREE, problem=problem)
        return map_tensors(value, lambda tensor: self._reduce_tensor(tensor, reduction, scale))

    def broadcast(self, value: Any, *, source: int) -> Any:
        """Return what rank `source` has; the tensors of the others only say what to expect. Collective.

        Raises:
            DataError: something in `value` is neither a tensor nor None, or there is no such rank.
            RankMismatchError: ranks gave other structures, dtypes or sizes, or another `source`.
        """
        problem = problem_in(value, Call.BROADCAST) or self._source_problem(source)
        self._meet(Call.BROADCAST, lambda: f"{_exact(value)}, from_process={source}", rule=_ALL_AGREE, problem=problem)
        return map_tensors(value, lambda tensor: self._broadcast_tensor(tensor, source))

    def broadcast_object_list(self, values: Any, *, source: int) -> None:
        """Put into a list, in place, what rank `source` has in its own; any objects that can be pickled. Collective.

        Tensors in them arrive on the CPU.

        Raises:
            DataError: it is no list, an object cannot be pickled, or there is no such rank.
            RankMismatchError: ranks gave lists of other lengths, or another `source`.
        """
        call = Call.BROADCAST_OBJECT_LIST
        is_source = source == self._control.rank
        problem = self._source_problem(source)
        if not isinstance(values, list):
            problem = DataError(f"broadcast_object_list() fills a list, and this is a {type(values).__name__}")
        sent: list[Any] = map_tensors(values, _to_host) if problem is None and is_source else []
        problem = problem or self._pickling_problem(sent, call)
        self._meet(
            call, lambda: f"a list of length {len(values)}, from_process={source}", rule=_ALL_AGREE, problem=problem
        )
        if self._control.group is not None:
            objects = sent if is_source else [None] * len(values)
            with self._travelling(call):
                dist.broadcast_object_list(objects, src=source, group=self._control.group)
            if not is_source:
                values[:] = objects

    def pad(self, value: Any, *, dim: int, fill: float, first: bool) -> Any:
        """Return this rank's tensors, each as long in `dim` as the longest of any rank. Collective.

        Tensors without that dim pass as they are, and so does what is no tensor.

        Args:
            fill: what stands behind what a tensor has, or before it if `first`.

        Raises:
            DataError: `dim` is no dim, or a dtype cannot hold `fill`.
            RankMismatchError: ranks gave other structures or dtypes, or other sizes in more than `dim` and dim 0.
        """
        problem = padding_problem(value, dim=dim, fill=fill)
        by_rank = self._meet(
            Call.PAD_ACROSS_PROCESSES,
            lambda: f"{signature_of(value, lambda tensor: _starred(tensor, 0, dim))}, dim={dim}",
            rule=_PADDED_MAY_DIFFER,
            sizes=[] if problem else [size_along(tensor, dim) for tensor in tensors_in(value)],
            problem=problem,
        )
        longest = iter([max(sizes) for sizes in zip(*by_rank, strict=True)])
        return map_tensors(value, lambda tensor: padded(tensor, dim=dim, size=next(longest), fill=fill, first=first))

    def _meet(
        self,
        call: Call,
        signature: Callable[[], str],
        *,
        rule: str,
        sizes: Sizes | None = None,
        problem: DataError | None = None,
    ) -> list[Sizes]:
        offer = Offer(call=call, signature=signature, rule=rule, sizes=sizes or [], problem=problem)
        with self._travelling(call):
            return compare(offer, self._control, checks=self._checks)

    @contextlib.contextmanager
    def _travelling(self, call: Call) -> Iterator[None]:
        """Name the call in which another rank was lost."""
        try:
            yield
        except RuntimeError as error:
            raise TopologyError(
                f"rank {self._control.rank} lost another rank in {call.name.lower()}(): {error}",
                hint="look for the rank that failed or left first",
            ) from error

    def _source_problem(self, source: object) -> DataError | None:
        if isinstance(source, int) and not isinstance(source, bool) and 0 <= source < self._control.world_size:
            return None
        last = self._control.world_size - 1
        return DataError(f"from_process={source!r} is no rank of this run", hint=f"ranks are 0 to {last}")

    def _pickling_problem(self, values: list[Any], call: Call) -> DataError | None:
        return None if self._control.world_size == 1 else unpicklable(values, call)

    def _own_rows(self, tensor: Tensor) -> Tensor:
        return _with_rows(tensor.detach()).to(self._device)

    def _gather_tensor(self, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        own = self._own_rows(tensor)
        shape = own.shape[1:]
        longest, row_bytes = max(rows), shape.numel() * own.itemsize
        if longest * row_bytes == 0:
            return own.new_empty((sum(rows), *shape))
        own = padded(own, dim=0, size=longest, fill=0, first=False)  # backends want the same number from every rank
        sent = _as_bytes(own.contiguous())
        received = sent.new_empty((len(rows), longest * row_bytes))
        parts = list(received.unbind())
        with self._travelling(Call.GATHER):
            dist.all_gather(parts, sent)
        if min(rows) < longest:
            received = torch.cat([part[: count * row_bytes] for part, count in zip(parts, rows, strict=True)])
        return received.view(-1).view(own.dtype).view(sum(rows), *shape)

    def _broadcast_tensor(self, tensor: Tensor, source: int) -> Tensor:
        result = tensor.detach().to(self._device, copy=True).contiguous()
        if self._control.world_size > 1 and result.numel() > 0:
            with self._travelling(Call.BROADCAST):
                dist.broadcast(_as_bytes(result), src=source)
        return result

    def _reduce_tensor(self, tensor: Tensor, reduction: Reduction, scale: float) -> Tensor:
        result = tensor.detach().to(self._device, copy=True).contiguous()
        if reduction != "none":
            if not (result.is_floating_point() or result.is_complex()):
                result = result.long()  # backends add booleans up to at most one, and do not know every integer
            if self._control.world_size > 1:
                with self._travelling(Call.REDUCE):
                    dist.all_reduce(result)
            if reduction == "mean":
                result = result / self._control.world_size
        return result if scale == 1.0 else result * scale


def _row_problem(value: Any, rows: int | None) -> DataError | None:
    """Return which tensor does not have these rows; None if all do."""
    for path, leaf in named_leaves(value) if rows is not None else ():
        if isinstance(leaf, Tensor) and _num_rows(leaf) != rows:
            place = f"the tensor at {path}" if path else "a tensor"
            return DataError(
                f"gather_for_metrics() takes values per row of the batch, which has {rows} here, "
                f"and {place} has shape {tuple(leaf.shape)}",
                hint="gather() takes tensors of any size, and leaves in the rows of batches that only fill up",
            )
    return None


def _list_problem(values: object) -> DataError | None:
    if isinstance(values, Iterable) and not isinstance(values, Mapping | str | bytes | Tensor):
        return None
    return DataError(
        f"objects are gathered from lists, one per row of the batch, and this is a {type(values).__name__}",
        hint="put the object into a list, also where it is a single one",
    )


def _with_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def _num_rows(tensor: Tensor) -> int:
    return 1 if tensor.dim() == 0 else tensor.shape[0]


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as a flat one, because no backend knows every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _exact(value: Any) -> str:
    return signature_of(value, lambda tensor: list(tensor.shape))


def _starred(tensor: Tensor, *dims: int) -> list[object]:
    """Return the sizes of a tensor, with a star for those that may differ."""
    free = {dim % tensor.dim() for dim in dims if -tensor.dim() <= dim < tensor.dim()}
    return ["*" if dim in free else size for dim, size in enumerate(tensor.shape)]
