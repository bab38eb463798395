"""Parts of a whole: which items are whose, for every kind of whole, and what cannot be split."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset

from drivetrain.cluster.splitting import Part, part_of
from drivetrain.errors import DataError

Pair = namedtuple("Pair", ["ids", "names"])


class Rows(Dataset[int]):
    """A data set whose items are their positions."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: int) -> int:
        return position


class Table:
    """Has what a Hugging Face data set is split by: a length, and `select`; items come in columns."""

    def __init__(self, items: list[int]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, rows: slice) -> dict[str, list[int]]:
        return {"column": self.items[rows]}

    def select(self, positions: Any) -> Table:
        return Table([self.items[position] for position in positions])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def parts(whole: Any, *, num_ranks: int, fills: bool = False) -> list[Any]:
    return [part_of(whole, Part(rank=rank, num_ranks=num_ranks, fills=fills)) for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ("num_ranks", "fills", "expected"),
    [
        (1, False, [[0, 1, 2, 3, 4]]),
        (2, False, [[0, 1, 2], [3, 4]]),
        (3, False, [[0, 1], [2, 3], [4]]),
        (4, False, [[0, 1], [2], [3], [4]]),
        (7, False, [[0], [1], [2], [3], [4], [], []]),
        (1, True, [[0, 1, 2, 3, 4]]),
        (2, True, [[0, 1, 2], [3, 4, 4]]),
        (3, True, [[0, 1], [2, 3], [4, 4]]),
        (4, True, [[0, 1], [2, 3], [4, 4], [4, 4]]),
        (5, True, [[0], [1], [2], [3], [4]]),
        (7, True, [[0], [1], [2], [3], [4], [4], [4]]),
    ],
)
def test_list_when_split_then_each_rank_has_its_items(num_ranks: int, fills: bool, expected: list[list[int]]) -> None:
    assert parts([0, 1, 2, 3, 4], num_ranks=num_ranks, fills=fills) == expected


@given(length=st.integers(0, 50), num_ranks=st.integers(1, 9))
def test_parts_when_joined_by_rank_are_the_whole_and_differ_by_one_item_at_most(length: int, num_ranks: int) -> None:
    whole = list(range(length))
    split = parts(whole, num_ranks=num_ranks)
    assert list(chain(*split)) == whole
    assert max(map(len, split)) - min(map(len, split)) <= 1


@given(length=st.integers(1, 50), num_ranks=st.integers(1, 9))
def test_parts_when_filled_up_are_equal_and_begin_with_the_whole(length: int, num_ranks: int) -> None:
    whole = list(range(length))
    split = parts(whole, num_ranks=num_ranks, fills=True)
    joined = list(chain(*split))
    assert {len(part) for part in split} == {-(-length // num_ranks)}
    assert joined[:length] == whole
    assert set(joined[length:]) <= {whole[-1]}


WHOLES: dict[str, tuple[Any, Callable[[Any], list[int]]]] = {
    "tuple": ((0, 1, 2, 3, 4), list),
    "range": (range(5), list),
    "tensor": (torch.arange(10).reshape(5, 2), lambda part: part[:, 0].div(2).int().tolist()),
    "array": (np.arange(5), lambda part: part.tolist()),
    "torch data set": (Rows(5), lambda part: [part[index] for index in range(len(part))]),
    "Hugging Face data set": (Table([0, 1, 2, 3, 4]), lambda part: part.items),
}


@pytest.mark.parametrize("fills", [False, True])
@pytest.mark.parametrize("name", WHOLES)
def test_whole_of_any_kind_when_split_then_has_the_items_that_a_list_would(name: str, fills: bool) -> None:
    whole, items = WHOLES[name]
    expected = parts([0, 1, 2, 3, 4], num_ranks=3, fills=fills)
    split = parts(whole, num_ranks=3, fills=fills)
    assert [items(part) for part in split] == expected
    kind = {"range": list, "torch data set": Subset}.get(name, type(whole))
    assert {type(part) for part in split} == {kind}


@pytest.mark.parametrize(
    "make", [dict, OrderedDict, UserDict, lambda items: Pair(**items)], ids=["dict", "OrderedDict", "UserDict", "named"]
)
def test_columns_when_split_then_each_is_and_the_container_stays(make: Callable[[dict[str, Any]], Any]) -> None:
    whole = make({"ids": torch.arange(3), "names": ["a", "b", "c"]})
    first, second = parts(whole, num_ranks=2, fills=True)
    assert type(first) is type(second) is type(whole)
    one, two = ((part._asdict() if isinstance(part, Pair) else part) for part in (first, second))
    assert (one["ids"].tolist(), one["names"]) == ([0, 1], ["a", "b"])
    assert (two["ids"].tolist(), two["names"]) == ([2, 2], ["c", "c"])


def test_batch_encoding_when_split_then_keeps_its_class() -> None:
    from transformers import BatchEncoding

    first, second = parts(BatchEncoding({"input_ids": torch.arange(3)}), num_ranks=2)
    assert type(first) is BatchEncoding
    assert (first["input_ids"].tolist(), second["input_ids"].tolist()) == ([0, 1], [2])


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("whole", "words"),
    [
        ("abc", "a value of type str"),
        (3, "a value of type int"),
        (None, "a value of type NoneType"),
        (torch.tensor(1), "a 0-d Tensor"),
        (Stream(), "Stream, a stream without a length"),
        ((item for item in range(3)), "a value of type generator"),
        ({1, 2}, "a value of type set"),
        ({"ids": [1, 2], "name": "ab"}, "a value of type str"),
        ({"ids": [1, 2], "more": [1]}, "unlike lengths: 'ids' has 2, 'more' has 1"),
    ],
)
def test_whole_when_it_cannot_be_split_then_is_refused_on_any_number_of_ranks(
    whole: Any, words: str, num_ranks: int
) -> None:
    with pytest.raises(DataError, match=words):
        part_of(whole, Part(rank=0, num_ranks=num_ranks, fills=False))
