"""A prepared loader on one process: what is kept of the user's loader, the order of rows, and what is refused."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from drivetrain.cluster.control import Control
from drivetrain.data import Drivers, LoaderContext, PreparedLoader
from drivetrain.data.shares import shuffled
from drivetrain.errors import DataError

LENGTH = 10


class Rows(Dataset[int]):
    """Row i is the number i."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> int:
        if not 0 <= row < self.length:
            raise IndexError(row)
        return row


class Backwards(Sampler[int]):
    """Draws the last row first, and claims a length that may be wrong."""

    def __init__(self, length: int = LENGTH, *, claims: int | None = None) -> None:
        self.length = length
        self.claims = length if claims is None else claims

    def __len__(self) -> int:
        return self.claims

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length - 1, -1, -1))


class Lengthless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


class EveryOther(SequentialSampler):
    """A subclass of torch's own sampler that draws in another way."""

    def __iter__(self) -> Iterator[int]:
        return iter([*range(0, LENGTH, 2), *range(1, LENGTH, 2)])


class TopRows(RandomSampler):
    """Draws from a python, a numpy and a torch generator that are the process's own."""

    def __iter__(self) -> Iterator[int]:
        rows = list(range(LENGTH))
        random.shuffle(rows)
        np.random.shuffle(rows)
        return iter([rows[i] for i in torch.randperm(LENGTH)])


class OwnBatches(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2], [3]])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


class WithOwnIteration(DataLoader[int]):
    def __iter__(self) -> Any:
        return iter([torch.zeros(1)])


def prepare(loader: DataLoader[Any], *, seed: int | None = 0) -> PreparedLoader:
    context = LoaderContext(
        device=torch.device("cpu"),
        control=Control(rank=0, world_size=1, group=None),
        drivers=Drivers(),
        seed=seed,
        even_batches=True,
    )
    return PreparedLoader(loader, context, owner=None)


def rows_of(loader: PreparedLoader) -> list[int]:
    """Return the rows of one pass."""
    return [row for batch in loader for row in batch.tolist()]


def as_text(rows: list[int]) -> list[str]:
    return [f"s{row}" for row in rows]


# What is kept


def test_collate_fn_when_given_makes_the_batches() -> None:
    assert list(prepare(DataLoader(Rows(5), batch_size=2, collate_fn=as_text))) == [["s0", "s1"], ["s2", "s3"], ["s4"]]


def test_rows_when_read_by_workers_are_those_without_workers_and_have_python_types() -> None:
    plain = prepare(DataLoader(Rows(), batch_size=3, shuffle=True, collate_fn=list))
    worked = prepare(
        DataLoader(Rows(), batch_size=3, shuffle=True, collate_fn=list, num_workers=2, persistent_workers=True)
    )
    for _ in range(2):
        batches = list(worked)
        assert batches == list(plain)
        assert {type(row) for batch in batches for row in batch} == {int}
    assert worked.num_workers == 2


def test_pinning_when_on_the_cpu_gives_no_warning() -> None:
    loader = prepare(DataLoader(Rows(), batch_size=4, pin_memory=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rows_of(loader) == list(range(LENGTH))


def test_attributes_are_those_of_the_users_loader() -> None:
    data = Rows()
    loader = DataLoader(data, batch_size=4, shuffle=True, drop_last=True)
    prepared = prepare(loader)
    assert prepared.dataset is data
    assert prepared.sampler is loader.sampler
    assert prepared.drop_last is True
    assert (prepared.batch_size, prepared.total_batch_size, len(prepared)) == (4, 4, 2)
    assert not hasattr(prepared, "no_such_attribute")
    assert copy.copy(prepared).dataset is data


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_short_batch_when_dropped_or_kept_shows_in_length_and_batches(drop_last: bool, sizes: list[int]) -> None:
    prepared = prepare(DataLoader(Rows(), batch_size=4, drop_last=drop_last))
    assert len(prepared) == len(sizes)
    assert [len(batch) for batch in prepared] == sizes


def test_batch_sampler_when_it_is_torchs_own_is_read_as_batch_size_and_sampler() -> None:
    batches = BatchSampler(Backwards(), batch_size=4, drop_last=True)
    prepared = prepare(DataLoader(Rows(), batch_sampler=batches))
    assert prepared.batch_size == 4
    assert [batch.tolist() for batch in prepared] == [[9, 8, 7, 6], [5, 4, 3, 2]]


# The order of rows


def test_order_when_shuffled_differs_by_epoch_and_is_repeated_with_the_seed() -> None:
    first, again, other = (prepare(DataLoader(Rows(), shuffle=True), seed=seed) for seed in (0, 0, 1))
    epochs = [rows_of(first) for _ in range(3)]
    assert epochs == [shuffled(LENGTH, seed=0, epoch=epoch) for epoch in range(3)]
    assert len({tuple(rows) for rows in epochs}) == 3
    assert [rows_of(again) for _ in range(3)] == epochs
    assert rows_of(other) != epochs[0]


def test_order_when_not_shuffled_is_that_of_the_data_in_every_epoch() -> None:
    prepared = prepare(DataLoader(Rows(), batch_size=3))
    assert [rows_of(prepared) for _ in range(2)] == [list(range(LENGTH))] * 2


def test_set_epoch_decides_the_order_of_the_next_pass() -> None:
    prepared = prepare(DataLoader(Rows(), shuffle=True))
    epochs = [rows_of(prepared) for _ in range(3)]
    prepared.set_epoch(1)
    assert prepared.epoch == 1
    assert rows_of(prepared) == epochs[1]
    assert prepared.epoch == 2
    assert rows_of(prepared) == epochs[2]


def test_order_when_no_seed_is_set_follows_the_users_generator_or_torchs_seed() -> None:
    generator = torch.Generator().manual_seed(7)
    prepared = prepare(DataLoader(Rows(), shuffle=True, generator=generator), seed=None)
    assert rows_of(prepared) == shuffled(LENGTH, seed=7, epoch=0)
    torch.manual_seed(5)
    assert rows_of(prepare(DataLoader(Rows(), shuffle=True), seed=None)) == shuffled(LENGTH, seed=5, epoch=0)


def test_two_passes_at_once_read_each_its_own_epoch() -> None:
    prepared = prepare(DataLoader(Rows(), shuffle=True))
    pairs = [(one.item(), other.item()) for one, other in zip(prepared, prepared, strict=True)]
    expected = [shuffled(LENGTH, seed=0, epoch=epoch) for epoch in (0, 1)]
    assert [list(rows) for rows in zip(*pairs, strict=True)] == expected


def random_draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), torch.rand(()).item()


@pytest.mark.parametrize("sampler", [None, TopRows(Rows()), WeightedRandomSampler([1.0] * LENGTH, LENGTH)])
def test_users_generators_when_an_epoch_was_read_are_where_they_were(sampler: Sampler[int] | None) -> None:
    loader = DataLoader(Rows(), batch_size=3, shuffle=sampler is None, sampler=sampler)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = random_draws()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    prepared = prepare(loader)
    assert sum(len(batch) for batch in prepared) == LENGTH
    assert random_draws() == expected


# Samplers of the user's own


def test_own_sampler_decides_the_order() -> None:
    assert rows_of(prepare(DataLoader(Rows(), batch_size=4, sampler=Backwards()))) == list(range(LENGTH - 1, -1, -1))
    assert rows_of(prepare(DataLoader(Rows(), sampler=EveryOther(Rows())))) == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]


