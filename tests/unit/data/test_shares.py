"""Who reads which rows, over all sizes: every statement of the module's docstring as a property."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from drivetrain.data.shares import Shares, shuffled

SHARES = st.builds(
    Shares,
    length=st.integers(0, 60),
    batch_size=st.integers(1, 7),
    num_ranks=st.integers(1, 5),
    drop_last=st.booleans(),
)


def rows_by_step(shares: Shares) -> list[list[range]]:
    """Return the rows of an epoch, `[step][rank]`."""
    return [[shares.rows_of(step, rank=rank) for rank in range(shares.num_ranks)] for step in range(shares.num_steps)]


def read_in_order(shares: Shares) -> list[int]:
    """Return all rows of an epoch, rank after rank within each micro-step."""
    return [row for step in rows_by_step(shares) for rows in step for row in rows]


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@given(SHARES)
def test_rows_when_short_step_is_kept_or_dropped_are_each_read_once_in_order(shares: Shares) -> None:
    length = shares.length
    if shares.drop_last:
        length -= length % (shares.batch_size * shares.num_ranks)
    assert read_in_order(shares) == list(range(length))


@given(SHARES)
def test_shares_of_full_steps_have_the_batch_size(shares: Shares) -> None:
    for step in rows_by_step(shares)[: shares.length // shares.rows_per_step]:
        assert [len(rows) for rows in step] == [shares.batch_size] * shares.num_ranks


@given(SHARES)
@example(Shares(length=11, batch_size=4, num_ranks=3, drop_last=False))
def test_shares_of_the_last_step_differ_by_at_most_one_row_and_none_is_too_large(shares: Shares) -> None:
    for last in rows_by_step(shares)[-1:]:
        sizes = [len(rows) for rows in last]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= shares.batch_size
        assert sizes == sorted(sizes, reverse=True)


@given(
    length=st.integers(1, 80),
    global_batch=st.sampled_from([1, 2, 6, 12, 16]),
    data=st.data(),
)
def test_rows_of_each_update_are_the_same_however_a_global_batch_is_split(
    length: int, global_batch: int, data: st.DataObject
) -> None:
    num_ranks = data.draw(st.sampled_from(divisors(global_batch)), label="ranks")
    batch_size = data.draw(st.sampled_from(divisors(global_batch // num_ranks)), label="batch size")
    window = global_batch // num_ranks // batch_size
    shares = Shares(length=length, batch_size=batch_size, num_ranks=num_ranks, drop_last=False)
    steps = rows_by_step(shares)
    updates = [
        [row for step in steps[first : first + window] for rows in step for row in rows]
        for first in range(0, len(steps), window)
    ]
    expected = [list(range(start, min(start + global_batch, length))) for start in range(0, length, global_batch)]
    assert updates == expected


@given(SHARES, st.integers(1, 6), st.data())
def test_rows_ahead_are_those_that_all_ranks_read_in_the_window(
    shares: Shares, window: int, data: st.DataObject
) -> None:
    steps = rows_by_step(shares)
    if not steps:
        return
    step = data.draw(st.integers(0, len(steps) - 1), label="step")
    expected = sum(len(rows) for later in steps[step : step + window] for rows in later)
    assert shares.rows_ahead(step, steps=window) == expected


@given(length=st.integers(0, 200), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000))
def test_shuffled_is_a_permutation_that_depends_on_its_arguments_alone(length: int, seed: int, epoch: int) -> None:
    order = shuffled(length, seed=seed, epoch=epoch)
    assert sorted(order) == list(range(length))
    assert shuffled(length, seed=seed, epoch=epoch) == order


def test_shuffled_when_epoch_or_seed_changes_gives_another_order() -> None:
    orders = [shuffled(50, seed=seed, epoch=epoch) for seed in (0, 1, 2**32) for epoch in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_shuffled_when_many_epochs_are_drawn_puts_every_row_everywhere() -> None:
    # 4 rows have 24 orders; of 600 epochs each is expected 25 times, with a standard deviation of 4.9.
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(600):
        order = tuple(shuffled(4, seed=3, epoch=epoch))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert all(25 - 5 * 4.9 < count < 25 + 5 * 4.9 for count in counts.values())
