"""Gathering and reducing over ranks: every kind of tensor and container, CASES 4, and ranks that differ."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from containers import Output, Scores
from drivetrain import Accelerator
from drivetrain.cluster.tree import map_tensors
from drivetrain.errors import DrivetrainError
from drivetrain.testing import ranks

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
)
COUNTS = (1, 2, 3, 4)
EXAMPLES = [(11, 4, 2), (11, 4, 3), (1, 4, 4), (10, 4, 2), (8, 2, 4)]  # rows, batch size, ranks
SECONDS = 5.0  # for an error to reach every rank, on a machine that does other things as well


def shapes(rank: int) -> dict[str, Tensor]:
    """Return tensors of all shapes that differ by rank: in their values, and some in dim 0."""
    return {
        "0-d": torch.tensor(float(rank)),
        "1-d": torch.full((3,), float(rank)),
        "rows differ": torch.full((rank + 1, 2), float(rank)),
        "one rank has none": torch.full((0 if rank else 4, 2), float(rank)),
        "all empty": torch.empty(0, 3),
        "rows of nothing": torch.empty(rank + 2, 0),
        "transposed": (torch.arange(6).reshape(2, 3) + 10 * rank).t(),
        "strided": (torch.arange(8) + 10 * rank)[::2],
        "with a graph": torch.full((2,), float(rank), requires_grad=True) * 2,
    }


def joined(name: str, count: int) -> Tensor:
    """Return what gathering the tensors called `name` must give."""
    return torch.cat([torch.atleast_1d(shapes(rank)[name].detach()) for rank in range(count)])


def values_of(dtype: torch.dtype, rank: int) -> Tensor:
    """Return three numbers of a rank; as truth values (yes, no, yes) on rank 0 and (yes, no, no) elsewhere."""
    if dtype is torch.bool:
        return torch.tensor([True, False, rank == 0])
    return torch.tensor([rank + 1, 2 * rank, 100 if rank else 3]).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What one rank got; `unchecked` without comparing ranks first."""

    shapes: dict[str, Tensor]
    gathered: dict[torch.dtype, Tensor]
    sums: dict[torch.dtype, Tensor]
    means: dict[torch.dtype, Tensor]
    own: dict[torch.dtype, Tensor]
    nested: Any
    unchecked: tuple[Tensor, Tensor]
    scaled: tuple[Tensor, Tensor, Tensor]
    is_input_kept: bool
    objects: list[Any]
    of_rank_0: tuple[Any, list[Any]]
    evaluated: list[tuple[list[int], list[str], list[float]]]


def nested_value(rank: int) -> dict[str, Any]:
    return {
        "list": [torch.full((1,), float(rank)), None],
        "tuple": (torch.full((rank + 1,), rank), Scores(values=torch.tensor(rank), names={"x": torch.ones(1, 2)})),
        "output": Output(loss=torch.tensor([float(rank)])),
        "empty": {},
    }


def examples_on(count: int) -> list[tuple[int, int]]:
    """Return rows and batch size of the examples for a number of ranks; one process does them all."""
    return [(length, batch_size) for length, batch_size, on in EXAMPLES if count in (on, 1)]


@torch.no_grad()
def evaluate(accelerator: Accelerator, *, length: int, batch_size: int) -> tuple[list[int], list[str], list[float]]:
    """Return ids, strings and nested scores that an evaluation collects."""
    data: Any = torch.arange(length)
    ids: list[int] = []
    names: list[str] = []
    scores: list[float] = []
    for batch in accelerator.prepare(DataLoader(data, batch_size=batch_size)):
        ids += accelerator.gather_for_metrics(batch).tolist()
        names += accelerator.gather_for_metrics([f"s{row}" for row in batch.tolist()])
        nested = accelerator.gather_for_metrics({"scores": [batch.view(-1, 1) / 2]})
        scores += nested["scores"][0].flatten().tolist()
    return ids, names, scores


def use_every_call() -> Results:
    with Accelerator(cpu=True, check_collectives="never") as accelerator:
        rank = accelerator.process_index
        sent = torch.full((2,), float(rank))
        unchecked = accelerator.gather(shapes(rank)["rows differ"]), accelerator.reduce(sent)
    with Accelerator(cpu=True) as accelerator:
        by_dtype = {dtype: values_of(dtype, rank) for dtype in DTYPES}
        return Results(
            shapes=accelerator.gather(shapes(rank)),
            gathered=accelerator.gather(by_dtype),
            sums=accelerator.reduce(by_dtype),
            means={dtype: accelerator.reduce(value, "mean") for dtype, value in by_dtype.items()},
            own=accelerator.reduce(by_dtype, "none"),
            nested=accelerator.gather(nested_value(rank)),
            unchecked=unchecked,
            scaled=(
                accelerator.reduce(sent, "sum", 0.5),
                accelerator.reduce(sent.long(), "mean", scale=3.0),
                accelerator.reduce(sent, "none", 2.0),
            ),
            is_input_kept=torch.equal(sent, torch.full((2,), float(rank))),
            objects=accelerator.gather_for_metrics([f"s{rank}", {"rank": rank}]),
            of_rank_0=(
                accelerator._collectives.gather(
                    {"0-d": torch.tensor(float(rank)), "rows": torch.full((rank + 1, 2), float(rank))},
                    contributes=rank == 0,
                ),
                accelerator._collectives.gather_object([rank], contributes=rank == 0),
            ),
            evaluated=[
                evaluate(accelerator, length=length, batch_size=batch_size)
                for length, batch_size in examples_on(accelerator.num_processes)
            ],
        )


