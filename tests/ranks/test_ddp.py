"""What DDP does underneath: how often gradients travel, and that its own ways keep working."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from drivetrain import Accelerator
from drivetrain.testing import ranks


class Counter:
    """Counts reductions; it is the state of a communication hook."""

    def __init__(self) -> None:
        self.buckets = 0


# DDP wants the annotation itself, not its text.
def counted(state, bucket):  # type: ignore[no-untyped-def]
    state.buckets += 1
    return allreduce_hook(None, bucket)


def reductions_per_update(*, window: int, num_losses: int, uses_accumulate: bool) -> list[int]:
    """Return how many buckets travelled in each of four updates of a model with one bucket."""
    with Accelerator(cpu=True, gradient_accumulation_steps=window) as accelerator:
        model = nn.Linear(3, 2)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        counter = Counter()
        model.register_comm_hook(counter, counted)
        seen, travelled = [], 0
        for _ in range(4):
            for _ in range(window):
                with accelerator.accumulate(model) if uses_accumulate else _nothing():
                    output = model(torch.ones(1, 3))
                    for left in reversed(range(num_losses)):
                        accelerator.backward(output.mean(), retain_graph=left > 0)
                    optimizer.step()
                    optimizer.zero_grad()
            seen.append(counter.buckets - travelled)
            travelled = counter.buckets
        return seen


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("num_losses", [1, 3])
def test_gradients_travel_once_per_update(window: int, num_losses: int) -> None:
    results = ranks.run(reductions_per_update, window=window, num_losses=num_losses, uses_accumulate=True, ranks=2)
    assert results == [[1, 1, 1, 1]] * 2


def test_gradients_travel_once_per_update_without_accumulate() -> None:
    results = ranks.run(reductions_per_update, window=1, num_losses=1, uses_accumulate=False, ranks=2)
    assert results == [[1, 1, 1, 1]] * 2


def train_two_heads(*, losses: str, find_unused: bool) -> tuple[list[float], float]:
    """Two heads over a trunk, a loss for each; return all weights and the norm of the last update."""
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"trunk": nn.Linear(3, 4), "left": nn.Linear(4, 1), "right": nn.Linear(4, 1)})
    model.forward = lambda rows: tuple(model[head](model["trunk"](rows).tanh()) for head in ("left", "right"))
    settings: dict[str, Any] = {"ddp_config": {"find_unused_parameters": True}} if find_unused else {}
    with Accelerator(cpu=True, gradient_accumulation_steps=2, **settings) as accelerator:
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        rows = torch.arange(24.0).reshape(8, 3) / 10
        share = 8 // accelerator.num_processes // 2
        for start in (0, 4):
            with accelerator.accumulate(prepared):
                first = start + accelerator.process_index * share
                left, right = prepared(rows[first : first + share])
                if losses == "apart":
                    accelerator.backward(left.square().mean(), retain_graph=True)
                    accelerator.backward(right.square().mean())
                else:
                    accelerator.backward(left.square().mean() + right.square().mean())
                norm = accelerator.clip_grad_norm_(prepared.parameters(), 100.0)
                optimizer.step()
        assert norm is not None
        return [weight for value in model.parameters() for weight in value.flatten().tolist()], norm.item()


@pytest.mark.parametrize("find_unused", [False, True])
def test_losses_that_use_other_parts_of_the_model_add_up(find_unused: bool) -> None:
    [(expected, norm)] = ranks.run(train_two_heads, losses="together", find_unused=False, ranks=1)
    for weights, got in ranks.run(train_two_heads, losses="apart", find_unused=find_unused, ranks=2):
        assert weights == pytest.approx(expected, abs=1e-6)
        assert got == pytest.approx(norm, rel=1e-5)


def ddp_options() -> tuple[bool, bool, int]:
    settings = {"bucket_cap_mb": 7, "find_unused_parameters": True, "gradient_as_bucket_view": True, "timeout": 30}
    with Accelerator(cpu=True, ddp_config=settings) as accelerator:
        model = accelerator.prepare(nn.Linear(2, 2))
        return model.find_unused_parameters, model.gradient_as_bucket_view, model.bucket_bytes_cap


def test_settings_reach_ddp() -> None:
    assert ranks.run(ddp_options, ranks=2) == [(True, True, 7 * 2**20)] * 2


def batch_norm_evaluation() -> list[float]:
    """Evaluation on rank 0 alone must not wait for the others, though DDP would send buffers in a forward."""
    with Accelerator(cpu=True) as accelerator:
        model = accelerator.prepare(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
        accelerator.backward(model(torch.randn(4, 2)).sum())
        if accelerator.is_main_process:
            with torch.no_grad():
                model(torch.ones(3, 2))
        accelerator.wait_for_everyone()
        return accelerator.get_state_dict(model)["0.running_mean"].tolist()


def test_evaluation_on_one_rank_waits_for_nobody() -> None:
    ranks.run(batch_norm_evaluation, ranks=2, timeout=20)


def leave_before_the_third_update(way: str, *, leaver: int) -> None:
    """Train with BatchNorm, whose buffers DDP sends in every forward, and do something else on one rank."""
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        if step == 2 and accelerator.process_index == leaver:
            WAYS[way](accelerator)
            return
        accelerator.backward(model(torch.randn(4, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()


def fail(accelerator: Accelerator) -> None:
    raise ValueError("cause-41c")


WAYS: dict[str, Callable[[Accelerator], Any]] = {
    "the end of the run": Accelerator.end_training,
    "wait_for_everyone()": Accelerator.wait_for_everyone,
    "gather()": lambda accelerator: accelerator.gather(torch.ones(1)),
    "failure": fail,
}


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_rank_in_a_forward_that_sends_buffers_says_where_the_other_one_is(way: str, leaver: int) -> None:
    with pytest.raises(ranks.RanksFailed) as failed:
        ranks.run(leave_before_the_third_update, way, leaver=leaver, ranks=2, timeout=10)
    kind, message = failed.value.exceptions[1 - leaver]
    if way == "failure":
        assert failed.value.exceptions[leaver] == ("ValueError", "cause-41c")
        assert kind == "TopologyError"
        assert f"rank {1 - leaver} waited in a forward" in message
    else:
        assert kind == "RankMismatchError"
        assert f"rank {leaver}: {way} after update 2" in message
        assert f"rank {1 - leaver}: a forward" in message


def copy_a_model_with_buffers() -> list[bool]:
    with Accelerator(cpu=True) as accelerator:
        model = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        rows = torch.randn(4, 2)
        return [torch.equal(one(rows), model(rows)) for one in copies]


def test_copy_of_a_model_with_buffers_runs_like_the_model() -> None:
    assert ranks.run(copy_a_model_with_buffers, ranks=2) == [[True, True]] * 2


def prepare_a_prepared_layer_in_another_model() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Sequential(accelerator.prepare(nn.Linear(2, 2)), nn.Linear(2, 2)))


def test_model_that_holds_a_prepared_one_is_refused() -> None:
    with pytest.raises(ranks.RanksFailed) as failed:
        ranks.run(prepare_a_prepared_layer_in_another_model, ranks=2, timeout=20)
    for kind, message in failed.value.exceptions.values():
        assert kind == "PrepareError"
        assert "0 of Sequential was prepared already, as a model of its own" in message


def train_after_thawing() -> None:
    with Accelerator(cpu=True) as accelerator:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        model[0].requires_grad_(False)
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            accelerator.backward(prepared(torch.ones(1, 2)).sum())
            optimizer.step()
            model[0].requires_grad_(True)


def test_parameter_that_is_thawed_after_prepare_is_refused() -> None:
    with pytest.raises(ranks.RanksFailed) as failed:
        ranks.run(train_after_thawing, ranks=2, timeout=20)
    for rank in (0, 1):
        assert failed.value.exceptions[rank][0] == "TrainingStepError"
        assert "0.weight is trained now and was frozen" in failed.value.exceptions[rank][1]


class Opaque:
    """An output that nobody can look into."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class HidesItsOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, factor: float) -> Opaque:
        return Opaque(self.weight * factor)