def drawing_samplers() -> dict[str, Sampler[int]]:
    return {
        "weights": WeightedRandomSampler([0.0] * 5 + [1.0] * 5, num_samples=20),
        "weights with a generator": WeightedRandomSampler(
            [0.0] * 5 + [1.0] * 5, num_samples=20, generator=torch.Generator().manual_seed(3)
        ),
        "subset": SubsetRandomSampler([1, 3, 5, 7]),
        "replacement": RandomSampler(Rows(), replacement=True),
        "own": TopRows(Rows()),
    }


@pytest.mark.parametrize("name", drawing_samplers())
def test_own_sampler_when_it_draws_is_a_function_of_seed_and_epoch(name: str) -> None:
    first = prepare(DataLoader(Rows(), batch_size=3, sampler=drawing_samplers()[name]))
    epochs = [rows_of(first) for _ in range(3)]
    assert len({tuple(rows) for rows in epochs}) == 3
    torch.rand(5)  # what the script draws meanwhile changes nothing
    again = prepare(DataLoader(Rows(), batch_size=3, sampler=drawing_samplers()[name]))
    again.set_epoch(2)
    assert rows_of(again) == epochs[2]


def test_weighted_sampler_draws_by_its_weights() -> None:
    assert set(rows_of(prepare(DataLoader(Rows(), sampler=drawing_samplers()["weights"])))) == {5, 6, 7, 8, 9}


def test_subset_sampler_draws_its_rows_each_once() -> None:
    prepared = prepare(DataLoader(Rows(), batch_size=3, sampler=drawing_samplers()["subset"]))
    assert len(prepared) == 2
    assert sorted(rows_of(prepared)) == [1, 3, 5, 7]


def test_random_sampler_when_it_draws_fewer_rows_than_there_are_reaches_all_of_them() -> None:
    prepared = prepare(DataLoader(Rows(), sampler=RandomSampler(Rows(), num_samples=3)))
    epochs = [rows_of(prepared) for _ in range(30)]
    assert all(len(set(rows)) == 3 for rows in epochs)
    # Each row stays out of all 30 epochs with a probability of 0.7 ** 30, or 2e-5.
    assert {row for rows in epochs for row in rows} == set(range(LENGTH))


# What is refused


@pytest.mark.parametrize(
    ("loader", "found", "hint"),
    [
        (DataLoader(Stream(), batch_size=2), "Stream is a stream", "__len__ and __getitem__"),
        (DataLoader(Rows(), batch_sampler=OwnBatches()), "batch_sampler=OwnBatches", "`batch_size`"),
        (DataLoader(Rows(), batch_size=None), "batch_size=None", "`batch_size`"),
        (
            DataLoader(Rows(), sampler=DistributedSampler(Rows(), num_replicas=2, rank=0)),
            "DistributedSampler",
            "no sampler",
        ),
        (DataLoader(Rows(), sampler=Lengthless()), "Lengthless has no length", "__len__"),
        (DataLoader(Rows(0)), "is empty", "look at"),
        (DataLoader(Rows(3), batch_size=4, drop_last=True), "3 rows make no full micro-step of 4 x 1", "drop_last"),
        (WithOwnIteration(Rows()), "WithOwnIteration iterates in its own way", "collate_fn"),
    ],
)
def test_loader_when_it_cannot_be_shared_out_is_refused_with_a_hint(
    loader: DataLoader[Any], found: str, hint: str
) -> None:
    with pytest.raises(DataError) as refused:
        prepare(loader)
    assert found in refused.value.message
    assert refused.value.hint is not None
    assert hint in refused.value.hint


@pytest.mark.parametrize("claims", [LENGTH - 1, LENGTH + 1])
def test_sampler_when_it_draws_another_number_than_its_length_is_refused(claims: int) -> None:
    prepared = prepare(DataLoader(Rows(), sampler=Backwards(claims=claims)))
    with pytest.raises(DataError, match=f"Backwards drew {LENGTH} rows, and its length is {claims}"):
        iter(prepared)
