"""What is particular to FSDP2: who holds what, what travels when, and what a model must not do."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from drivetrain import Accelerator
from drivetrain.testing import ranks
from scalar import Scalar, whole

SETTINGS = {"distributed_type": "FSDP", "cpu": True}
WIDTH = 6
NUM_BLOCKS = 3
SECONDS = 10.0

pytestmark = pytest.mark.deadline(60)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.second(torch.tanh(self.first(rows)))


class Stack(nn.Module):
    """An embedding, repeated blocks, a head."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
        self.head = nn.Linear(WIDTH, 1)
        self.checkpoints = checkpoints

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        for block in self.blocks:
            rows = checkpoint(block, rows, use_reentrant=False) if self.checkpoints else block(rows)
        return self.head(rows)

    def score(self, ids: Tensor) -> Tensor:
        """Another way through the model."""
        return 2 * self.head(self.blocks[0](self.table(ids)))


def build(**options: Any) -> Stack:
    torch.manual_seed(3)
    return Stack(**options)


def ids_of(rank: int, number: int = 0) -> Tensor:
    return (torch.arange(4) * 3 + 5 * rank + 7 * number) % 11


def reference_gradients(num_ranks: int, *, numbers: tuple[int, ...] = (0,), score: bool = False) -> dict[str, Tensor]:
    """Return the gradients of the mean over ranks and micro-batches, by plain torch."""
    model = build()
    for number in numbers:
        for rank in range(num_ranks):
            ids = ids_of(rank, number)
            output = model.score(ids) if score else model(ids)
            (output.square().mean() / (num_ranks * len(numbers))).backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


# Who holds what


def shares(fsdp_config: dict[str, Any]) -> dict[str, tuple[bool, int, int]]:
    with Accelerator(fsdp_config=fsdp_config, **SETTINGS) as accelerator:
        model = build()
        assert accelerator.prepare(model) is model
        return {
            name: (isinstance(value, DTensor), value.to_local().numel(), value.numel())
            for name, value in model.named_parameters()
        }


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("names", [None, "Block", ["Block", "Linear"]], ids=str)
def test_parameters_when_prepared_then_each_rank_holds_its_part_and_no_more(num_ranks: int, names: Any) -> None:
    config = {} if names is None else {"transformer_layer_cls_to_wrap": names}
    by_rank = ranks.run(shares, config, ranks=num_ranks)
    plain = dict(build().named_parameters())
    for name, parameter in plain.items():
        per_row = parameter.numel() // len(parameter)
        most = math.ceil(len(parameter) / num_ranks) * per_row
        assert all(held[name][0] for held in by_rank)
        assert max(held[name][1] for held in by_rank) <= most
        assert sum(held[name][1] for held in by_rank) == parameter.numel() == by_rank[0][name][2]


# What travels when


def counted_collectives(window: int, *, fsdp_config: dict[str, Any]) -> list[Counter[str]]:
    """Return how many gatherings and spreadings each scope of the second window takes; forward and backward apart."""
    counts: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        return run

    found: list[Counter[str]] = []
    names = ("all_gather_single", "reduce_scatter_single")
    with Accelerator(gradient_accumulation_steps=window, fsdp_config=fsdp_config, **SETTINGS) as accelerator:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        patches = {name: counting(name) for name in names}
        with mock.patch.multiple(dist, **patches):
            for number in range(2 * window):
                with accelerator.accumulate(model):
                    counts.clear()
                    loss = model(ids_of(accelerator.process_index, number)).square().mean()
                    forward = counts["all_gather_single"]
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if number >= window:
                    found.append(Counter(counts, forward=forward))
    return found


@pytest.mark.parametrize(("names", "num_units"), [("Block", NUM_BLOCKS), ("Linear", 2 * NUM_BLOCKS + 1)])
def test_collectives_when_counted_then_units_gather_and_only_the_last_scope_of_a_window_spreads(
    names: str, num_units: int
) -> None:
    for scopes in ranks.run(counted_collectives, 3, fsdp_config={"transformer_layer_cls_to_wrap": names}, ranks=2):
        assert [scope["reduce_scatter_single"] for scope in scopes] == [0, 0, num_units + 1]
        assert all(scope["forward"] >= num_units for scope in scopes)


def test_collectives_when_parameters_stay_gathered_then_the_backward_gathers_nothing() -> None:
    config = {"reshard_after_forward": False}
    for scopes in ranks.run(counted_collectives, 2, fsdp_config=config, ranks=2):
        assert [scope["all_gather_single"] - scope["forward"] for scope in scopes] == [0, 0]


# Gradients


