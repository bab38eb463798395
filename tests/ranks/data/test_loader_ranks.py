"""Prepared loaders on 1, 2 and 4 ranks: all that ranks read, put together, and what they refuse together."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from drivetrain import Accelerator
from drivetrain.data.shares import shuffled
from drivetrain.errors import DrivetrainError
from drivetrain.testing import ranks

RANKS = (1, 2, 4)
SEED = 3
GLOBAL_BATCH = 8
LENGTH = 29  # three full global batches and one of five rows
EPOCHS = 2
SHORT = [(11, 4), (9, 4), (1, 4), (2, 1), (8, 2)]  # (rows, batch size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A batch as a rank saw it."""

    rows: list[int]
    counts: int
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """All that one rank read.

    Args:
        layouts: by batch size, the batches of each epoch of a shuffled loader.
        short: by (rows, batch size, even_batches), the batches of a loader in order, and its length.
        unseeded: rows of a shuffled loader, the ranks' generators seeded differently.
        drawn: rows of a sampler that draws from the process's own generators.
    """

    layouts: dict[int, list[list[Read]]]
    short: dict[tuple[int, int, bool], tuple[list[Read], int]]
    unseeded: list[Read]
    drawn: list[list[Read]]


class Shuffling(Sampler[int]):
    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        rows = list(range(LENGTH))
        random.shuffle(rows)
        return iter(rows)


class Short(Shuffling):
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH - 1))


def numbers(length: int) -> Any:
    return torch.arange(length)


def read(loader: Any) -> list[Read]:
    pass_ = iter(loader)
    found = []
    for batch in pass_:
        facts = pass_.facts(window_size=1)
        found.append(Read(rows=batch.tolist(), counts=facts.rows, is_last=facts.is_last))
    return found


def read_everything() -> Readings:
    short = {}
    for even_batches in (True, False):
        with Accelerator(cpu=True, seed=SEED, even_batches=even_batches) as accelerator:
            for length, batch_size in SHORT:
                loader = accelerator.prepare(DataLoader(numbers(length), batch_size=batch_size))
                short[length, batch_size, even_batches] = read(loader), len(loader)
    with Accelerator(cpu=True, seed=SEED) as accelerator:
        layouts = {}
        for batch_size in (size for size in (1, 2, 4, 8) if size * accelerator.num_processes <= GLOBAL_BATCH):
            loader = accelerator.prepare(DataLoader(numbers(LENGTH), batch_size=batch_size, shuffle=True))
            layouts[batch_size] = [read(loader) for _ in range(EPOCHS)]
        random.seed(accelerator.process_index)
        loader = accelerator.prepare(DataLoader(numbers(LENGTH), batch_size=2, sampler=Shuffling()))
        drawn = [read(loader) for _ in range(EPOCHS)]
    torch.manual_seed(accelerator.process_index)
    with Accelerator(cpu=True) as accelerator:
        loader = accelerator.prepare(DataLoader(numbers(LENGTH), batch_size=2, shuffle=True))
        unseeded = read(loader)
    return Readings(layouts=layouts, short=short, unseeded=unseeded, drawn=drawn)


@pytest.fixture(scope="module")
def readings() -> dict[int, list[Readings]]:
    """What was read, by number of ranks and by rank."""
    return {count: ranks.run(read_everything, ranks=count) for count in RANKS}


def in_order(by_rank: list[list[Read]]) -> list[list[int]]:
    """Return the rows of each micro-step over all ranks, without fillers."""
    return [[row for one in step if one.counts for row in one.rows] for step in zip(*by_rank, strict=True)]


