"""A data loader whose rows are shared out over ranks in one global order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from drivetrain.cluster.control import Call, Control
from drivetrain.cluster.seed import derive, seeded
from drivetrain.cluster.tree import map_tensors
from drivetrain.data.drivers import Drivers
from drivetrain.data.shares import Shares, shuffled
from drivetrain.errors import DataError
from drivetrain.window import Batch

_KEPT_OPTIONS = (
    "num_workers",
    "collate_fn",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderContext:
    """What a loader needs to know of the run."""

    device: torch.device
    control: Control
    drivers: Drivers
    seed: int | None
    even_batches: bool


class PreparedLoader:
    """A map-style `DataLoader` of which this rank reads its share; the order depends on seed and epoch alone.

    Every pass is the next epoch. Its other attributes are those of the loader that it was made from.

    Attributes:
        owner: the accelerator that prepared it.
        loader: the one that was given to `prepare`.
    """

    def __init__(self, loader: DataLoader[Any], context: LoaderContext, *, owner: object) -> None:
        sampler = _sampler_of(loader)
        self.owner = owner
        self.loader = loader
        self._context = context
        self._epoch = 0
        self._shares, self._seed = _agree_on_shares(loader, sampler, context)
        self._order = _order_of(sampler, self._shares.length, seed=self._seed, control=context.control)
        self._batches = _RankBatches(self._shares, rank=context.control.rank, keeps_even=context.even_batches)
        options = {name: getattr(loader, name) for name in _KEPT_OPTIONS if hasattr(loader, name)}
        # Without an accelerator there is nothing to pin for, and torch would warn in every epoch.
        options["pin_memory"] = loader.pin_memory and context.device.type != "cpu"
        self._generator = torch.Generator()
        self._inner: DataLoader[Any] = DataLoader(
            loader.dataset, batch_sampler=self._batches, generator=self._generator, **options
        )

    @property
    def batch_size(self) -> int:
        """Rows per rank and full batch."""
        return self._shares.batch_size

    @property
    def total_batch_size(self) -> int:
        """Rows over all ranks in a full micro-step."""
        return self._shares.rows_per_step

    @property
    def shares(self) -> Shares:
        """How the rows of an epoch are shared out."""
        return self._shares

    @property
    def epoch(self) -> int:
        """The epoch that the next pass will be."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`, counted from 0."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        epoch = self._epoch
        self._epoch += 1
        self._batches.order = self._order(epoch)
        # The base seed of the workers comes from here, not from the generator that the user draws from.
        self._generator.manual_seed(derive(self._seed, epoch, self._context.control.rank))
        return _Pass(self._inner, self._shares, self._context, epoch=epoch)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "loader"), name)


class _Pass:
    """One epoch of a loader on this rank."""

    def __init__(self, loader: DataLoader[Any], shares: Shares, context: LoaderContext, *, epoch: int) -> None:
        self._batches = iter(loader)
        self._epoch = epoch
        self._shares = shares
        self.batch_size = shares.batch_size
        self._rank = context.control.rank
        self._drivers = context.drivers
        self._depth = context.drivers.depth()
        self.is_training = False
        self._step = -1
        self._last = shares.num_steps - 1
        self._num_full = shares.length // shares.rows_per_step
        self._usual: dict[int, Batch] = {}
        self._move = None if context.device.type == "cpu" else _mover(context.device, is_pinned=loader.pin_memory)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._drivers.close(self)
            raise
        self._step += 1
        self.is_training = torch.is_grad_enabled()
        if self._step == 0:
            self._drivers.advance(self, depth=self._depth)
        return batch if self._move is None else map_tensors(batch, self._move)

    @property
    def is_filler(self) -> bool:
        return not self._shares.rows_of(self._step, rank=self._rank)

    def facts(self, *, window_size: int) -> Batch:
        if self._step < self._last and self._step + window_size <= self._num_full:
            return self._usual.get(window_size) or self._in_full_windows(window_size)
        return Batch(
            epoch=self._epoch,
            rows=len(self._shares.rows_of(self._step, rank=self._rank)),
            is_last=self._step == self._last,
            rows_ahead=self._shares.rows_ahead(self._step, steps=window_size),
        )

    def _in_full_windows(self, window_size: int) -> Batch:
        """Return the facts of a batch before the end of the epoch comes into sight: always the same ones."""
        rows_ahead = window_size * self._shares.rows_per_step
        self._usual[window_size] = Batch(epoch=self._epoch, rows=self._shares.batch_size, rows_ahead=rows_ahead)
        return self._usual[window_size]


class _RankBatches(Sampler[list[int]]):
    """The index lists of one rank and epoch; a rank without a row in the last micro-step gets the first row instead."""

    def __init__(self, shares: Shares, *, rank: int, keeps_even: bool) -> None:
        self._shares = shares
        self._rank = rank
        last = shares.num_steps - 1
        lacks_last = last >= 0 and not shares.rows_of(last, rank=rank)
        self._num_steps = shares.num_steps - int(lacks_last and not keeps_even)
        self.order: Sequence[int] = range(shares.length)

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[list[int]]:
        return self._in_order(self.order)

    def _in_order(self, order: Sequence[int]) -> Iterator[list[int]]:
        shares = self._shares
        num_full = shares.length // shares.rows_per_step
        for step in range(num_full):
            first = step * shares.rows_per_step + self._rank * shares.batch_size
            yield list(order[first : first + shares.batch_size])
        if num_full < self._num_steps:
            rows = shares.rows_of(num_full, rank=self._rank)
            yield list(order[rows.start : rows.stop]) or [order[0]]