def gradients_of(
    *,
    window: int = 1,
    score: bool = False,
    checkpoints: bool = False,
    evaluates: bool = False,
    fsdp_config: dict[str, Any] | None = None,
) -> dict[str, Tensor]:
    with Accelerator(gradient_accumulation_steps=window, fsdp_config=fsdp_config, **SETTINGS) as accelerator:
        model = accelerator.prepare(build(checkpoints=checkpoints))
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
        if score:
            accelerator.forward_method(model, "score")
        if evaluates:
            with torch.no_grad():
                model(ids_of(0))
            assert all(isinstance(value, DTensor) for value in model.parameters())
        for number in range(window):
            with accelerator.accumulate(model):
                ids = ids_of(accelerator.process_index, number)
                accelerator.backward((model.score(ids) if score else model(ids)).square().mean())
                optimizer.step()
        return {name: whole(value.grad) for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 3},
        {"score": True},
        {"checkpoints": True},
        {"evaluates": True},
        {"evaluates": True, "fsdp_config": {"reshard_after_forward": False}},
        {"window": 2, "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}},
    ],
    ids=str,
)
def test_gradients_when_sharded_then_are_those_of_plain_torch(num_ranks: int, options: dict[str, Any]) -> None:
    numbers = tuple(range(options.get("window", 1)))
    expected = reference_gradients(num_ranks, numbers=numbers, score=options.get("score", False))
    for found in ranks.run(gradients_of, ranks=num_ranks, **options):
        assert differences(found, expected) <= 1e-6


def gradients_through_a_changed_view(*, wraps: bool) -> dict[str, Tensor]:
    policy = "TRANSFORMER_BASED_WRAP" if wraps else "NO_WRAP"
    with Accelerator(fsdp_config={"auto_wrap_policy": policy}, **SETTINGS) as accelerator:
        model = build()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for _ in range(2):  # the second time, the number of losses is known, and gradients travel in the backward
            optimizer.zero_grad()
            output = model(ids_of(accelerator.process_index).view(2, 2))
            assert output._base is not None
            output += 0.0
            accelerator.backward(output.square().mean())
            optimizer.step()
        return {name: whole(value.grad) for name, value in model.named_parameters()}


@pytest.mark.parametrize("wraps", [True, False])
def test_gradients_when_the_output_is_a_view_that_is_changed_in_place_then_are_those_of_plain_torch(
    wraps: bool,
) -> None:
    for found in ranks.run(gradients_through_a_changed_view, wraps=wraps, ranks=2, timeout=SECONDS):
        assert differences(found, reference_gradients(2)) <= 1e-6


def gradients_after_a_broken_forward() -> dict[str, Tensor]:
    with Accelerator(**SETTINGS) as accelerator:
        model = accelerator.prepare(build())
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
        handle = model.blocks[1].register_forward_pre_hook(_break_off)
        for _ in range(2):
            with contextlib.suppress(ZeroDivisionError):
                model(ids_of(accelerator.process_index))
        handle.remove()
        accelerator.backward(model(ids_of(accelerator.process_index)).square().mean())
        optimizer.step()
        return {name: whole(value.grad) for name, value in model.named_parameters()}


def _break_off(*_: object) -> None:
    raise ZeroDivisionError


def test_gradients_when_a_forward_was_broken_off_before_then_are_those_of_plain_torch() -> None:
    for found in ranks.run(gradients_after_a_broken_forward, ranks=2, timeout=SECONDS):
        assert differences(found, reference_gradients(2)) <= 1e-6