def train_hidden_outputs(*, num_losses: int, uses_accumulate: bool) -> float:
    with Accelerator(cpu=True) as accelerator:
        model = HidesItsOutput()
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in range(3):
            with accelerator.accumulate(prepared) if uses_accumulate else _nothing():
                output = prepared(accelerator.process_index + 1.0)
                for left in reversed(range(num_losses)):
                    accelerator.backward(output.value.sum(), retain_graph=left > 0)
                optimizer.step()
                optimizer.zero_grad()
        return accelerator.get_state_dict(prepared)["weight"].item()


@pytest.mark.parametrize("uses_accumulate", [True, False])
@pytest.mark.parametrize("num_losses", [1, 2])
def test_outputs_that_hide_their_tensors_train_right(num_losses: int, uses_accumulate: bool) -> None:
    results = ranks.run(train_hidden_outputs, num_losses=num_losses, uses_accumulate=uses_accumulate, ranks=2)
    assert results == [-1.5 * 3 * num_losses] * 2


class Unusual(nn.Module):
    """Ways to come to a loss that do not lead through the output of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        self.kept = (self.weight * items).sum()
        return self.weight.detach() * items

    def loss(self, items: torch.Tensor) -> torch.Tensor:
        return (self.weight * items).sum()


def train_unusually(way: str) -> float:
    with Accelerator(cpu=True) as accelerator:
        model = Unusual()
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        items = torch.tensor([1.0 + accelerator.process_index])
        for _ in range(4):
            with accelerator.accumulate(prepared):
                if way == "a method of the wrapper":
                    loss = prepared.loss(items)
                elif way == "a method of the model":
                    loss = model.loss(items)
                else:
                    prepared(items)
                    loss = model.kept
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return accelerator.get_state_dict(prepared)["weight"].item()


@pytest.mark.parametrize("way", ["a method of the wrapper", "a method of the model", "an attribute"])
def test_loss_that_comes_by_another_way_is_reduced_too(way: str) -> None:
    assert ranks.run(train_unusually, way, ranks=2) == [-1.5 * 4] * 2


def unused_weight_after_training(find_unused: bool) -> float:
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    model.forward = lambda rows: model["used"](rows)
    settings: dict[str, Any] = {"ddp_config": {"find_unused_parameters": True}} if find_unused else {}
    with Accelerator(cpu=True, **settings) as accelerator:
        prepared, optimizer = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        )
        for _ in range(3):
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(torch.ones(1, 2)).sum())
                optimizer.step()
                optimizer.zero_grad()
        return model["unused"].weight.sum().item()


def test_unused_parameters_stay_as_they_are() -> None:
    [expected] = ranks.run(unused_weight_after_training, False, ranks=1)
    assert ranks.run(unused_weight_after_training, True, ranks=2) == [expected] * 2


def losses_of_manual_accumulation() -> list[float]:
    """Step after every second scope of a window of one: the losses of both are those of the update."""
    with Accelerator(cpu=True) as accelerator:
        model = Unusual()
        nn.init.ones_(model.weight)
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        losses = []
        for number in (1.0, 2.0, 3.0, 4.0):
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared.loss(torch.tensor([number])))
                if number % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(accelerator.last_update.loss.item())
        return losses


def test_scopes_without_a_step_count_in_the_next_update() -> None:
    for count in (1, 2):
        assert ranks.run(losses_of_manual_accumulation, ranks=count) == [[1.5, 3.5]] * count


def descriptors_under_an_existing_group() -> list[int]:
    import os

    counts = []
    for _ in range(3):
        for _ in range(4):
            with Accelerator(cpu=True) as accelerator:
                accelerator.wait_for_everyone()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_accelerators_under_an_existing_group_leave_nothing_open() -> None:
    for counts in ranks.run(descriptors_under_an_existing_group, ranks=2, init_group=True):
        assert counts[2] <= counts[0]


def thaw_a_frozen_model() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    model.requires_grad_(True)
    with accelerator.accumulate(prepared):
        accelerator.backward(prepared(torch.ones(1, 1)).sum())
        optimizer.step()


def test_model_when_thawed_after_it_was_prepared_then_is_refused() -> None:
    with pytest.raises(ranks.RanksFailed) as failed:
        ranks.run(thaw_a_frozen_model, ranks=2, timeout=10)
    for kind, message in failed.value.exceptions.values():
        assert kind == "TrainingStepError"
        assert "weight is trained now and was frozen" in message