def _sampler_of(loader: DataLoader[Any]) -> Sampler[int]:
    """Return the sampler of single rows, refusing what cannot be shared out.

    Raises:
        DataError: a stream, batches of the user's own making, or a loader that is sharded already.
    """
    made_by = type(loader)
    if made_by.__iter__ is not DataLoader.__iter__ or made_by._get_iterator is not DataLoader._get_iterator:
        raise DataError(
            f"{made_by.__name__} iterates in its own way, which would be lost: prepare() reads the data set itself",
            hint="move what it does into the data set or `collate_fn`, and give a plain torch DataLoader",
        )
    if isinstance(loader.dataset, IterableDataset):
        raise DataError(
            f"{type(loader.dataset).__name__} is a stream, and only map-style data can be shared out over ranks so far",
            hint="give a data set with __len__ and __getitem__, or loop over the unprepared loader on one process",
        )
    batch_sampler = loader.batch_sampler
    if type(batch_sampler) is not BatchSampler:
        kind = "batch_size=None" if batch_sampler is None else f"batch_sampler={type(batch_sampler).__name__}"
        raise DataError(
            f"a loader with {kind} cannot be shared out over ranks so far",
            hint="give the loader `batch_size` and, where needed, `sampler`",
        )
    sampler = batch_sampler.sampler
    if isinstance(sampler, DistributedSampler):
        raise DataError(
            "the loader has a DistributedSampler, and prepare() shares its rows out itself",
            hint="give the loader `shuffle=True` or `shuffle=False` and no sampler",
        )
    if not isinstance(sampler, Sized):
        raise DataError(
            f"{type(sampler).__name__} has no length, so its rows cannot be shared out before they are drawn",
            hint="give the sampler a __len__: the number of rows that it draws in an epoch",
        )
    return sampler  # type: ignore[return-value]


def _agree_on_shares(loader: DataLoader[Any], sampler: Sampler[int], context: LoaderContext) -> tuple[Shares, int]:
    """Return how rows are shared out, and the seed of their order, which is that of rank 0; collective.

    Raises:
        DataError: ranks hold data of unlike length, or another batch size.
    """
    batch_sampler = loader.batch_sampler
    assert isinstance(batch_sampler, BatchSampler)
    generator = getattr(sampler, "generator", None) or loader.generator
    own_seed = torch.initial_seed() if generator is None else generator.initial_seed()
    seed = own_seed if context.seed is None else context.seed
    facts = (len(sampler), batch_sampler.batch_size, batch_sampler.drop_last)  # type: ignore[arg-type]
    context.control.agree(Call.PREPARE)
    by_rank = context.control.exchange((facts, seed))
    if len({facts for facts, _ in by_rank}) > 1:
        lines = [
            f"\n  rank {rank}: {rows} rows in batches of {size}{', short one dropped' if drop else ''}"
            for rank, ((rows, size, drop), _) in enumerate(by_rank)
        ]
        raise DataError(
            f"ranks gave data of unlike size to prepare():{''.join(lines)}",
            hint="give every rank the same data set; prepare() shares its rows out",
        )
    length, batch_size, drop_last = facts
    shares = Shares(length=length, batch_size=batch_size, num_ranks=context.control.world_size, drop_last=drop_last)
    if length == 0:
        raise DataError("an epoch has no batch: the data set or its sampler is empty", hint="look at how it is built")
    if shares.num_steps == 0:
        raise DataError(
            f"an epoch has no batch: {length} rows make no full micro-step of "
            f"{batch_size} x {shares.num_ranks} ranks, and the short one is dropped",
            hint="use drop_last=False, a smaller batch, or more data",
        )
    return shares, by_rank[0][1]


def _order_of(sampler: Sampler[int], length: int, *, seed: int, control: Control) -> Callable[[int], Sequence[int]]:
    """Return the order of rows as a function of the epoch."""
    # A subclass may draw in its own way.
    if type(sampler) is SequentialSampler:
        return lambda _: range(length)
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler.data_source) == length:
        return lambda epoch: shuffled(length, seed=seed, epoch=epoch)
    return lambda epoch: _drawn_by_rank_0(sampler, length, seed=derive(seed, epoch), epoch=epoch, control=control)


def _drawn_by_rank_0(sampler: Sampler[int], length: int, *, seed: int, epoch: int, control: Control) -> Sequence[int]:
    """Return what rank 0 draws from the user's own sampler, seeded for this epoch; collective."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    own: list[int] | None = None
    if control.rank == 0:
        generator = getattr(sampler, "generator", None)
        with seeded(seed, *([generator] if isinstance(generator, torch.Generator) else [])):
            own = list(sampler)
    control.agree(Call.ORDER)
    order: list[int] = control.exchange(own)[0]
    if len(order) != length:
        raise DataError(
            f"{type(sampler).__name__} drew {len(order)} rows, and its length is {length}",
            hint="make the sampler's __len__ the number of rows that it draws in an epoch",
        )
    return order


def _mover(device: torch.device, *, is_pinned: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(device, non_blocking=is_pinned)
