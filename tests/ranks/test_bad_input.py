"""What a script can do wrong on several ranks: an error on every rank, in seconds, that names the fix."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drivetrain import Accelerator
from drivetrain.testing import ranks
from scalar import Scalar, loader
from topologies import Topology, two_ranks

SECONDS = 10.0


def failures(function: Callable[..., Any], *arguments: Any, **options: Any) -> dict[int, tuple[str, str]]:
    """Return what each of two ranks raised."""
    with pytest.raises(ranks.RanksFailed) as failed:
        ranks.run(function, *arguments, ranks=2, timeout=SECONDS, **options)
    return failed.value.exceptions


@dataclass(frozen=True)
class Parts:
    """What a mistake is made with; a window is two scopes."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    rank: int

    def scope(self, *, steps: bool = True, **options: Any) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(torch.ones(1)).sum(), **options)
            if steps:
                self.optimizer.step()


def give_num_items_on_one_rank(parts: Parts) -> None:
    for _ in range(2):
        parts.scope(num_items=1 if parts.rank == 0 else None)


def mix_both_forms(parts: Parts) -> None:
    parts.scope(num_items=1)
    parts.scope()


def step_without_accumulate(parts: Parts) -> None:
    parts.accelerator.backward(parts.model(torch.ones(1)).mean())
    parts.optimizer.step()


def step_under_no_sync(parts: Parts) -> None:
    parts.accelerator.gradient_accumulation_steps = 1
    with parts.accelerator.no_sync(parts.model):
        parts.accelerator.backward(parts.model(torch.ones(1)).mean())
    parts.optimizer.step()


def take_a_loader_of_another_accelerator(parts: Parts) -> None:
    parts.accelerator.prepare(Accelerator(cpu=True).prepare(loader([1.0] * 4, batch_size=1)))


def take_a_model_of_another_accelerator(parts: Parts) -> None:
    other = Accelerator(cpu=True)
    parts.accelerator.prepare(other.prepare(nn.Linear(2, 2)))


def wrap_the_model_by_hand(parts: Parts) -> None:
    parts.accelerator.prepare(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))


def shard_a_layer_by_hand(parts: Parts) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[1])
    parts.accelerator.prepare(model)


def wrap_the_model_in_the_older_fsdp(parts: Parts) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    parts.accelerator.prepare(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))


def step_on_one_rank(parts: Parts) -> None:
    parts.scope()
    parts.scope(steps=parts.rank == 0)
    parts.accelerator.wait_for_everyone()


def gather_on_one_rank(parts: Parts) -> None:
    if parts.rank == 0:
        parts.accelerator.gather(torch.ones(1))
    parts.accelerator.wait_for_everyone()


def leave_out_a_scope_on_one_rank(parts: Parts) -> None:
    for number in range(4):
        if parts.rank == 0 or number != 1:
            parts.scope()


def leave_a_model_out_on_one_rank(parts: Parts) -> None:
    pair = nn.ModuleDict({"left": Scalar(), "right": Scalar()})
    left, right, optimizer = parts.accelerator.prepare(
        pair["left"], pair["right"], torch.optim.SGD(pair.parameters(), lr=1.0)
    )
    parts.accelerator.gradient_accumulation_steps = 1
    for _ in range(2):
        with parts.accelerator.accumulate(left, right):
            loss = right(torch.ones(1)).sum()
            if parts.rank == 0:
                loss = loss + 100 * left(torch.ones(1)).sum()
            parts.accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def give_a_further_loss_on_one_rank(parts: Parts) -> None:
    parts.accelerator.gradient_accumulation_steps = 1
    with parts.accelerator.accumulate(parts.model):
        loss = parts.model(torch.ones(1)).sum()
        parts.accelerator.backward(loss, retain_graph=True)
        if parts.rank == 0:
            parts.accelerator.backward(loss)
        parts.optimizer.step()


