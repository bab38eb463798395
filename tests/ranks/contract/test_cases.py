"""CASES 1, 2, 3, 23 and 25 with their exact values, on every topology."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain.testing import ranks
from scalar import Scalar, loader, train_on_counts, weight_of, whole
from topologies import Topology, every_topology, topologies

ONE_RANK = [[[10.0], [0.0, 0.0, 0.0, 0.0]]]
TWO_RANKS = [[[10.0], [0.0, 0.0]], [[5.0, 5.0, 5.0], [0.0, 0.0, 0.0, 0.0]]]
TOKENS = [10.0, 0.0, 0.0, 5.0, 5.0, 5.0, 0.0, 0.0, 0.0, 0.0]


# Case 1: token-weighted accumulation


@pytest.mark.parametrize("topology", topologies(1), ids=str)
def test_tokens_in_two_micro_batches_weigh_alike(topology: Topology) -> None:
    assert ranks.run(train_on_counts, topology.settings, ONE_RANK, ranks=1) == [(-2.0, 0.0, 5.0)]


@pytest.mark.parametrize("topology", topologies(2), ids=str)
def test_tokens_on_two_ranks_weigh_alike(topology: Topology) -> None:
    assert ranks.run(train_on_counts, topology.settings, TWO_RANKS, ranks=2) == [(-2.5, 0.0, 10.0)] * 2


@pytest.mark.parametrize("topology", topologies(1, 2), ids=str)
def test_logged_loss_is_that_of_all_tokens(topology: Topology) -> None:
    batches, loss = (ONE_RANK, 2.0) if topology.ranks == 1 else (TWO_RANKS, 2.5)
    results = ranks.run(train_on_counts, topology.settings, batches, start=1.0, lr=0.0, ranks=topology.ranks)
    assert [result[1] for result in results] == [loss] * topology.ranks


@every_topology
@pytest.mark.parametrize("num_steps", [1, 4])
def test_tokens_however_split_give_one_weight(topology: Topology, num_steps: int) -> None:
    split = [
        [TOKENS[part :: topology.ranks * num_steps] for part in range(rank * num_steps, (rank + 1) * num_steps)]
        for rank in range(topology.ranks)
    ]
    for weight, _, items in ranks.run(train_on_counts, topology.settings, split, ranks=topology.ranks):
        assert weight == pytest.approx(-sum(TOKENS) / len(TOKENS), abs=1e-6)
        assert items == len(TOKENS)


# Case 2: a short last window


def weights_over_an_epoch(settings: dict[str, Any], *, rows: int, batch_size: int, window: int) -> list[float]:
    with Accelerator(gradient_accumulation_steps=window, **settings) as accelerator:
        model = Scalar()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer, batches = accelerator.prepare(model, optimizer, loader([1.0] * rows, batch_size=batch_size))
        weights = []
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                weights.append(weight_of(accelerator, model))
        return weights


@every_topology
def test_window_that_the_epoch_cuts_short_is_divided_by_what_it_holds(topology: Topology) -> None:
    # Per rank five batches of one row each: two full windows and a short one.
    results = ranks.run(
        weights_over_an_epoch, topology.settings, rows=5 * topology.ranks, batch_size=1, window=2, ranks=topology.ranks
    )
    for weights in results:
        assert weights == pytest.approx([-1.0, -2.0, -3.0], abs=1e-6)


# Case 3: one schedule step per optimizer step


def rates(settings: dict[str, Any], *, window: int, updates: int) -> list[float]:
    with Accelerator(gradient_accumulation_steps=window, **settings) as accelerator:
        model = Scalar()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 - k / 10)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        rates = []
        for _ in range(updates * window):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1)).mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                rates.append(scheduler.get_last_lr()[0])
        return rates


@every_topology
@pytest.mark.parametrize("window", [1, 4])
def test_schedule_advances_once_per_update(topology: Topology, window: int) -> None:
    for got in ranks.run(rates, topology.settings, window=window, updates=10, ranks=topology.ranks):
        assert got[2] == pytest.approx(0.7)
        assert got == pytest.approx([1 - k / 10 for k in range(1, 11)], abs=1e-12)


# Case 23: unequal batch counts


def train_on_own_rows(settings: dict[str, Any], rows_by_rank: list[int], *, is_prepared: bool) -> None:
    with Accelerator(**settings) as accelerator:
        model = Scalar()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        batches: Any = loader([1.0] * rows_by_rank[accelerator.process_index], batch_size=1)
        if is_prepared:
            batches = accelerator.prepare(batches)
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("topology", topologies(2), ids=str)
def test_loaders_of_unlike_length_are_refused_by_name(topology: Topology) -> None:
    with pytest.raises(ranks.RanksFailed) as failed:
        ranks.run(train_on_own_rows, topology.settings, [3, 5], is_prepared=True, ranks=2, timeout=10)
    for rank in (0, 1):
        kind, message = failed.value.exceptions[rank]
        assert kind == "DataError"
        assert "rank 0: 3 rows in batches of 1" in message
        assert "rank 1: 5 rows in batches of 1" in message


@pytest.mark.parametrize("topology", topologies(2), ids=str)
@pytest.mark.parametrize(("short", "long"), [(0, 2), (1, 3), (2, 3), (3, 5)])
def test_loops_of_unlike_length_end_with_an_error_that_says_who_is_where(
    topology: Topology, short: int, long: int
) -> None:
    with pytest.raises(ranks.RanksFailed) as failed:
        ranks.run(train_on_own_rows, topology.settings, [short, long], is_prepared=False, ranks=2, timeout=10)
    kind, message = failed.value.exceptions[1]
    assert kind == "RankMismatchError"
    assert f"rank 0: the end of the run after update {short}" in message
    assert f"rank 1: update {short + 1}" in message or re.search(
        rf"rank 1: a (forward|pass through a sharded model) after update {short}", message
    )


def gathered_over_own_rows(settings: dict[str, Any], rows_by_rank: list[int]) -> None:
    with Accelerator(**settings) as accelerator:
        for _ in range(rows_by_rank[accelerator.process_index]):
            accelerator.gather(torch.ones(1))


@pytest.mark.parametrize("topology", topologies(2), ids=str)
def test_gathers_of_unlike_number_end_with_an_error_that_says_who_is_where(topology: Topology) -> None:
    with pytest.raises(ranks.RanksFailed) as failed:
        ranks.run(gathered_over_own_rows, topology.settings, [3, 5], ranks=2, timeout=10)
    kind, message = failed.value.exceptions[1]
    assert kind == "RankMismatchError"
    assert "rank 0: the end of the run" in message
    assert "rank 1: gather()" in message


# Case 25: what one update is the gradient of


def train_with_two_losses(settings: dict[str, Any], *, window: int, pattern: str) -> list[float]:
    """Return the weight after each of three updates; a scope has losses whose gradients are 2 and 3, over all ranks."""
    with Accelerator(gradient_accumulation_steps=window, **settings) as accelerator:
        model = Scalar()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = accelerator.prepare(model, optimizer)
        weights = []
        # Unlike on each rank, and 1 on average.
        item = torch.tensor([2 * (accelerator.process_index + 1) / (accelerator.num_processes + 1)])
        for _ in range(3 * window):
            with accelerator.accumulate(model):
                first = model(item)
                second = first if pattern == "one forward" else None
                if pattern == "two forwards first":
                    second = model(item)
                accelerator.backward(2 * first.mean(), retain_graph=pattern == "one forward")
                if second is None:
                    second = model(item)
                accelerator.backward(3 * second.mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                weights.append(weight_of(accelerator, model))
        return weights


@every_topology
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("pattern", ["one forward", "two forwards first", "forward and backward in turn"])
def test_losses_of_one_scope_add_up(topology: Topology, window: int, pattern: str) -> None:
    results = ranks.run(train_with_two_losses, topology.settings, window=window, pattern=pattern, ranks=topology.ranks)
    assert results == [[-5.0, -10.0, -15.0]] * topology.ranks


@pytest.mark.parametrize("topology", topologies(2), ids=str)
def test_mean_of_unequal_shares_is_that_of_all_rows(topology: Topology) -> None:
    # Three rows and two: (1 + 2 + 3 + 4 + 5) / 5.
    results = ranks.run(train_on_rows, topology.settings, [1.0, 2.0, 3.0, 4.0, 5.0], batch_size=3, ranks=2)
    for weight in results:
        assert weight == pytest.approx(-3.0, abs=1e-6)


def train_on_rows(settings: dict[str, Any], rows: list[float], *, batch_size: int) -> float:
    with Accelerator(**settings) as accelerator:
        model = Scalar()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer, batches = accelerator.prepare(model, optimizer, loader(rows, batch_size=batch_size))
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
        return weight_of(accelerator, model)


def train_generator_and_critic(settings: dict[str, Any], *, uses_accumulate: bool) -> tuple[float, float, int]:
    """Two models in one loop; the generator's scopes have gradients 1, 2, 3, 4 times rank + 1, the critic's tenfold."""
    window = 2 if uses_accumulate else 1
    with Accelerator(gradient_accumulation_steps=window, **settings) as accelerator:
        generator, critic = Scalar(), Scalar()
        generator_optimizer = torch.optim.SGD(generator.parameters(), lr=1.0)
        critic_optimizer = torch.optim.SGD(critic.parameters(), lr=1.0)
        generator, critic, generator_optimizer, critic_optimizer = accelerator.prepare(
            generator, critic, generator_optimizer, critic_optimizer
        )
        for number in (1.0, 2.0, 3.0, 4.0):
            items = torch.tensor([number * (accelerator.process_index + 1)])
            for model, optimizer, factor in ((critic, critic_optimizer, 10), (generator, generator_optimizer, 1)):
                with accelerator.accumulate(model) if uses_accumulate else nullcontext():
                    optimizer.zero_grad()
                    accelerator.backward(factor * model(items).mean())
                    optimizer.step()
        return weight_of(accelerator, generator), weight_of(accelerator, critic), accelerator.step


@every_topology
@pytest.mark.parametrize("uses_accumulate", [True, False])
def test_two_models_get_the_mean_over_their_own_scopes(topology: Topology, uses_accumulate: bool) -> None:
    over_ranks = sum(range(1, topology.ranks + 1)) / topology.ranks
    generator = -over_ranks * (1.5 + 3.5 if uses_accumulate else 1 + 2 + 3 + 4)
    results = ranks.run(
        train_generator_and_critic, topology.settings, uses_accumulate=uses_accumulate, ranks=topology.ranks
    )
    for result in results:
        assert result == (pytest.approx(generator), pytest.approx(10 * generator), 4 if uses_accumulate else 8)


def gradient_after_value_clipping(settings: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return gradient after clipping and weights after the step; gradients of the window are (0.2, 2, -4)."""
    with Accelerator(gradient_accumulation_steps=2, **settings) as accelerator:
        model = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = accelerator.prepare(model, optimizer)
        clipped = None
        for items in ([0.0, 1.0, -3.0], [0.4, 3.0, -5.0]):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.tensor([items])).sum(), num_items=1)
                accelerator.clip_grad_value_(model.parameters(), 0.5)
                if accelerator.sync_gradients:
                    clipped = whole(next(accelerator.unwrap_model(model).parameters()).grad).flatten().tolist()
                optimizer.step()
                optimizer.zero_grad()
        assert clipped is not None
        return clipped, accelerator.get_state_dict(model)["weight"].flatten().tolist()


