"""The loss rule against a brute-force reference: sums of exact fractions over all scopes and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.errors import TrainingStepError
from drivetrain.window import Batch, Form, Tally, Window, reference_for, total


@dataclass(frozen=True)
class Scope:
    """One rank's part of a scope: the items, and per backward the gradients of the single items."""

    rows: int
    losses: tuple[tuple[int, ...], ...]


def brute_force(scopes_by_rank: list[list[Scope]]) -> Fraction | None:
    """Return the gradient of the update: every item's gradient added up, over the number of items."""
    items = sum(scope.rows for scopes in scopes_by_rank for scope in scopes)
    gradient = sum(sum(loss) for scopes in scopes_by_rank for scope in scopes for loss in scope.losses)
    return Fraction(gradient, items) if items else None


def run_window(
    scopes_by_rank: list[list[Scope]], *, form: Form, divisor: int, size: int, planned: bool, reference: float = 1.0
) -> tuple[float | None, float]:
    """Return the update's gradient by the rule, and the factor that was left to multiply."""
    ranks = len(scopes_by_rank)
    rows_ahead = sum(scope.rows for scopes in scopes_by_rank for scope in scopes) if planned else None
    gradient = 0.0
    tallies: list[Tally] = []
    window = None
    for scopes in scopes_by_rank:
        window = Window(size=size, ranks=ranks, divisor=divisor, rows_ahead=rows_ahead, reference=reference)
        for scope in scopes:
            window.enter(Batch(rows=scope.rows, rows_ahead=rows_ahead))
            for loss in scope.losses:
                by = window.weigh(scope.rows if form is Form.SUM else None)
                if by is None:
                    continue
                value = float(sum(loss)) if form is Form.SUM else sum(loss) / scope.rows
                gradient += value / by / divisor
        tallies.append(window.tally())
    assert window is not None
    items = total(tallies).items
    if items == 0:
        return None, 1.0
    factor = window.factor(items)
    return gradient * factor, factor


def scope_of(rows: int) -> st.SearchStrategy[Scope]:
    loss = st.tuples(*[st.integers(-50, 50)] * rows)
    return st.lists(loss, min_size=1, max_size=3).map(lambda losses: Scope(rows=rows, losses=tuple(losses)))


@st.composite
def windows(draw: st.DrawFn) -> list[list[Scope]]:
    ranks = draw(st.integers(1, 4))
    scopes = draw(st.integers(1, 5))
    return [[draw(scope_of(draw(st.integers(0, 6)))) for _ in range(scopes)] for _ in range(ranks)]


@settings(max_examples=300, deadline=None)
@given(
    scopes_by_rank=windows(),
    form=st.sampled_from(Form),
    averaged=st.booleans(),
    planned=st.booleans(),
    exponent=st.integers(0, 12),
    extra=st.integers(0, 3),
)
def test_rule_over_any_split_equals_brute_force(
    scopes_by_rank: list[list[Scope]], form: Form, averaged: bool, planned: bool, exponent: int, extra: int
) -> None:
    expected = brute_force(scopes_by_rank)
    got, _ = run_window(
        scopes_by_rank,
        form=form,
        divisor=len(scopes_by_rank) if averaged else 1,
        size=len(scopes_by_rank[0]) + extra,
        planned=planned,
        reference=2.0**exponent,
    )
    if expected is None:
        assert got is None
    else:
        assert got == pytest.approx(float(expected), rel=1e-12, abs=1e-12)


@given(rows=st.integers(1, 9), ranks=st.integers(1, 8), size=st.integers(1, 9), averaged=st.booleans())
def test_equal_planned_rows_when_averaged_divide_by_the_window_alone(
    rows: int, ranks: int, size: int, averaged: bool
) -> None:
    divisor = ranks if averaged else 1
    window = Window(size=size, ranks=ranks, divisor=divisor, rows_ahead=rows * ranks * size)
    for _ in range(size):
        window.enter(Batch(rows=rows))
        assert window.weigh(None) == size * ranks / divisor
    assert window.factor(rows * ranks * size) == 1.0


def test_scopes_without_a_loader_count_one_each() -> None:
    window = Window(size=4, ranks=2, divisor=2)
    for _ in range(4):
        window.enter(None)
        assert window.weigh(None) == 4.0
    assert window.factor(2 * window.tally().items) == 1.0


def test_window_when_broken_off_is_divided_by_what_it_holds() -> None:
    window = Window(size=4, ranks=1, divisor=1, rows_ahead=8)
    gradients = [3.0, 5.0]
    accumulated = 0.0
    for gradient in gradients:
        window.enter(Batch(rows=2))
        by = window.weigh(None)
        assert by is not None
        accumulated += gradient / by
    assert accumulated * window.factor(window.tally().items) == pytest.approx(sum(gradients) / 2)


def test_window_ends_at_its_size_or_at_the_last_batch() -> None:
    window = Window(size=3, ranks=1, divisor=1)
    window.enter(Batch(rows=2))
    assert not window.is_complete
    window.enter(Batch(rows=2, is_last=True))
    assert window.is_complete
    counted = Window(size=2, ranks=1, divisor=1)
    counted.enter(None)
    assert not counted.is_complete
    counted.enter(None)
    assert counted.is_complete


def test_one_sum_on_one_rank_needs_no_factor() -> None:
    window = Window(size=1, ranks=1, divisor=1)
    window.enter(None)
    assert window.weigh(7) == 7.0
    assert window.factor(7) == 1.0


def test_filler_whatever_its_count_weighs_nothing() -> None:
    window = Window(size=2, ranks=2, divisor=2, rows_ahead=3)
    window.enter(Batch(rows=0))
    assert window.weigh(100) is None
    assert window.tally().items == 0


def test_both_forms_in_one_window_raise() -> None:
    window = Window(size=2, ranks=1, divisor=1)
    window.enter(Batch(rows=2))
    window.weigh(None)
    window.enter(Batch(rows=2))
    with pytest.raises(TrainingStepError, match="given a sum in a window whose losses are means"):
        window.weigh(4)


def test_another_count_in_one_scope_raises() -> None:
    window = Window(size=1, ranks=2, divisor=2)
    window.enter(Batch(rows=2))
    window.weigh(4)
    window.weigh(4)
    with pytest.raises(TrainingStepError, match="num_items=5 after num_items=4"):
        window.weigh(5)


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf"), True])
def test_count_that_is_none_raises(count: float) -> None:
    window = Window(size=1, ranks=1, divisor=1)
    window.enter(None)
    with pytest.raises(TrainingStepError, match="is not a count"):
        window.weigh(count)


@pytest.mark.parametrize(
    ("items", "expected"), [(0, 1.0), (0.2, 1.0), (1, 1.0), (3, 4.0), (4096, 4096.0), (5000, 4096.0)]
)
def test_reference_is_the_nearest_power_of_two(items: float, expected: float) -> None:
    assert reference_for(items) == expected


def test_rank_tallies_add_up() -> None:
    both = total([Tally(items=3, means=1, sums=0), Tally(items=4, means=0, sums=1)])
    assert both == Tally(items=7, means=1, sums=1)
