"""Values that differ between ranks or cannot travel, ranks that fail or stay away: an error on every rank, in time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain.errors import DrivetrainError
from drivetrain.testing import ranks

SECONDS = 5.0  # for an error to reach every rank, on a machine that does other things as well

Error = tuple[str, str]


def error_of(action: Callable[[], Any]) -> Error:
    """Return kind and message of the error that `action` raises; it must come in time."""
    begun = time.monotonic()
    try:
        action()
    except (DrivetrainError, ValueError, TypeError, KeyboardInterrupt) as error:
        assert time.monotonic() - begun < SECONDS
        return type(error).__name__, str(error)
    return "", ""


def use_bad_values() -> dict[str, Error]:
    """Return the error of each call in which something is wrong on the last rank; all stay in step after each."""
    with Accelerator(cpu=True) as accelerator:
        is_last = accelerator.is_last_process
        either: Callable[[Any, Any], Any] = lambda one, other: other if is_last else one  # noqa: E731 (short on purpose)
        tensor, more = torch.ones(2, 3), int(is_last)
        broadcast, pad, reduce = accelerator.broadcast, accelerator.pad_across_processes, accelerator.reduce
        fill, objects = accelerator.broadcast_object_list, accelerator.gather_object
        errors = {
            "broadcast: rows": error_of(lambda: broadcast(torch.ones(2 + more, 3))),
            "broadcast: dtype": error_of(lambda: broadcast(either(tensor, tensor.int()))),
            "broadcast: key": error_of(lambda: broadcast({either("a", "b"): tensor})),
            "broadcast: from": error_of(lambda: broadcast(tensor, from_process=more)),
            "fill: length": error_of(lambda: fill([None] * (1 + more))),
            "fill: from": error_of(lambda: fill([None], from_process=more)),
            "pad: other dim": error_of(lambda: pad(torch.ones(1, 2, 3 + more), dim=1)),
            "pad: dims": error_of(lambda: pad(either(tensor, tensor[0]))),
            "pad: dim": error_of(lambda: pad(tensor, dim=more)),
            "reduce: how": error_of(lambda: reduce(tensor, either("sum", "mean"))),
            "reduce: scale": error_of(lambda: reduce(tensor, scale=either(1.0, 2.0))),
            "gather: number": error_of(lambda: accelerator.gather({"loss": either(tensor, 3.0)})),
            "gather: sparse": error_of(lambda: accelerator.gather(either(tensor, tensor.to_sparse()))),
            "gather: many": error_of(lambda: accelerator.gather([torch.ones(1, 1 + more)] * 12)),
            "objects: pickle": error_of(lambda: objects(either([1], [threading.Lock()]))),
            "objects: kind": error_of(lambda: objects(either([1], "text"))),
            "fill: pickle": error_of(lambda: fill([lambda: None], accelerator.num_processes - 1)),
            "fill: kind": error_of(lambda: fill(either([1], (1,)))),
            "broadcast: no rank": error_of(lambda: broadcast(tensor, from_process=9)),
            "pad: fill": error_of(lambda: pad(either(tensor, tensor.int()), pad_index=0.5)),
            "index": error_of(lambda: accelerator.on_process(process_index=9)),
            "no index": error_of(lambda: accelerator.on_local_process()),
            "no function": error_of(lambda: accelerator.on_main_process(3)),  # type: ignore[arg-type]
        }
        return {**errors, "afterwards": error_of(lambda: accelerator.gather([torch.ones(int(is_last))] * 12))}


@pytest.mark.parametrize("count", [2, 3])
def test_values_when_one_rank_brings_another_or_bad_one_are_refused_by_all(count: int) -> None:
    by_rank = ranks.run(use_bad_values, ranks=count, timeout=60)
    assert by_rank == [by_rank[0]] * count
    errors = by_rank[0]
    last = count - 1
    unlike = {
        "broadcast: rows": ("float32[2, 3], from_process=0", "float32[3, 3], from_process=0"),
        "broadcast: dtype": ("float32[2, 3], from_process=0", "int32[2, 3], from_process=0"),
        "broadcast: key": ("{'a': float32[2, 3]}, from_process=0", "{'b': float32[2, 3]}, from_process=0"),
        "broadcast: from": ("float32[2, 3], from_process=0", "float32[2, 3], from_process=1"),
        "fill: length": ("a list of length 1, from_process=0", "a list of length 2, from_process=0"),
        "fill: from": ("a list of length 1, from_process=0", "a list of length 1, from_process=1"),
        "pad: other dim": ("float32[*, *, 3], dim=1", "float32[*, *, 4], dim=1"),
        "pad: dims": ("float32[*, 3], dim=0", "float32[*], dim=0"),
        "pad: dim": ("float32[*, 3], dim=0", "float32[*, *], dim=1"),
        "reduce: how": ("float32[2, 3]", "float32[2, 3], reduction='mean', scale=1.0"),
        "reduce: scale": ("float32[2, 3]", "float32[2, 3], reduction='sum', scale=2.0"),
        "gather: many": (f"[{', '.join(['float32[*, 1]'] * 12)}]", f"[{', '.join(['float32[*, 2]'] * 12)}]"),
    }
    for name, (of_others, of_last) in unlike.items():
        kind, message = errors[name]
        assert kind == "RankMismatchError", name
        lines = [*([of_others] * last), of_last]
        assert "".join(f"\n  rank {rank}: {line}" for rank, line in enumerate(lines)) + "\n  hint: " in message, name
    bad = {
        "gather: number": "gather() takes tensors in nested containers, and found a float at ['loss']",
        "gather: sparse": "gather() takes dense tensors with values, and found one of kind sparse_coo",
        "objects: pickle": "gather() was given an object that cannot be sent to other ranks: TypeError: cannot pickle",
        "objects: kind": "this is a str",
        "fill: pickle": "broadcast_object_list() was given an object that cannot be sent",
        "fill: kind": "broadcast_object_list() fills a list, and this is a tuple",
        "pad: fill": "pad_index=0.5 is no value of int32",
    }
    for name, words in bad.items():
        kind, message = errors[name]
        assert kind == "DataError", name
        assert message.startswith("not every rank can take part:\n  rank 0: nothing is wrong\n"), message
        assert f"\n  rank {last}: " in message
        assert words in message.splitlines()[last + 1], message
    assert errors["broadcast: no rank"] == (
        "DataError",
        f"from_process=9 is no rank of this run\n  hint: ranks are 0 to {last}",
    )
    assert errors["index"][0] == errors["no index"][0] == "TopologyError"
    assert "process_index=9 is no rank" in errors["index"][1]
    assert "local_process_index=None is no rank" in errors["no index"][1]
    assert errors["no function"][0] == "TypeError"
    assert errors["afterwards"] == ("", "")


# Ranks that stay away


def wait_in_turn(accelerator: Accelerator) -> None:
    with accelerator.main_process_first():
        accelerator.wait_for_everyone()


CALLS: dict[str, Callable[[Accelerator], Any]] = {
    "broadcast": lambda one: one.broadcast(torch.ones(1)),
    "broadcast_object_list": lambda one: one.broadcast_object_list([1]),
    "gather_object": lambda one: one.gather_object([1]),
    "pad_across_processes": lambda one: one.pad_across_processes(torch.ones(1)),
    "check_trigger": lambda one: one.check_trigger(),
    "main_process_first": wait_in_turn,
}
PLACES = {"gather_object": "gather", "main_process_first": "wait_for_everyone"}


def call_on_rank_0() -> dict[str, Error]:
    """Make each call on rank 0, while the other rank is in another one; both stay in step after each."""
    with Accelerator(cpu=True) as accelerator:
        here: Callable[[str], Any] = lambda name: CALLS[name](accelerator)  # noqa: E731 (short on purpose)
        elsewhere: Callable[[str], Any] = lambda _: accelerator.reduce(torch.ones(1))  # noqa: E731
        call = here if accelerator.is_main_process else elsewhere
        return {name: error_of(partial(call, name)) for name in CALLS}


def test_call_when_other_ranks_make_another_then_is_an_error_on_all() -> None:
    by_rank = ranks.run(call_on_rank_0, ranks=2, timeout=30)
    assert by_rank[0] == by_rank[1]
    for name, (kind, message) in by_rank[0].items():
        assert kind == "RankMismatchError"
        assert f"rank 0: {PLACES.get(name, name)}()" in message
        assert "rank 1: reduce()" in message


def end_on_rank_1(name: str) -> Error:
    """Make a call on rank 0, while the other rank ends its run."""
    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        return error_of(lambda: CALLS[name](accelerator))
    return error_of(accelerator.end_training)


def test_call_when_the_other_rank_ends_its_run_then_is_an_error() -> None:
    (kind, message), _ = ranks.run(end_on_rank_1, "broadcast", ranks=2, timeout=30)
    assert kind == "RankMismatchError"
    assert "rank 1: the end of the run" in message


def die_on_rank_1(name: str) -> Error:
    """Make a call on rank 0, while the process of the other rank ends at once."""
    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        error = error_of(lambda: CALLS[name](accelerator))
        raise ValueError(*error)  # the others are no more: only an error brings news out of this run
    os._exit(1)


@pytest.mark.parametrize("name", ["main_process_first", "gather_object"])
def test_call_when_the_process_of_another_rank_is_gone_then_is_an_error(name: str) -> None:
    with pytest.raises(ranks.RanksFailed, match=r"TopologyError.*another rank did not come"):
        ranks.run(die_on_rank_1, name, ranks=2, timeout=30)


# Errors in a context that ranks go through in turn

TURNS = [
    (context, failing, kind)
    for context in ("main_process_first", "local_main_process_first")
    for failing in range(3)
    for kind in (ValueError, KeyboardInterrupt)
]


def fail_in_turns() -> list[Error]:
    """Return the error of each context in which one rank fails; all stay in step after each."""
    with Accelerator(cpu=True) as accelerator:

        def enter(context: str, failing: int, kind: type[BaseException]) -> None:
            with getattr(accelerator, context)():
                if accelerator.process_index == failing:
                    raise kind("no such file")

        errors = [error_of(partial(enter, *turn)) for turn in TURNS]
        assert accelerator.gather(torch.ones(1)).sum() == accelerator.num_processes
        return errors


def test_context_when_one_rank_fails_in_it_then_ends_on_all_with_the_error() -> None:
    by_rank = ranks.run(fail_in_turns, ranks=3, timeout=60)
    for rank, errors in enumerate(by_rank):
        for (context, failing, kind), error in zip(TURNS, errors, strict=True):
            named = f"{kind.__name__}: no such file"
            if rank == failing:
                assert error == (kind.__name__, "no such file")
            else:
                assert error[0] == "TopologyError"
                assert error[1].startswith(f"another rank failed in {context}()\n  rank {failing}: {named}\n  hint: ")


# Rows of metrics


def gather_wrong_rows(length: int, *, trains: bool) -> list[list[Error]]:
    """Return the errors of every batch of an evaluation, in which one of four values is given per row."""
    with Accelerator(cpu=True) as accelerator, torch.set_grad_enabled(trains):
        data: Any = torch.arange(length)
        found = []
        for batch in accelerator.prepare(DataLoader(data, batch_size=2)):
            values = [batch, {"loss": batch.float().mean()}, batch.repeat(3), torch.ones(2)]
            found.append([error_of(lambda value=value: accelerator.gather_for_metrics(value)) for value in values])  # type: ignore[misc]
        return found


@pytest.mark.parametrize("trains", [False, True])
def test_metrics_when_a_tensor_has_other_rows_than_the_batch_are_refused_by_all(trains: bool) -> None:
    # 5 rows on 2 ranks in batches of 2: 2 and 2, then 1 on rank 0 and a filler on rank 1.
    by_rank = ranks.run(gather_wrong_rows, 5, trains=trains, ranks=2, timeout=30)
    assert by_rank[0] == by_rank[1]
    full, short = by_rank[0]
    assert [kind for kind, _ in full] == ["", "DataError", "DataError", ""]
    assert "which has 2 here, and the tensor at ['loss'] has shape ()" in full[1][1]
    assert "which has 2 here, and a tensor has shape (6,)" in full[2][1]
    assert [kind for kind, _ in short] == ["", "", "DataError", "DataError"]
    assert "rank 0: gather_for_metrics() takes values per row of the batch, which has 1 here" in short[3][1]
