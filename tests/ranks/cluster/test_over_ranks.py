"""Broadcasting, padding, splitting, objects, flags and decorators, with exact values on 1 to 4 ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from containers import Output, Scores
from drivetrain import Accelerator
from drivetrain.cluster.tree import map_tensors
from drivetrain.testing import ranks

COUNTS = (1, 2, 3, 4)
DTYPES = (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.float64, torch.complex64)


def sent_by(rank: int) -> dict[str, Any]:
    """Return what a rank would broadcast: every kind of tensor and container, told apart by rank."""
    return {
        "0-d": torch.tensor(float(rank)),
        "empty": torch.empty(0, 2),
        "transposed": (torch.arange(6).reshape(2, 3) + 10 * rank).t(),
        "with a graph": torch.full((2,), float(rank), requires_grad=True) * 2,
        "nested": [Scores(values=torch.tensor([rank]), names=None), (Output(loss=torch.tensor([rank, 1])),)],
        **{str(dtype): torch.tensor([rank % 2, 1, 0]).to(dtype) for dtype in DTYPES},
    }


def plain(value: Any) -> Any:
    """Return containers with each tensor as its dtype and items."""
    return map_tensors(value, lambda tensor: (tensor.dtype, tensor.detach().tolist()))


def to_pad(rank: int) -> dict[str, Any]:
    """Return tensors that differ by rank in both of their dims, and things that padding leaves alone."""
    return {
        "whole": torch.full((rank + 1, 2 * rank + 1), rank),
        "floats": [torch.full((1, rank), float(rank), dtype=torch.bfloat16)],
        "1-d": torch.full((rank + 1,), rank),
        "0-d": torch.tensor(rank),
        "text": f"of rank {rank}",
        "nothing": None,
    }


def padded_by_hand(rank: int, count: int, *, first: bool) -> dict[str, Any]:
    """Return what padding dim 1 of `to_pad` with 7 must give."""
    missing = 2 * (count - 1 - rank)

    def row(own: list[Any], *, fill: Any, length: int) -> list[Any]:
        return [fill] * length + own if first else own + [fill] * length

    return {
        "whole": (torch.int64, [row([rank] * (2 * rank + 1), fill=7, length=missing)] * (rank + 1)),
        "floats": [(torch.bfloat16, [row([float(rank)] * rank, fill=7.0, length=count - 1 - rank)])],
        "1-d": (torch.int64, [rank] * (rank + 1)),
        "0-d": (torch.int64, rank),
        "text": f"of rank {rank}",
        "nothing": None,
    }


def rows_to_pad(rank: int) -> Tensor:
    return torch.full((rank + 1, 2), rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What one rank got from each call, with and without comparing ranks first."""

    broadcast: list[Any]
    is_input_kept: bool
    filled: list[Any]
    is_same_list: bool
    objects: list[Any]
    padded: list[Any]
    rows: Any
    parts: list[Any]
    triggers: list[bool]
    did: list[str]
    turns: list[int]


def use_every_call(checks: str) -> Results:
    with Accelerator(cpu=True, check_collectives=checks) as accelerator:
        rank, count = accelerator.process_index, accelerator.num_processes
        last = count - 1
        sent, own = sent_by(rank), [f"of {rank}", {"rank": rank}, torch.tensor([rank])]
        kept = plain(sent)
        received = [accelerator.broadcast(sent), accelerator.broadcast(sent, from_process=last)]
        filled = accelerator.broadcast_object_list(own, from_process=last)
        return Results(
            broadcast=[plain(value) for value in received],
            is_input_kept=plain(sent) == kept,
            filled=plain(filled),
            is_same_list=filled is own,
            objects=accelerator.gather_object([rank] * rank),
            padded=[
                plain(accelerator.pad_across_processes(to_pad(rank), dim=1, pad_index=7)),
                plain(accelerator.pad_across_processes(to_pad(rank), 1, 7, True)),
            ],
            rows=plain(accelerator.gather(accelerator.pad_across_processes(rows_to_pad(rank)))),
            parts=parts_of(accelerator),
            triggers=triggers_of(accelerator),
            did=decorated_by(accelerator),
            turns=turns_of(accelerator),
        )


def parts_of(accelerator: Accelerator) -> list[Any]:
    results: list[Any] = []
    with accelerator.split_between_processes([0, 1, 2, 3, 4]) as part:
        results.append(part)
    with accelerator.split_between_processes({"x": torch.arange(5)}, apply_padding=True) as columns:
        results.append(accelerator.gather(columns["x"])[:5].tolist())
    return results