@pytest.fixture(scope="module")
def results() -> dict[int, list[Results]]:
    """What ranks got, by number of ranks and by rank."""
    return {count: ranks.run(use_every_call, ranks=count) for count in COUNTS}


every_count = pytest.mark.parametrize("count", COUNTS)


@every_count
def test_gather_joins_tensors_of_any_shape_by_rank(results: dict[int, list[Results]], count: int) -> None:
    for one in results[count]:
        for name, got in one.shapes.items():
            expected = joined(name, count)
            assert got.dtype is expected.dtype
            assert got.shape == expected.shape, name
            assert torch.equal(got, expected), name
            assert not got.requires_grad


@every_count
def test_gather_keeps_every_dtype_and_value(results: dict[int, list[Results]], count: int) -> None:
    for one in results[count]:
        for dtype, got in one.gathered.items():
            assert got.dtype is dtype
            assert torch.equal(got, torch.cat([values_of(dtype, rank) for rank in range(count)]))


@every_count
def test_reduce_adds_up_every_dtype_and_counts_truth_values(results: dict[int, list[Results]], count: int) -> None:
    for one in results[count]:
        for dtype, got in one.sums.items():
            wide = dtype if dtype.is_floating_point or dtype.is_complex else torch.int64
            expected = sum(values_of(dtype, rank).to(torch.complex128) for rank in range(count))
            assert got.dtype is wide
            # The sums are whole numbers up to 303, and bfloat16 has eight bits of them.
            assert torch.allclose(got.to(torch.complex128), expected, rtol=2**-8)
    assert results[2][0].sums[torch.bool].tolist() == [2, 0, 1]


@every_count
def test_reduce_when_it_averages_integers_or_truth_values_gives_floats(
    results: dict[int, list[Results]], count: int
) -> None:
    for one in results[count]:
        for dtype, got in one.means.items():
            expected = sum(values_of(dtype, rank).to(torch.complex128) for rank in range(count)) / count
            assert got.dtype is (dtype if dtype.is_floating_point or dtype.is_complex else torch.float32)
            assert torch.allclose(got.to(torch.complex128), expected, rtol=2**-8)
    assert results[2][0].means[torch.int64].tolist() == [1.5, 1.0, 51.5]
    assert results[2][0].means[torch.bool].tolist() == [1.0, 0.0, 0.5]


@every_count
def test_reduce_when_asked_for_none_leaves_each_rank_its_own(results: dict[int, list[Results]], count: int) -> None:
    for rank, one in enumerate(results[count]):
        for dtype, got in one.own.items():
            assert got.dtype is dtype
            assert torch.equal(got, values_of(dtype, rank))


@every_count
def test_reduce_when_scaled_multiplies_the_result_and_leaves_its_input(
    results: dict[int, list[Results]], count: int
) -> None:
    total = sum(range(count))
    for rank, one in enumerate(results[count]):
        assert [got.tolist() for got in one.scaled] == [[total * 0.5] * 2, [total / count * 3.0] * 2, [rank * 2.0] * 2]
        assert one.is_input_kept


@every_count
def test_gather_when_tensors_are_nested_keeps_the_containers(results: dict[int, list[Results]], count: int) -> None:
    by_rank = range(count)
    for one in results[count]:
        listed = map_tensors(one.nested, lambda tensor: tensor.tolist())
        assert listed == {
            "list": [[float(rank) for rank in by_rank], None],
            "tuple": (
                [rank for rank in by_rank for _ in range(rank + 1)],
                Scores(values=list(by_rank), names={"x": [[1.0, 1.0]] * count}),
            ),
            "output": Output(loss=[float(rank) for rank in by_rank]),
            "empty": {},
        }


@every_count
def test_gather_when_checks_are_off_gives_the_same(results: dict[int, list[Results]], count: int) -> None:
    for one in results[count]:
        gathered, total = one.unchecked
        assert torch.equal(gathered, joined("rows differ", count))
        assert total.tolist() == [float(sum(range(count)))] * 2


@every_count
def test_gather_for_metrics_when_given_objects_joins_them_by_rank(
    results: dict[int, list[Results]], count: int
) -> None:
    expected = [item for rank in range(count) for item in (f"s{rank}", {"rank": rank})]
    assert [one.objects for one in results[count]] == [expected] * count