def step_a_plateau_on_own_metric(parts: Parts) -> None:
    parts.accelerator.gradient_accumulation_steps = 1
    scheduler = parts.accelerator.prepare(
        torch.optim.lr_scheduler.ReduceLROnPlateau(parts.optimizer, factor=0.5, patience=0)
    )
    for step in range(3):
        parts.scope()
        scheduler.step(float(step if parts.rank else -step))
        parts.optimizer.zero_grad()


def step_on_raw_gradients_after_an_update(parts: Parts) -> None:
    parts.accelerator.gradient_accumulation_steps = 1
    parts.scope()
    parts.optimizer.zero_grad()
    parts.model(torch.ones(1)).sum().backward()
    parts.optimizer.step()


def step_twice(parts: Parts) -> None:
    parts.accelerator.gradient_accumulation_steps = 1
    parts.scope()
    parts.optimizer.step()


def go_on_after_the_end(parts: Parts) -> None:
    parts.accelerator.end_training()
    parts.accelerator.gather(torch.ones(1))


def prepare_unlike_models(parts: Parts) -> None:
    parts.accelerator.prepare(nn.Linear(2, 2 + parts.rank))


def clip_on_one_rank(parts: Parts) -> None:
    parts.accelerator.gradient_accumulation_steps = 1
    for _ in range(3):
        with parts.accelerator.accumulate(parts.model):
            parts.accelerator.backward(10 * parts.model(torch.ones(1)).sum())
            if parts.rank == 0:
                parts.accelerator.clip_grad_norm_(parts.model.parameters(), 1.0)
            parts.optimizer.step()
            parts.optimizer.zero_grad()


def make(mistake: Callable[[Parts], None], settings: dict[str, Any]) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, **settings)
    model = Scalar()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    mistake(Parts(accelerator, model, optimizer, accelerator.process_index))


# An engine that gathers parameters meets the other ranks more often, so some mistakes are found earlier there.
MISTAKES = [
    (give_num_items_on_one_rank, "RankMismatchError", "`num_items` on ranks [0] and not on ranks [1]"),
    (mix_both_forms, "TrainingStepError", "given a mean in a window whose losses are sums"),
    (step_without_accumulate, "TrainingStepError", "2 micro-batches per step are asked for"),
    (step_under_no_sync, "TrainingStepError", "never reduced over ranks"),
    (take_a_loader_of_another_accelerator, "PrepareError", "was prepared by another Accelerator"),
    (take_a_model_of_another_accelerator, "PrepareError", "this model was prepared by another Accelerator"),
    (wrap_the_model_by_hand, "PrepareError", "the model is wrapped in DistributedDataParallel already"),
    (shard_a_layer_by_hand, "PrepareError", "1.weight is a DTensor: the model was spread over ranks already"),
    (wrap_the_model_in_the_older_fsdp, "PrepareError", "the model is wrapped in FullyShardedDataParallel already"),
    (
        step_on_one_rank,
        "RankMismatchError",
        (
            "rank 0: wait_for_everyone() after update 1\n  rank 1: wait_for_everyone() after update 0",
            "rank 0: a gradient norm after update 1\n  rank 1: wait_for_everyone() after update 0",
        ),
    ),
    (
        gather_on_one_rank,
        "RankMismatchError",
        "rank 0: gather() after update 0\n  rank 1: wait_for_everyone() after update 0",
    ),
    (
        leave_a_model_out_on_one_rank,
        "RankMismatchError",
        (
            "models that the losses reach, a bit for each: 3 on rank 0, 2 on",
            "rank 0: a pass through a sharded model after update 0\n  rank 1: update 1",
        ),
    ),
    (
        give_a_further_loss_on_one_rank,
        "RankMismatchError",
        (
            "losses since the last step: 2 on rank 0, 1 on rank 1",
            "rank 0: a pass through a sharded model after update 0\n  rank 1: update 1",
        ),
    ),
    (step_a_plateau_on_own_metric, "RankMismatchError", "sum of the learning rates: 1 on rank 0, 0.5 on rank 1"),
    (step_on_raw_gradients_after_an_update, "TrainingStepError", "accelerator.backward() was not called for them"),
    (step_twice, "TrainingStepError", "step once after it"),
    (go_on_after_the_end, "TopologyError", "the process group of this Accelerator is closed"),
    (prepare_unlike_models, "RankMismatchError", "rank 0: weight float32[2, 2]\n  rank 1: weight float32[3, 2]"),
    (
        clip_on_one_rank,
        "RankMismatchError",
        (
            "clippings before this update: 1 on rank 0, 0 on rank 1",
            "rank 0: a gradient norm after update 0\n  rank 1: a gradient norm after update 1",
        ),
    ),
]