@every_topology
def test_gradient_is_final_after_value_clipping(topology: Topology) -> None:
    for clipped, weights in ranks.run(gradient_after_value_clipping, topology.settings, ranks=topology.ranks):
        assert clipped == pytest.approx([0.2, 0.5, -0.5])
        assert weights == pytest.approx([-0.2, -0.5, 0.5])


def train_with_a_bad_filler(settings: dict[str, Any], *, form: str) -> list[float]:
    """Rank 1 is left without a row in the second micro-step; its loss there is inf, its gradient NaN."""
    with Accelerator(**settings) as accelerator:
        model = Scalar()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer, batches = accelerator.prepare(model, optimizer, loader([1.0, 3.0, 5.0], batch_size=1))
        weights = []
        for number, batch in enumerate(batches):
            with accelerator.accumulate(model):
                loss = model(batch).sum()
                if number == 1 and accelerator.process_index == 1:
                    loss = loss * math.inf
                accelerator.backward(loss, num_items=7 if form == "sum" else None)
                optimizer.step()
                optimizer.zero_grad()
            weights.append(weight_of(accelerator, model))
            assert accelerator.last_update is not None
            assert math.isfinite(accelerator.last_update.loss.item())
        return weights


@pytest.mark.parametrize("topology", topologies(2), ids=str)
def test_filler_batch_changes_nothing(topology: Topology) -> None:
    for weights in ranks.run(train_with_a_bad_filler, topology.settings, form="mean", ranks=2):
        assert weights == [-2.0, -7.0]
    for weights in ranks.run(train_with_a_bad_filler, topology.settings, form="sum", ranks=2):
        assert weights == pytest.approx([-4 / 14, -4 / 14 - 5 / 7])


def equal_micro_batches_bitwise(settings: dict[str, Any], *, window: int) -> bool:
    """Whether gradients are bit for bit those of `(loss / window).backward()`."""
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(window, 6, 7)
    for batch in data:
        loss = model(batch).square().mean()
        (loss / window if window > 1 else loss).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with Accelerator(gradient_accumulation_steps=window, **settings) as accelerator:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        batches = DataLoader(data.flatten(0, 1), batch_size=6)
        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
        found = [whole(parameter.grad) for parameter in model.parameters()]
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("topology", topologies(1), ids=str)
@pytest.mark.parametrize("window", [1, 2, 3, 4, 7])
def test_equal_micro_batches_are_bitwise_the_divided_loss(topology: Topology, window: int) -> None:
    assert ranks.run(equal_micro_batches_bitwise, topology.settings, window=window, ranks=1) == [True]
