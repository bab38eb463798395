"""Calls over ranks on one process: what they say yes and no to, and which loop is that of an evaluation."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.errors import DataError, PrepareError
from scalar import Scalar, loader


@pytest.mark.parametrize("index", [0, 5])
def test_function_for_a_rank_when_there_is_one_rank_then_it_runs(index: int) -> None:
    accelerator = Accelerator(cpu=True)

    @accelerator.on_process(process_index=index)
    def of_process(value: int) -> int:
        return value + 1

    @accelerator.on_local_process(local_process_index=index)
    def of_local_process(value: int) -> int:
        return value + 2

    assert (of_process(1), of_local_process(1)) == (2, 3)


def test_values_when_there_is_one_rank_then_come_back() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.gather_object(("a", 1)) == ["a", 1]
    assert accelerator.broadcast([torch.ones(2)])[0].tolist() == [1.0, 1.0]
    assert accelerator.pad_across_processes({"x": torch.ones(2), "name": "a"}, dim=1)["name"] == "a"
    for context in (accelerator.main_process_first, accelerator.local_main_process_first):
        with pytest.raises(KeyError), context():
            raise KeyError


def test_join_when_loaders_are_even_then_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Scalar())
    capsys.readouterr()
    with accelerator.join_uneven_inputs([model], even_batches=True):
        assert capsys.readouterr().err == ""
    with accelerator.join_uneven_inputs([model], even_batches=False):
        assert "join_uneven_inputs(even_batches=False) has no effect" in capsys.readouterr().err


def test_join_when_it_could_not_keep_its_promise_then_is_refused() -> None:
    joined: Callable[..., AbstractContextManager[None]] = Accelerator(cpu=True).join_uneven_inputs
    with (
        pytest.raises(PrepareError, match=r"item 2 given to join_uneven_inputs.. is a int"),
        joined([nn.Linear(1, 1), 3]),
    ):
        pass
    uneven = Accelerator(cpu=True, even_batches=False)
    with pytest.raises(DataError, match="`even_batches` is off"), uneven.join_uneven_inputs([nn.Linear(1, 1)]):
        pass


# 3 rows in batches of 2: a batch of 2 rows and one of 1.


def test_metrics_when_the_loop_trains_then_any_rows_are_taken() -> None:
    accelerator = Accelerator(cpu=True)
    model, batches = accelerator.prepare(Scalar(), loader([0.0, 1.0, 2.0], batch_size=2))
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
        assert accelerator.gather_for_metrics(torch.arange(4)).tolist() == [0, 1, 2, 3]


def test_metrics_when_the_loop_does_not_train_then_have_the_rows_of_the_batch() -> None:
    accelerator = Accelerator(cpu=True)
    for batch in accelerator.prepare(loader([0.0, 1.0, 2.0], batch_size=2)):
        assert accelerator.gather_for_metrics({"x": [batch]})["x"][0].tolist() == batch.tolist()
        assert accelerator.gather_for_metrics(["name"]) == ["name"]
        assert accelerator.gather(torch.arange(4)).tolist() == [0, 1, 2, 3]
        with pytest.raises(DataError, match=rf"has {len(batch)} here, and the tensor at \['x'\]\[0\] has shape \(4,\)"):
            accelerator.gather_for_metrics({"x": [torch.arange(4)]})


def test_metrics_when_an_evaluation_is_inside_the_loop_then_only_its_own_rows_are_looked_at() -> None:
    accelerator = Accelerator(cpu=True)
    training, evaluation = accelerator.prepare(
        loader([0.0, 1.0, 2.0], batch_size=2), loader([0.0, 1.0, 2.0, 3.0, 4.0], batch_size=5)
    )
    for _ in training:
        for batch in evaluation:
            assert accelerator.gather_for_metrics(batch).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
            with pytest.raises(DataError):
                accelerator.gather_for_metrics(batch[:2])
        assert accelerator.gather_for_metrics(torch.arange(7)).tolist() == list(range(7))


def test_loop_when_it_is_over_then_nothing_keeps_it() -> None:
    accelerator = Accelerator(cpu=True)
    model, batches = accelerator.prepare(Scalar(), loader([0.0, 1.0], batch_size=1))
    one: Any = iter(batches)
    with accelerator.accumulate(model):
        accelerator.backward(model(next(one)).mean())
    gone = weakref.ref(one)
    del one
    assert gone() is None