def triggers_of(accelerator: Accelerator) -> list[bool]:
    """Return four looks: nobody raised a flag, the last rank did, nobody did again, everybody did."""
    looks = [accelerator.check_trigger()]
    if accelerator.is_last_process:
        accelerator.set_trigger()
    looks += [accelerator.check_trigger(), accelerator.check_trigger()]
    accelerator.set_trigger()
    return [*looks, accelerator.check_trigger()]


def decorated_by(accelerator: Accelerator) -> list[str]:
    """Return which of the decorated functions this rank runs."""
    last = accelerator.num_processes - 1
    done: list[str] = []
    decorators: dict[str, Callable[..., Any]] = {
        "main": accelerator.on_main_process,
        "main, called": accelerator.on_main_process(),
        "local main": accelerator.on_local_main_process,
        "last": accelerator.on_last_process,
        "by index": accelerator.on_process(process_index=last),
        "by index, direct": partial(accelerator.on_process, process_index=last),
        "by local index": accelerator.on_local_process(local_process_index=last),
    }

    def note(name: str, *, suffix: str = "") -> str:
        done.append(name + suffix)
        return name

    for name, decorator in decorators.items():
        decorated = decorator(note)
        assert decorated.__name__ == "note"
        assert decorated(name, suffix="!") in (name, None)
    return done


def turns_of(accelerator: Accelerator) -> list[int]:
    """Return how many ranks had been in each context when this one came in, seen in a list that all see."""
    seen: list[int] = []
    for context in (accelerator.main_process_first, accelerator.local_main_process_first):
        with context():
            if accelerator.is_main_process:
                time.sleep(0.2)  # the others would be here by now if they did not wait
            store = torch.distributed.distributed_c10d._get_default_store() if accelerator.use_distributed else None
            seen.append(0 if store is None else store.add(context.__name__, 1) - 1)
    return seen


@pytest.fixture(scope="module", params=["always", "never"])
def results(request: pytest.FixtureRequest) -> dict[int, list[Results]]:
    """What ranks got, by number of ranks and by rank."""
    return {count: ranks.run(use_every_call, request.param, ranks=count) for count in COUNTS}


every_count = pytest.mark.parametrize("count", COUNTS)


@every_count
def test_broadcast_gives_every_rank_the_tensors_of_one_and_keeps_its_input(
    results: dict[int, list[Results]], count: int
) -> None:
    for one in results[count]:
        assert one.broadcast == [plain(sent_by(0)), plain(sent_by(count - 1))]
        assert one.is_input_kept


@every_count
def test_broadcast_object_list_fills_the_list_that_it_was_given(results: dict[int, list[Results]], count: int) -> None:
    last = count - 1
    for one in results[count]:
        assert one.filled == [f"of {last}", {"rank": last}, (torch.int64, [last])]
        assert one.is_same_list


@every_count
def test_gather_object_joins_lists_of_any_length_by_rank(results: dict[int, list[Results]], count: int) -> None:
    assert [one.objects for one in results[count]] == [[rank for rank in range(count) for _ in range(rank)]] * count


@every_count
def test_padding_makes_tensors_as_long_as_the_longest_and_leaves_the_rest(
    results: dict[int, list[Results]], count: int
) -> None:
    for rank, one in enumerate(results[count]):
        assert one.padded == [padded_by_hand(rank, count, first=first) for first in (False, True)]
        expected = [[rank] * 2 if row <= rank else [0, 0] for rank in range(count) for row in range(count)]
        assert one.rows == (torch.int64, expected)


@every_count
def test_split_gives_ranks_the_whole_between_them_and_filled_up_it_gathers_to_the_whole(
    results: dict[int, list[Results]], count: int
) -> None:
    assert list(chain(*(one.parts[0] for one in results[count]))) == [0, 1, 2, 3, 4]
    assert [one.parts[1] for one in results[count]] == [[0, 1, 2, 3, 4]] * count


@every_count
def test_trigger_of_any_rank_is_seen_once_by_all(results: dict[int, list[Results]], count: int) -> None:
    assert [one.triggers for one in results[count]] == [[False, True, False, True]] * count


@every_count
def test_decorated_functions_run_where_they_should_and_pass_arguments(
    results: dict[int, list[Results]], count: int
) -> None:
    for rank, one in enumerate(results[count]):
        on_first = ["main!", "main, called!", "local main!"] if rank == 0 else []
        on_last = ["last!", "by index!", "by index, direct!", "by local index!"] if rank == count - 1 else []
        assert one.did == on_first + on_last


@every_count
def test_first_process_is_first_in_its_context(results: dict[int, list[Results]], count: int) -> None:
    by_rank = [one.turns for one in results[count]]
    assert by_rank[0] == [0, 0]
    if count > 1:
        for entered in zip(*by_rank, strict=True):
            assert sorted(entered) == list(range(count))