@two_ranks
@pytest.mark.parametrize(("mistake", "kind", "message"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_mistake_is_an_error_on_every_rank(
    topology: Topology, mistake: Callable[[Parts], None], kind: str, message: str | tuple[str, ...]
) -> None:
    raised = failures(make, mistake, topology.settings)
    assert set(raised) == {0, 1}
    for rank in raised:
        assert raised[rank][0] == kind
        assert any(one in raised[rank][1] for one in ([message] if isinstance(message, str) else message))


@two_ranks
def test_scope_left_out_on_one_rank_is_found_at_the_end(topology: Topology) -> None:
    raised = failures(make, leave_out_a_scope_on_one_rank, topology.settings)
    assert raised[0][0] == "RankMismatchError"
    assert re.search(
        r"rank 0: (update 2|a pass through a sharded model after update 1)\n  rank 1: the end of the run after",
        raised[0][1],
    )


# Parameters that the loss does not use


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.used(rows)


def train_half_used(settings: dict[str, Any]) -> float:
    with Accelerator(**settings) as accelerator:
        torch.manual_seed(0)
        model = HalfUsed()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        for _ in range(3):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.get_state_dict(model)["used.weight"].sum().item()


@pytest.mark.parametrize("kind", ["MULTI_CPU"])
def test_unused_parameters_are_named_in_the_first_step(kind: str) -> None:
    raised = failures(train_half_used, {"cpu": True, "distributed_type": kind})
    for rank in (0, 1):
        assert raised[rank][0] == "TrainingStepError"
        assert "2 of the model's parameters (unused.weight, unused.bias)" in raised[rank][1]
        assert "find_unused_parameters" in raised[rank][1]


def test_unused_parameters_are_fine_where_they_are_looked_for() -> None:
    single = ranks.run(train_half_used, {"cpu": True}, ranks=1)
    several = ranks.run(train_half_used, {"cpu": True, "ddp_config": {"find_unused_parameters": True}}, ranks=2)
    assert several == pytest.approx(single * 2, abs=1e-6)


# Settings and processes


def start_with_own_seed() -> None:
    Accelerator(cpu=True, seed=int(os.environ["RANK"]), project_dir=f"run-{os.environ['RANK']}")


def test_unlike_settings_name_rank_key_and_values() -> None:
    raised = failures(start_with_own_seed)
    for rank in (0, 1):
        assert raised[rank][0] == "RankMismatchError"
        assert "seed: 0 on rank 0, 1 on rank 1" in raised[rank][1]
        assert "project_dir: 'run-0' on rank 0, 'run-1' on rank 1" in raised[rank][1]


def start_as_one_process() -> None:
    Accelerator(cpu=True, distributed_type="NO")


def start_with_another_number() -> None:
    Accelerator(cpu=True, num_processes=3)


def test_settings_that_contradict_the_ranks_are_refused() -> None:
    for function, text in ((start_as_one_process, "`NO` is for one process"), (start_with_another_number, "3")):
        raised = failures(function)
        assert {raised[rank][0] for rank in (0, 1)} == {"ConfigError"}
        assert text in raised[0][1]


def raise_on_one_rank() -> None:
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == 1:
        raise ValueError("cause-7f3")
    accelerator.wait_for_everyone()


def test_rank_that_raises_ends_the_others() -> None:
    raised = failures(raise_on_one_rank)
    assert raised[1] == ("ValueError", "cause-7f3")


# Process groups and accelerators


def use_existing_group() -> tuple[int, int, bool]:
    with Accelerator(cpu=True) as accelerator:
        total = accelerator.reduce(torch.tensor(accelerator.process_index + 1))
    return int(total), accelerator.num_processes, dist.is_initialized()


def test_existing_process_group_is_used_and_left_open() -> None:
    assert ranks.run(use_existing_group, ranks=2, init_group=True) == [(3, 2, True)] * 2


def several_accelerators() -> list[tuple[float, int, bool]]:
    results = []
    for window in (1, 2, 1):
        with Accelerator(cpu=True, gradient_accumulation_steps=window) as accelerator:
            model = Scalar()
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
            for _ in range(2):
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.tensor([accelerator.process_index * 2.0])).mean())
                    optimizer.step()
                    optimizer.zero_grad()
            weight = accelerator.get_state_dict(model)["weight"].item()
        results.append((weight, accelerator.step, dist.is_initialized()))
    return results


