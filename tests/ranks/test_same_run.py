"""One training is the same on any topology: a small Llama on real text against a loop written by hand.

Two epochs of 155 rows at 16 rows per update: 20 updates, and the last one of each epoch holds 11 rows, which leaves
ranks with unequal shares or with none.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import by_hand
from by_hand import train_by_hand
from drivetrain import Accelerator
from drivetrain.data.shares import shuffled
from drivetrain.testing import ranks
from small_llama import Recipe, Text, Trace, build_model, make_schedule, summed_loss
from topologies import topologies

SEED = 7
NUM_EPOCHS = 2
NUM_ROWS = 155
GLOBAL_BATCH = 16
NUM_UPDATES = 20
TOLERANCE = 1e-5  # relative; another order of float32 sums moves a result by a few 1e-7 per update

RECIPES = [
    Recipe(optimizer=optimizer, scores=scores, max_norm=max_norm)
    for optimizer, max_norm in (("adamw", 1e9), ("sgd", 0.3))
    for scores in ("means", "sums")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A topology, and how many rows a rank takes at once; the window follows from the global batch."""

    ranks: int
    batch_size: int
    distributed_type: str | None = None

    def __str__(self) -> str:
        window = GLOBAL_BATCH // (self.ranks * self.batch_size)
        return f"{self.distributed_type or 'one'}-{self.ranks}x{self.batch_size}x{window}"


WHOLE_BATCHES = Layout(ranks=1, batch_size=16)
LAYOUTS = [
    WHOLE_BATCHES,
    Layout(ranks=1, batch_size=4),
    *(Layout(ranks=2, batch_size=8, distributed_type=topology.distributed_type) for topology in topologies(2)),
    *(Layout(ranks=4, batch_size=2, distributed_type=topology.distributed_type) for topology in topologies(4)),
]

pytestmark = pytest.mark.deadline(90)
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=str)


def train(recipe: Recipe, layout: Layout) -> Trace:
    """Train as a user's script does, and note what each update took and gave."""
    with Accelerator(
        global_batch_size=GLOBAL_BATCH, seed=SEED, cpu=True, distributed_type=layout.distributed_type
    ) as accelerator:
        model = build_model()
        optimizer = recipe.make_optimizer(model)
        schedule = make_schedule(optimizer)
        text = Text(NUM_ROWS, is_padded=recipe.scores == "sums")
        loader = DataLoader(text, batch_size=layout.batch_size, shuffle=True)
        model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
        trace = Trace()
        rows: list[int] = []
        for _ in range(NUM_EPOCHS):
            for batch in loader:
                rows += accelerator.gather_for_metrics(batch.pop("row")).tolist()
                with accelerator.accumulate(model):
                    if recipe.scores == "means":
                        accelerator.backward(model(**batch).loss)
                    else:
                        loss_sum, count = summed_loss(model, batch)
                        accelerator.backward(loss_sum, num_items=count)
                    accelerator.clip_grad_norm_(model.parameters(), recipe.max_norm)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    note(trace, accelerator.last_update, rows)
                    rows = []
        assert rows == []
        trace.weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
        return trace


def note(trace: Trace, update: Any, rows: list[int]) -> None:
    trace.rows.append(rows)
    trace.losses.append(update.loss.item())
    trace.norms.append(update.grad_norm.item())
    trace.rates.append(update.lr)


def train_all(recipes: Sequence[Recipe], layouts: Sequence[Layout]) -> dict[tuple[Recipe, Layout], Trace]:
    return {(recipe, layout): train(recipe, layout) for recipe in recipes for layout in layouts}


def train_all_by_hand(recipes: Sequence[Recipe], orders: Sequence[Sequence[int]]) -> dict[Recipe, Trace]:
    return {recipe: train_by_hand(recipe, orders=orders, global_batch=GLOBAL_BATCH) for recipe in recipes}


# Importing transformers takes longer than training: each number of ranks is started once, for all tests.


@cache
def traces_on(num_ranks: int) -> list[dict[tuple[Recipe, Layout], Trace]]:
    """Return all trainings on so many ranks, by rank."""
    layouts = [layout for layout in LAYOUTS if layout.ranks == num_ranks]
    return ranks.run(train_all, RECIPES, layouts, ranks=num_ranks, timeout=80)


@cache
def traces_by_hand() -> dict[Recipe, Trace]:
    result: dict[Recipe, Trace] = ranks.run(train_all_by_hand, RECIPES, expected_orders(), ranks=1, timeout=80)[0]
    return result


