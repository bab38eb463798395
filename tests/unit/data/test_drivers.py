"""Which loader drives a scope: nested and zipped loops, loops broken off, evaluation in between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain.cluster.control import Control
from drivetrain.data import Drivers, LoaderContext, PreparedLoader
from drivetrain.errors import PrepareError


@pytest.fixture
def drivers() -> Drivers:
    return Drivers()


def prepared(drivers: Drivers, *, length: int = 3, batch_size: int = 1) -> PreparedLoader:
    """Return a loader of numbers in order."""
    context = LoaderContext(
        device=torch.device("cpu"),
        control=Control(rank=0, world_size=1, group=None),
        drivers=drivers,
        seed=0,
        even_batches=True,
    )
    data: Any = torch.arange(length)
    return PreparedLoader(DataLoader(data, batch_size=batch_size), context, owner=None)


def driven_by(drivers: Drivers, **passes: Any) -> str | None:
    """Return the name of the pass that drives."""
    current = drivers.current()
    return next((name for name, one in passes.items() if one is current), None)


def with_a_bar(batches: Iterable[Any]) -> Iterator[Any]:
    """Pass batches on, as progress bars do."""
    yield from batches


def test_current_when_nothing_was_read_is_none(drivers: Drivers) -> None:
    pass_ = iter(prepared(drivers))
    assert drivers.current() is None
    next(pass_)
    assert drivers.current() is pass_


def test_current_when_loops_are_nested_is_the_innermost_and_then_the_outer_one(drivers: Drivers) -> None:
    outer, seen = iter(prepared(drivers)), []
    inner_loader = prepared(drivers)
    for _ in outer:
        seen.append(driven_by(drivers, outer=outer))
        inner = iter(inner_loader)
        for _ in inner:
            seen.append(driven_by(drivers, outer=outer, inner=inner))
        seen.append(driven_by(drivers, outer=outer, inner=inner))
    assert seen == ["outer", "inner", "inner", "inner", "outer"] * 3
    assert drivers.current() is None


def test_current_when_zipped_is_the_one_advanced_first_in_every_step(drivers: Drivers) -> None:
    first, second = iter(prepared(drivers)), iter(prepared(drivers))
    seen = [driven_by(drivers, first=first, second=second) for _ in zip(second, first, strict=True)]
    assert seen == ["second"] * 3


def test_current_when_zipped_loop_is_inside_another_is_the_one_advanced_first(drivers: Drivers) -> None:
    outer = iter(prepared(drivers))
    next(outer)
    first, second = iter(prepared(drivers)), iter(prepared(drivers))
    seen = [driven_by(drivers, outer=outer, first=first, second=second) for _ in zip(first, second, strict=True)]
    assert seen == ["first"] * 3
    assert driven_by(drivers, outer=outer) == "outer"


def test_current_when_loop_is_broken_off_is_no_longer_that_loop(drivers: Drivers) -> None:
    loader = prepared(drivers)
    for _ in loader:
        break
    assert drivers.current() is None
    assert drivers.depth() == 0


def test_current_when_loop_in_a_loop_is_broken_off_is_the_outer_one(drivers: Drivers) -> None:
    outer = iter(prepared(drivers))
    inner = prepared(drivers)
    for _ in outer:
        for _ in inner:
            break
        assert drivers.current() is outer


def test_current_when_loop_ends_by_an_exception_is_no_longer_that_loop(drivers: Drivers) -> None:
    def fail(_: Any) -> None:
        assert drivers.current() is not None
        raise ValueError("in the loop")

    with pytest.raises(ValueError, match="in the loop"):
        list(map(fail, prepared(drivers)))
    assert drivers.current() is None


def test_current_when_pass_of_a_broken_loop_is_kept_is_the_loop_that_began_later(drivers: Drivers) -> None:
    kept = iter(prepared(drivers))
    next(kept)
    later = iter(prepared(drivers))
    next(later)
    assert drivers.current() is later


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_current_when_evaluation_runs_inside_training_stays_the_training_loader(
    drivers: Drivers, context: type[Any]
) -> None:
    train, evaluation = iter(prepared(drivers)), prepared(drivers)
    for _ in train:
        with context():
            for _ in evaluation:
                assert drivers.current() is train
                assert drivers.current(trains=False) is not train
        assert drivers.current() is train
        assert drivers.current(trains=False) is train


def test_current_when_only_evaluation_is_open_is_none(drivers: Drivers) -> None:
    with torch.no_grad():
        for _ in prepared(drivers):
            assert drivers.current() is None
            assert drivers.current(trains=False) is not None


def test_current_when_gradients_are_enabled_between_two_batches_follows_the_last_batch(drivers: Drivers) -> None:
    pass_ = iter(prepared(drivers))
    with torch.no_grad():
        next(pass_)
    assert drivers.current() is None
    next(pass_)
    assert drivers.current() is pass_


def test_current_when_batches_come_through_a_generator_is_the_loader_behind_it(drivers: Drivers) -> None:
    outer_loader, inner_loader = prepared(drivers), prepared(drivers)
    depths = []
    for number, _ in enumerate(with_a_bar(outer_loader)):
        outer = drivers.current()
        assert outer is not None
        for _ in with_a_bar(with_a_bar(inner_loader)):
            assert drivers.current() is not outer
            if number == 1:
                break
        depths.append(drivers.depth())
        assert drivers.current() is outer
    assert depths == [1, 1, 1]
    assert drivers.current() is None


def test_current_when_loader_is_exhausted_or_follows_another_is_only_what_is_open(drivers: Drivers) -> None:
    first, second = iter(prepared(drivers)), iter(prepared(drivers))
    for _ in first:
        assert drivers.current() is first
    assert drivers.current() is None
    assert next(first, None) is None
    for _ in second:
        assert drivers.current() is second
        assert drivers.depth() == 1
    assert drivers.current() is None


def test_current_when_only_the_loop_of_another_accelerator_is_open_is_refused(drivers: Drivers) -> None:
    others = Drivers()
    for _ in prepared(others):
        with pytest.raises(PrepareError, match="from a loader that another Accelerator has prepared"):
            drivers.current()
        assert others.current() is not None
    assert drivers.current() is None


def test_current_when_own_loop_runs_beside_that_of_another_accelerator_is_the_own_one(drivers: Drivers) -> None:
    own, other = iter(prepared(drivers)), iter(prepared(Drivers()))
    assert [drivers.current() is own for _ in zip(other, own, strict=True)] == [True] * 3


def test_current_when_another_accelerator_evaluates_is_none(drivers: Drivers) -> None:
    with torch.no_grad():
        for _ in prepared(Drivers()):
            assert drivers.current() is None


def test_current_when_made_inside_the_loop_of_another_accelerator_is_none() -> None:
    for _ in prepared(Drivers()):
        assert Drivers().current() is None


def test_current_when_loop_of_another_accelerator_was_broken_off_is_none(drivers: Drivers) -> None:
    for _ in prepared(Drivers()):
        break
    assert drivers.current() is None


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("window", range(1, 4))
def test_facts_of_each_batch_tell_its_rows_those_ahead_and_whether_it_is_last(
    drivers: Drivers, length: int, window: int
) -> None:
    pass_: Any = iter(prepared(drivers, length=length, batch_size=2))
    batches, facts = zip(*((len(batch), pass_.facts(window_size=window)) for batch in pass_), strict=True)
    assert [fact.rows for fact in facts] == list(batches)
    assert [fact.rows_ahead for fact in facts] == [sum(batches[at : at + window]) for at in range(len(batches))]
    assert [fact.is_last for fact in facts] == [False] * (len(batches) - 1) + [True]
    assert not pass_.is_filler