def test_accelerators_one_after_the_other_do_not_disturb_each_other() -> None:
    assert ranks.run(several_accelerators, ranks=1) == [[(0.0, 2, False), (0.0, 1, False), (0.0, 2, False)]]
    assert ranks.run(several_accelerators, ranks=2) == [[(-2.0, 2, False), (-1.0, 1, False), (-2.0, 2, False)]] * 2


def second_accelerator_while_the_first_is_open() -> int:
    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    second.end_training()
    total = int(first.reduce(torch.tensor(1)))
    first.end_training()
    return total


def test_second_accelerator_leaves_the_group_of_the_first_open() -> None:
    assert ranks.run(second_accelerator_while_the_first_is_open, ranks=2) == [2, 2]


# The wrapper


def look_at_the_wrapper(folder: str) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    model = HalfUsed()
    model.name = "half used"  # type: ignore[assignment]
    prepared = accelerator.prepare(model)
    prepared.eval()
    with torch.no_grad():
        alone = prepared(torch.ones(1, 2)).shape if accelerator.is_main_process else None
    if accelerator.is_main_process:
        accelerator.save_model(prepared, folder)
    state = accelerator.get_state_dict(prepared)
    accelerator.end_training()
    return {
        "unwraps": accelerator.unwrap_model(prepared) is model,
        "is another object": prepared is not model,
        "attribute": prepared.name,
        "submodule": prepared.used is model.used,
        "mode": model.training,
        "evaluates alone": None if alone is None else tuple(alone),
        "names": sorted(state),
        "files": sorted(os.listdir(folder)) if accelerator.is_main_process else None,
    }


def test_wrapper_shows_the_model_and_evaluates_without_the_others(tmp_path: Any) -> None:
    first, second = ranks.run(look_at_the_wrapper, str(tmp_path), ranks=2)
    assert first["unwraps"]
    assert first["is another object"]
    assert (first["attribute"], first["submodule"], first["mode"]) == ("half used", True, False)
    assert first["evaluates alone"] == (1, 2)
    assert first["names"] == second["names"] == ["unused.bias", "unused.weight", "used.bias", "used.weight"]
    assert first["files"] == ["model.safetensors"]


def begin_an_epoch_more_on_rank_0(settings: dict[str, Any]) -> None:
    accelerator = Accelerator(seed=0, **settings)
    model = Scalar()
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), loader([1.0] * 8, batch_size=1)
    )
    if accelerator.is_main_process:
        next(iter(batches))
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()


@two_ranks
def test_ranks_in_unlike_epochs_are_found_in_the_first_update(topology: Topology) -> None:
    raised = failures(begin_an_epoch_more_on_rank_0, topology.settings)
    for rank in (0, 1):
        assert raised[rank][0] == "RankMismatchError"
        assert "epoch of the loader: 1 on rank 0, 0 on rank 1" in raised[rank][1]