class Odd(nn.Module):
    """A parameter that is no row after the other in memory, fewer rows than ranks, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.register_buffer("shift", torch.arange(6.0).view(3, 2).t())
        self.last = nn.Parameter(torch.ones(1, 2))

    def forward(self) -> Tensor:
        return (self.last @ (self.turned.t() + self.shift)).square().mean()


def train_odd(settings: dict[str, Any] | None) -> dict[str, Tensor]:
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if settings is None:
        for _ in range(3):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.state_dict())
    with Accelerator(**settings) as accelerator:
        model.shift.mul_(1 + accelerator.process_index)  # what counts is rank 0's
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(3):
            accelerator.backward(model())
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.get_state_dict(model)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_parameters_when_of_odd_shapes_and_strides_then_train_as_plainly(num_ranks: int) -> None:
    expected = train_odd(None)
    for found in ranks.run(train_odd, SETTINGS, ranks=num_ranks):
        assert differences(found, expected) <= 1e-6


def two_models_in_turn() -> tuple[float, float]:
    """One model's window is open, with gradients that are not spread yet, while the other's updates end."""
    with Accelerator(**SETTINGS) as accelerator:
        slow, quick = Scalar(), Scalar()
        slow, quick, slow_optimizer, quick_optimizer = accelerator.prepare(
            slow, quick, torch.optim.SGD(slow.parameters(), lr=1.0), torch.optim.SGD(quick.parameters(), lr=1.0)
        )
        for number in range(4):
            accelerator.gradient_accumulation_steps = 4
            with accelerator.accumulate(slow):
                accelerator.backward(slow(torch.ones(1)).sum(), num_items=1)
                slow_optimizer.step()
                slow_optimizer.zero_grad()
            accelerator.gradient_accumulation_steps = 1
            with accelerator.accumulate(quick):
                accelerator.backward(quick(torch.full((1,), float(number))).sum(), num_items=3)
                quick_optimizer.step()
                quick_optimizer.zero_grad()
                quick_optimizer.step()
        states = [accelerator.get_state_dict(model) for model in (slow, quick)]
        return states[0]["weight"].item(), states[1]["weight"].item()


def test_two_models_when_one_window_is_open_then_the_other_is_not_disturbed() -> None:
    for slow, quick in ranks.run(two_models_in_turn, ranks=2, timeout=SECONDS):
        assert slow == pytest.approx(-1.0)
        assert quick == pytest.approx(-(0 + 1 + 2 + 3) / 3)


def discard_an_update_and_train() -> dict[str, Tensor]:
    """Gradients that no step has used are cleared; what comes then must not hold them."""
    with Accelerator(**SETTINGS) as accelerator:
        model = build()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        accelerator.backward(100 * model(ids_of(accelerator.process_index, 9)).square().mean())
        optimizer.zero_grad()
        accelerator.backward(model(ids_of(accelerator.process_index)).square().mean())
        optimizer.step()
        return {name: whole(value.grad) for name, value in model.named_parameters()}


def test_gradients_when_cleared_before_they_are_spread_then_are_gone() -> None:
    for found in ranks.run(discard_an_update_and_train, ranks=2):
        assert differences(found, reference_gradients(2)) <= 1e-6


def train_raw() -> None:
    with Accelerator(**SETTINGS) as accelerator:
        model = build()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(ids_of(0)).sum().backward()
        optimizer.step()


def test_step_when_the_backward_was_torchs_own_then_is_an_error() -> None:
    with pytest.raises(ranks.RanksFailed, match=r"accelerator\.backward\(\) was not called for them"):
        ranks.run(train_raw, ranks=2, timeout=SECONDS)


# Optimizers that were built before


def train_momentum(order: str) -> dict[str, Tensor]:
    """Train two steps with an optimizer that has made one before it was prepared."""
    model = build()
    groups = [{"params": model.blocks.parameters(), "lr": 0.2}, {"params": [*model.table.parameters()]}]
    optimizer = torch.optim.SGD([*groups, {"params": model.head.parameters(), "momentum": 0.5}], lr=0.1, momentum=0.9)
    model(ids_of(0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if order == "plain":
        for number in range(2):
            model(ids_of(0, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.state_dict())
    with Accelerator(**SETTINGS) as accelerator:
        if order == "together":
            model, optimizer = accelerator.prepare(model, optimizer)
        elif order == "model first":
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(optimizer)
        else:
            optimizer = accelerator.prepare(optimizer)
            model = accelerator.prepare(model)
        for number in range(2):
            accelerator.backward(model(ids_of(0, number)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.get_state_dict(model)


@pytest.mark.parametrize("order", ["together", "model first", "optimizer first"])
def test_optimizer_when_built_and_used_before_then_goes_on_with_groups_and_state(order: str) -> None:
    expected = train_momentum("plain")
    for found in ranks.run(train_momentum, order, ranks=2):
        assert differences(found, expected) <= 1e-6


def clip_former_parameters() -> None:
    with Accelerator(**SETTINGS) as accelerator:
        model = build()
        former = list(model.parameters())
        model = accelerator.prepare(model)
        accelerator.backward(model(ids_of(0)).sum())
        accelerator.clip_grad_norm_(former, 1.0)


def share_a_former_parameter() -> None:
    with Accelerator(**SETTINGS) as accelerator:
        model = build()
        other = Scalar()
        other.weight = model.head.weight
        accelerator.prepare(model)
        accelerator.prepare(other)


def freeze_and_thaw(*, looks: bool, reshards: bool) -> list[bool]:
    """Return whether the head moves in each of four updates: trained, frozen, trained, frozen."""
    moves = []
    with Accelerator(fsdp_config={"reshard_after_forward": reshards}, **SETTINGS) as accelerator:
        model = build()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for is_trained in (True, False, True, False):
            before = accelerator.get_state_dict(model)["head.weight"].clone()
            if looks:
                model(ids_of(0))
            model.head.requires_grad_(is_trained)
            accelerator.backward(model(ids_of(accelerator.process_index)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            moves.append(not torch.equal(before, accelerator.get_state_dict(model)["head.weight"]))
    return moves


@pytest.mark.parametrize("looks", [False, True], ids=["", "after a forward without a backward"])
@pytest.mark.parametrize("reshards", [True, False])
def test_parameters_when_frozen_and_thawed_between_updates_then_train_accordingly(looks: bool, reshards: bool) -> None:
    results = ranks.run(freeze_and_thaw, looks=looks, reshards=reshards, ranks=2)
    assert results == [[True, False, True, False]] * 2


def units_of_two_models() -> list[int]:
    """Return how many units there are in each model."""
    with Accelerator(fsdp_config={"transformer_layer_cls_to_wrap": "Block,Linear"}, **SETTINGS) as accelerator:
        models = accelerator.prepare(build(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), Scalar())
        return [sum(type(part).__name__.startswith("FSDP") for part in model.modules()) for model in models]


def test_units_when_named_for_several_models_then_each_has_those_that_it_holds() -> None:
    # Blocks with two linear layers each, the head, and the model itself.
    assert ranks.run(units_of_two_models, ranks=1) == [[3 * NUM_BLOCKS + 2, 3, 1]]


def load_into_the_prepared(settings: dict[str, Any]) -> bool:
    """Load whole weights into a prepared model, and return whether they are there."""
    with Accelerator(**settings) as accelerator:
        model = accelerator.prepare(build())
        wanted = {name: torch.full_like(value, 0.5) for name, value in accelerator.get_state_dict(model).items()}
        model.load_state_dict(wanted)
        found = accelerator.get_state_dict(model)
        return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("settings", [SETTINGS, {"cpu": True}], ids=["sharded", "whole"])
def test_weights_when_loaded_into_a_prepared_model_then_are_there(settings: dict[str, Any]) -> None:
    assert ranks.run(load_into_the_prepared, settings, ranks=2) == [True, True]


# What is refused


def run_a_block_alone() -> None:
    with Accelerator(**SETTINGS) as accelerator:
        model = accelerator.prepare(build())
        model.blocks[0](torch.ones(1, WIDTH))


def run_another_method() -> None:
    with Accelerator(**SETTINGS) as accelerator:
        accelerator.prepare(build()).score(ids_of(0))


def name_a_class_that_is_not_there() -> None:
    with Accelerator(fsdp_config={"transformer_layer_cls_to_wrap": "Blok"}, **SETTINGS) as accelerator:
        accelerator.prepare(build())


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(1.0))


def prepare_a_parameter_without_dimensions() -> None:
    Accelerator(**SETTINGS).prepare(nn.Sequential(nn.Linear(2, 2), Temperature()))


def tie_two_blocks() -> None:
    model = build()
    model.blocks[1].first.weight = model.blocks[0].first.weight
    Accelerator(**SETTINGS).prepare(model)


def mix_types() -> None:
    model = build()
    model.blocks[1].second.bfloat16()
    Accelerator(**SETTINGS).prepare(model)


def save_on_one_rank() -> None:
    with Accelerator(**SETTINGS) as accelerator:
        model = accelerator.prepare(build())
        if accelerator.is_main_process:
            accelerator.get_state_dict(model)
        accelerator.wait_for_everyone()


REFUSED = [
    (run_a_block_alone, "TrainingStepError", "Block ran outside the forward of Stack", "accelerator.forward_method"),
    (run_another_method, "TrainingStepError", "Embedding ran outside the forward", "accelerator.forward_method"),
    (
        name_a_class_that_is_not_there,
        "PrepareError",
        "has no module of class Blok to shard by",
        "3 x Block, 71 parameters each",
    ),
    (prepare_a_parameter_without_dimensions, "PrepareError", "1.value of Sequential", "shape (1,)"),
    (tie_two_blocks, "PrepareError", "weight of Linear is shared by", "Block and Block"),
    (mix_types, "PrepareError", "Block has parameters of torch.float32 and of torch.bfloat16", "weight of Linear"),
    (save_on_one_rank, "RankMismatchError", "rank 0: get_state_dict()", "rank 1: wait_for_everyone()"),
    (clip_former_parameters, "PrepareError", "15 of the parameters", "again, after prepare()"),
    (share_a_former_parameter, "PrepareError", "shares parameters with another prepared model", "weight"),
]


@pytest.mark.parametrize(
    ("mistake", "kind", "message", "more"), REFUSED, ids=lambda value: getattr(value, "__name__", "")
)
def test_mistake_when_a_model_is_sharded_then_is_an_error_on_every_rank(
    mistake: Callable[[], None], kind: str, message: str, more: str
) -> None:
    with pytest.raises(ranks.RanksFailed) as failed:
        ranks.run(mistake, ranks=2, timeout=SECONDS)
    raised = failed.value.exceptions
    assert set(raised) == {0, 1}
    for rank in raised:
        assert raised[rank][0] == kind
        assert message in raised[rank][1]
        assert more in raised[rank][1]
