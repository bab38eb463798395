"""Two models in one loop, stepped in turn: what each is the gradient of, on every topology."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain.testing import ranks
from topologies import Topology, every_topology

ROWS = torch.arange(1.0, 17.0).view(16, 1)


def one_weight(start: float = 1.0) -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, start)
    return model


def train(settings: dict[str, Any], *, batch_size: int, window: int, recipe: str) -> dict[str, Any]:
    """Train a pair of models on 16 rows; return how far they moved and what was logged."""
    with Accelerator(gradient_accumulation_steps=window, **settings) as accelerator:
        first, second = one_weight(), one_weight()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
        first, second, for_first, for_second, batches = accelerator.prepare(
            first, second, *optimizers, DataLoader(ROWS, batch_size=batch_size)
        )
        losses = []
        for rows in batches:
            with accelerator.accumulate(first, second):
                RECIPES[recipe](accelerator, rows, first, second, for_first, for_second, losses)
        return {
            "first": 1 - accelerator.get_state_dict(first)["weight"].item(),
            "second": 1 - accelerator.get_state_dict(second)["weight"].item(),
            "losses": losses,
            "updates": accelerator.step,
        }


def log(accelerator: Accelerator, losses: list[float]) -> None:
    if accelerator.sync_gradients:
        losses.append(accelerator.last_update.loss.item())


def step_last(accelerator: Any, rows: Any, first: Any, second: Any, step_1: Any, step_2: Any, losses: Any) -> None:
    accelerator.backward(second(rows).mean())
    step_2.step()
    log(accelerator, losses)
    step_2.zero_grad()
    accelerator.backward(first(rows).mean())
    step_1.step()
    log(accelerator, losses)
    step_1.zero_grad()


def clear_first(accelerator: Any, rows: Any, first: Any, second: Any, step_1: Any, step_2: Any, losses: Any) -> None:
    step_2.zero_grad()
    accelerator.backward(second(rows).mean())
    step_2.step()
    log(accelerator, losses)
    step_1.zero_grad()
    accelerator.backward(first(rows).mean())
    step_1.step()
    log(accelerator, losses)


def adversarial(accelerator: Any, rows: Any, first: Any, second: Any, step_1: Any, step_2: Any, losses: Any) -> None:
    made = first(rows)  # before the critic's step
    accelerator.backward(second(made.detach()).mean())
    step_2.step()
    log(accelerator, losses)
    step_2.zero_grad()
    second.requires_grad_(False)
    accelerator.backward(second(made).mean())
    step_1.step()
    log(accelerator, losses)
    step_1.zero_grad()
    second.requires_grad_(True)


RECIPES = {"step last": step_last, "clear first": clear_first, "adversarial": adversarial}


@every_topology
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("window", [1, 2])
def test_pair_stepped_in_turn_moves_as_on_one_process(topology: Topology, recipe: str, window: int) -> None:
    batch_size = 16 // topology.ranks // 2
    expected = by_hand(recipe, window=window)
    results = ranks.run(
        train, topology.settings, batch_size=batch_size, window=window, recipe=recipe, ranks=topology.ranks
    )
    for result in results:
        assert result == {
            "first": pytest.approx(expected["first"], abs=1e-6),
            "second": pytest.approx(expected["second"], abs=1e-6),
            "losses": pytest.approx(expected["losses"], rel=1e-5),
            "updates": 2 // window,
        }


def by_hand(recipe: str, *, window: int) -> dict[str, Any]:
    """The same with plain arithmetic: two micro-batches of eight rows, gradients of means, steps of 0.1."""
    halves = (ROWS[:8].mean().item(), ROWS[8:].mean().item())
    first, second, losses = 1.0, 1.0, []
    windows = [halves] if window == 2 else [halves[:1], halves[1:]]
    for means in windows:
        mean = sum(means) / len(means)
        if recipe == "adversarial":
            made = [first * value for value in means]
            losses.append(second * sum(made) / len(made))
            # Scopes before the last one see the critic as it was before its step.
            critics = [second] * (len(means) - 1) + [second - 0.1 * sum(made) / len(made)]
            second = critics[-1]
            losses.append(sum(critic * value for critic, value in zip(critics, made, strict=True)) / len(means))
            first -= 0.1 * sum(critic * value for critic, value in zip(critics, means, strict=True)) / len(means)
        else:
            losses += [second * mean, first * mean]
            second -= 0.1 * mean
            first -= 0.1 * mean
    return {"first": 1 - first, "second": 1 - second, "losses": losses}


def train_through_the_critic(settings: dict[str, Any]) -> tuple[float, float]:
    """A scope for each; the generator's loss runs through the critic and must leave no gradient there."""
    with Accelerator(gradient_accumulation_steps=2, **settings) as accelerator:
        generator, critic = one_weight(), one_weight()
        generator, critic, for_generator, for_critic = accelerator.prepare(
            generator,
            critic,
            torch.optim.SGD(generator.parameters(), lr=0.0),
            torch.optim.SGD(critic.parameters(), lr=1.0),
        )
        for _ in range(4):
            rows = torch.ones(2, 1)
            with accelerator.accumulate(critic):
                for_critic.zero_grad()
                accelerator.backward(critic(generator(rows).detach()).mean() * 0.25)
                for_critic.step()
            with accelerator.accumulate(generator):
                for_generator.zero_grad()
                accelerator.backward(critic(generator(rows)).mean() * 100)
                for_generator.step()
        weights = [accelerator.get_state_dict(model)["weight"].item() for model in (generator, critic)]
        return weights[0], weights[1]


@every_topology
def test_models_of_other_scopes_keep_their_gradients(topology: Topology) -> None:
    results = ranks.run(train_through_the_critic, topology.settings, ranks=topology.ranks)
    for generator, critic in results:
        assert generator == 1.0
        assert critic == pytest.approx(1 - 2 * 0.25, abs=1e-6)