@every_count
def test_gather_when_a_rank_does_not_contribute_has_the_rows_of_the_others(
    results: dict[int, list[Results]], count: int
) -> None:
    for one in results[count]:
        tensors, objects = one.of_rank_0
        assert tensors["0-d"].tolist() == [0.0]
        assert tensors["rows"].tolist() == [[0.0, 0.0]]
        assert objects == [0]


# Case 4: evaluation sees each example once


@every_count
def test_evaluation_collects_every_row_once_in_order(results: dict[int, list[Results]], count: int) -> None:
    for one in results[count]:
        for (length, _), (ids, names, scores) in zip(examples_on(count), one.evaluated, strict=True):
            assert ids == list(range(length))
            assert names == [f"s{row}" for row in range(length)]
            assert scores == [row / 2 for row in range(length)]


# Ranks that differ, and values that cannot be gathered


def error_of(action: Callable[[], Any]) -> tuple[str, str]:
    """Return kind and message of the error that `action` raises; it must come in time."""
    begun = time.monotonic()
    try:
        action()
    except DrivetrainError as error:
        assert time.monotonic() - begun < SECONDS
        return type(error).__name__, error.message
    return "", ""


def gather_unlike_values() -> dict[str, tuple[str, str]]:
    """Return the error of each call in which two ranks differ; the ranks stay in step after each."""
    with Accelerator(cpu=True) as accelerator:
        rank = accelerator.process_index
        either: Callable[[Any, Any], Any] = lambda one, other: other if rank else one  # noqa: E731 (short on purpose)
        gather, reduce, metrics = accelerator.gather, accelerator.reduce, accelerator.gather_for_metrics
        tensor = torch.ones(2, 3)
        return {
            "dtype": error_of(lambda: gather(either(tensor, tensor.double()))),
            "other dim": error_of(lambda: gather(torch.ones(2, 3 + rank))),
            "number of dims": error_of(lambda: gather(either(tensor, tensor.flatten()))),
            "key": error_of(lambda: gather({either("loss", "los"): tensor})),
            "kind of container": error_of(lambda: gather(either([tensor], (tensor,)))),
            "number of tensors": error_of(lambda: gather([tensor] * (rank + 1))),
            "None": error_of(lambda: gather({"loss": either(tensor, None)})),
            "rows in reduce": error_of(lambda: reduce(torch.ones(2 + rank))),
            "tensors and objects": error_of(lambda: metrics(either([tensor], ["a", "b"]))),
            "calls": error_of(lambda: gather(tensor) if rank else reduce(tensor)),
            "a number": error_of(lambda: gather({"loss": tensor, "count": 3})),
            "an array": error_of(lambda: reduce([tensor.numpy()])),
            "a single object": error_of(lambda: metrics({"name": "a"})),
            "a text": error_of(lambda: metrics("abc")),
            "reduction": error_of(lambda: reduce(tensor, "max")),  # type: ignore[arg-type]
            "afterwards": error_of(lambda: gather(torch.ones(rank))),
        }


def test_values_when_ranks_differ_are_refused_by_every_rank_with_what_each_has() -> None:
    by_rank = ranks.run(gather_unlike_values, ranks=2, timeout=30)
    assert by_rank[0] == by_rank[1]
    mismatches = {
        "dtype": ("float32[*, 3]", "float64[*, 3]"),
        "other dim": ("float32[*, 3]", "float32[*, 4]"),
        "number of dims": ("float32[*, 3]", "float32[*]"),
        "key": ("{'loss': float32[*, 3]}", "{'los': float32[*, 3]}"),
        "kind of container": ("[float32[*, 3]]", "(float32[*, 3],)"),
        "number of tensors": ("[float32[*, 3]]", "[float32[*, 3], float32[*, 3]]"),
        "None": ("{'loss': float32[*, 3]}", "{'loss': None}"),
        "rows in reduce": ("float32[2]", "float32[3]"),
        "tensors and objects": ("[float32[*, 3]]", "a list of objects"),
    }
    for name, (of_rank_0, of_rank_1) in mismatches.items():
        kind, message = by_rank[0][name]
        assert kind == "RankMismatchError", name
        assert message.endswith(f":\n  rank 0: {of_rank_0}\n  rank 1: {of_rank_1}"), message
    kind, message = by_rank[0]["calls"]
    assert kind == "RankMismatchError"
    assert "rank 0: reduce()" in message
    assert "rank 1: gather()" in message
    refused = {
        "a number": "gather() takes tensors in nested containers, and found a int",
        "an array": "reduce() takes tensors in nested containers, and found a ndarray",
        "a single object": "this is a dict",
        "a text": "this is a str",
        "reduction": "reduction='max' is none of sum, mean, none",
    }
    for name, text in refused.items():
        kind, message = by_rank[0][name]
        assert kind == "DataError", name
        assert text in message
    assert by_rank[0]["afterwards"] == ("", "")