def expected_orders() -> list[list[int]]:
    return [shuffled(NUM_ROWS, seed=SEED, epoch=epoch) for epoch in range(NUM_EPOCHS)]


def traces(recipe: Recipe, layout: Layout) -> list[Trace]:
    """Return one training, by rank."""
    return [by_case[recipe, layout] for by_case in traces_on(layout.ranks)]


def relative_difference(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).norm() / expected.norm())


def test_loop_by_hand_when_its_imports_are_read_then_nothing_is_ours() -> None:
    tree = ast.parse(Path(by_hand.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert "torch" in imported
    assert not [name for name in imported if name is None or name.startswith("drivetrain")]


@every_recipe
def test_loop_by_hand_when_run_then_it_exercises_what_the_comparison_is_for(recipe: Recipe) -> None:
    trace = traces_by_hand()[recipe]
    assert [len(rows) for rows in trace.rows] == ([GLOBAL_BATCH] * 9 + [NUM_ROWS - 9 * GLOBAL_BATCH]) * NUM_EPOCHS
    assert trace.losses[-1] < trace.losses[0]
    assert len(set(trace.rates)) > NUM_UPDATES // 2
    if recipe.max_norm < 1:
        assert min(trace.norms) > recipe.max_norm


def test_scored_bytes_when_only_first_lines_count_then_rows_have_unequal_numbers_or_none() -> None:
    text = Text(NUM_ROWS, is_padded=True)
    counts = [int((text[row]["labels"][1:] >= 0).sum()) for row in range(NUM_ROWS)]
    assert len(set(counts)) > 10
    pairs = [sum(counts[row] for row in order[i : i + 2]) for order in expected_orders() for i in range(0, NUM_ROWS, 2)]
    assert 0 in pairs  # a whole micro-batch of two rows without an item


@every_recipe
@every_layout
def test_samples_when_the_topology_differs_then_each_update_takes_the_same(layout: Layout, recipe: Recipe) -> None:
    expected = [
        order[start : start + GLOBAL_BATCH] for order in expected_orders() for start in range(0, NUM_ROWS, GLOBAL_BATCH)
    ]
    assert len(expected) == NUM_UPDATES
    assert traces_by_hand()[recipe].rows == expected
    for trace in traces(recipe, layout):
        assert trace.rows == expected


@every_recipe
@every_layout
def test_numbers_when_the_topology_differs_then_each_update_has_the_same(layout: Layout, recipe: Recipe) -> None:
    expected = traces_by_hand()[recipe]
    for trace in traces(recipe, layout):
        assert trace.losses == pytest.approx(expected.losses, rel=TOLERANCE, abs=0)
        assert trace.norms == pytest.approx(expected.norms, rel=TOLERANCE, abs=0)
        assert trace.rates == expected.rates


@every_recipe
@every_layout
def test_weights_when_the_topology_differs_then_the_last_ones_are_the_same(layout: Layout, recipe: Recipe) -> None:
    expected = traces_by_hand()[recipe].weights
    for trace in traces(recipe, layout):
        assert trace.weights.keys() == expected.keys()
        if recipe.optimizer == "sgd":
            by_name = {name: relative_difference(trace.weights[name], expected[name]) for name in expected}
            assert max(by_name.values()) <= TOLERANCE, by_name
        # AdamW divides by the gradient's size: where that is nearly zero, rounding moves a weight as far as a signal
        # would, so single tensors are not held to the tolerance.
        whole = torch.cat([trace.weights[name].flatten() for name in expected])
        assert relative_difference(whole, torch.cat([value.flatten() for value in expected.values()])) <= TOLERANCE


@every_layout
@every_recipe
def test_numbers_when_ranks_are_compared_then_they_are_equal_to_the_last_bit(layout: Layout, recipe: Recipe) -> None:
    first, *others = traces(recipe, layout)
    for other in others:
        assert (other.losses, other.norms, other.rates) == (first.losses, first.norms, first.rates)
        assert all(torch.equal(other.weights[name], value) for name, value in first.weights.items())


@every_recipe
def test_whole_batches_when_run_on_one_process_then_equal_the_loop_by_hand_to_the_last_bit(recipe: Recipe) -> None:
    expected = traces_by_hand()[recipe]
    (trace,) = traces(recipe, WHOLE_BATCHES)
    assert (trace.losses, trace.norms) == (expected.losses, expected.norms)
    assert all(torch.equal(trace.weights[name], value) for name, value in expected.weights.items())