def joined(lists: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def test_rows_of_each_update_are_the_same_on_every_layout(readings: dict[int, list[Readings]]) -> None:
    for epoch in range(EPOCHS):
        order = shuffled(LENGTH, seed=SEED, epoch=epoch)
        expected = [order[start : start + GLOBAL_BATCH] for start in range(0, LENGTH, GLOBAL_BATCH)]
        for count, by_rank in readings.items():
            for batch_size in by_rank[0].layouts:
                window = GLOBAL_BATCH // batch_size // count
                steps = in_order([one.layouts[batch_size][epoch] for one in by_rank])
                updates = [joined(steps[first : first + window]) for first in range(0, len(steps), window)]
                assert updates == expected, f"{count} ranks x {batch_size} x {window}, epoch {epoch}"


@pytest.mark.parametrize("count", RANKS)
def test_last_batch_is_marked_on_every_rank_and_no_other_is(readings: dict[int, list[Readings]], count: int) -> None:
    for one in readings[count]:
        for epochs in one.layouts.values():
            for epoch in epochs:
                assert [batch.is_last for batch in epoch] == [False] * (len(epoch) - 1) + [True]


@pytest.mark.parametrize("count", RANKS)
@pytest.mark.parametrize(("length", "batch_size"), SHORT)
def test_short_epoch_when_batches_are_even_gives_each_rank_as_many_and_each_row_once(
    readings: dict[int, list[Readings]], count: int, length: int, batch_size: int
) -> None:
    batches = [one.short[length, batch_size, True][0] for one in readings[count]]
    num_steps = -(-length // (count * batch_size))
    assert [one.short[length, batch_size, True][1] for one in readings[count]] == [num_steps] * count
    assert [row for step in in_order(batches) for row in step] == list(range(length))
    for step in zip(*batches, strict=True):
        for batch in step:
            assert batch.counts in (0, len(batch.rows))  # as many as there are, or a filler of one row
            assert batch.counts or batch.rows == [0]
    last = [one[-1].counts for one in batches]
    rest = length - (num_steps - 1) * count * batch_size
    assert last == [rest // count + (rank < rest % count) for rank in range(count)]


@pytest.mark.parametrize("count", RANKS)
@pytest.mark.parametrize(("length", "batch_size"), SHORT)
def test_short_epoch_when_batches_need_not_be_even_has_no_filler(
    readings: dict[int, list[Readings]], count: int, length: int, batch_size: int
) -> None:
    for one in readings[count]:
        even, _ = one.short[length, batch_size, True]
        uneven, num_batches = one.short[length, batch_size, False]
        assert uneven == [batch for batch in even if batch.counts]
        assert num_batches == len(uneven)


@pytest.mark.parametrize("count", RANKS)
def test_order_when_no_seed_is_set_is_that_of_rank_0(readings: dict[int, list[Readings]], count: int) -> None:
    steps = in_order([one.unseeded for one in readings[count]])
    assert joined(steps) == shuffled(LENGTH, seed=0, epoch=0)


@pytest.mark.parametrize("count", RANKS)
def test_own_sampler_is_drawn_once_for_all_ranks_and_alike_on_any_number(
    readings: dict[int, list[Readings]], count: int
) -> None:
    for epoch in range(EPOCHS):
        rows = joined(in_order([one.drawn[epoch] for one in readings[count]]))
        assert sorted(rows) == list(range(LENGTH))
        assert rows == joined(in_order([readings[1][0].drawn[epoch]]))
    assert readings[count][0].drawn[0] != readings[count][0].drawn[1]


def message_of(action: Callable[[], Any]) -> tuple[str, str]:
    try:
        action()
    except DrivetrainError as error:
        return type(error).__name__, error.message
    return "", ""


def refused_together() -> dict[str, tuple[str, str]]:
    """Return the error of this rank for loaders that differ between two ranks; all ranks are in step after each."""
    found = {}
    with Accelerator(cpu=True) as accelerator:
        is_main = accelerator.is_main_process
        unlike = {
            "length": DataLoader(numbers(3 if is_main else 5)),
            "batch size": DataLoader(numbers(8), batch_size=2 if is_main else 4),
            "drop_last": DataLoader(numbers(8), batch_size=2, drop_last=is_main),
            "no batch": DataLoader(numbers(9), batch_size=5, drop_last=True),
        }
        for name, loader in unlike.items():
            found[name] = message_of(lambda loader=loader: accelerator.prepare(loader))
        short = accelerator.prepare(DataLoader(numbers(LENGTH), sampler=Short()))
        found["wrong length"] = message_of(lambda: iter(short))
        drawn = accelerator.prepare(DataLoader(numbers(LENGTH), sampler=Shuffling()))
        found["one rank alone"] = message_of(
            lambda: iter(drawn) if is_main else accelerator.gather(torch.ones(accelerator.process_index))
        )
    return found


def test_loaders_when_ranks_differ_are_refused_by_all_ranks_with_what_each_has() -> None:
    by_rank = ranks.run(refused_together, ranks=2, timeout=20)
    assert by_rank[0] == by_rank[1]
    expected = {
        "length": ("DataError", "\n  rank 0: 3 rows in batches of 1\n  rank 1: 5 rows in batches of 1"),
        "batch size": ("DataError", "\n  rank 0: 8 rows in batches of 2\n  rank 1: 8 rows in batches of 4"),
        "drop_last": (
            "DataError",
            "\n  rank 0: 8 rows in batches of 2, short one dropped\n  rank 1: 8 rows in batches of 2",
        ),
        "no batch": ("DataError", "9 rows make no full micro-step of 5 x 2 ranks"),
        "wrong length": ("DataError", f"Short drew {LENGTH - 1} rows, and its length is {LENGTH}"),
        "one rank alone": ("RankMismatchError", "rank 1: gather()"),
    }
    for name, (kind, text) in expected.items():
        got_kind, message = by_rank[0][name]
        assert got_kind == kind, name
        assert text in message
