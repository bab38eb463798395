"""CASES 24 b: how often the library makes the host read a value that only the device knows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.cluster.control import Call, Control
from drivetrain.testing import ranks
from host_reads import LIBRARY, READS, counted_reads
from topologies import Topology, topologies

NUM_STEPS = 100
LOG_EVERY = 50
BATCH_SIZE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A way to train, and how many reads it may take per update."""

    non_finite: Literal["raise", "skip", "ignore"]
    reads: int
    is_fused: bool = False
    clips: bool = False
    mixed_precision: Literal["no", "fp16"] = "no"

    def __str__(self) -> str:
        facts = {"fused": self.is_fused, "clipped": self.clips, "fp16": self.mixed_precision == "fp16"}
        return "-".join([self.non_finite, *(name for name, holds in facts.items() if holds)])


CASES = [
    Case(non_finite="ignore", reads=0),
    Case(non_finite="ignore", reads=0, clips=True),
    Case(non_finite="skip", reads=0, is_fused=True),
    Case(non_finite="skip", reads=0, is_fused=True, clips=True),
    Case(non_finite="skip", reads=1),
    Case(non_finite="skip", reads=1, mixed_precision="fp16"),
    Case(non_finite="raise", reads=1, is_fused=True),
    Case(non_finite="raise", reads=1, is_fused=True, clips=True),
]
WINDOWS = (1, 4)
TOPOLOGIES = topologies(1, 2)

pytestmark = pytest.mark.deadline(90)


def reads_of(case: Case, *, window: int, settings: dict[str, Any]) -> tuple[dict[str, int], list[float]]:
    """Train for `NUM_STEPS` batches; return the reads, and the losses that the script itself looked at."""
    with Accelerator(
        gradient_accumulation_steps=window,
        non_finite=case.non_finite,
        mixed_precision=case.mixed_precision,
        **settings,
    ) as accelerator:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), fused=case.is_fused)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        data = TensorDataset(torch.randn(BATCH_SIZE * NUM_STEPS * accelerator.num_processes, 4))
        loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
        model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
        batches = iter(loader)  # the order of an epoch is drawn, on the host, before its first step
        losses = []
        with counted_reads() as reads:
            for step, (rows,) in enumerate(batches, 1):
                with accelerator.accumulate(model):
                    accelerator.backward(model(rows).square().mean())
                    if case.clips:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if step % LOG_EVERY == 0:
                    losses.append(accelerator.last_update.loss.item())
        assert accelerator.step == NUM_STEPS // window
        return dict(reads), losses


def all_reads(settings: dict[str, Any]) -> dict[tuple[Case, int], tuple[dict[str, int], list[float]]]:
    return {(case, window): reads_of(case, window=window, settings=settings) for case in CASES for window in WINDOWS}


@cache
def all_reads_on(topology: Topology) -> list[dict[tuple[Case, int], tuple[dict[str, int], list[float]]]]:
    return ranks.run(all_reads, topology.settings, ranks=topology.ranks, timeout=80)


# An engine that gathers parameters meets the other ranks before it does so.
_OF_SHARDED_MODELS = {Call.FORWARD, Call.BACKWARD, Call.UNIT, Call.NORM}


def sums_over_ranks(settings: dict[str, Any], *, window: int) -> int:
    """Return how many small sums over ranks a run of `NUM_STEPS` batches starts, besides those of its forwards."""
    started: Counter[Call] = Counter()
    start = Control.start

    def counting(control: Control, call: Call, *args: Any, **kwargs: Any) -> Any:
        started[call] += 1
        return start(control, call, *args, **kwargs)

    with mock.patch.object(Control, "start", counting):
        reads_of(CASES[0], window=window, settings=settings)
    return sum(count for call, count in started.items() if call not in _OF_SHARDED_MODELS)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_when_run_then_the_host_reads_the_device_no_more_than_documented(
    case: Case, window: int, topology: Topology
) -> None:
    for by_case in all_reads_on(topology):
        reads, losses = by_case[case, window]
        assert sum(reads.values()) <= case.reads * NUM_STEPS // window, reads
        if case.reads:
            assert sum(reads.values()) > 0  # else the counting itself would be broken
        assert len(losses) == NUM_STEPS // LOG_EVERY


@pytest.mark.parametrize("topology", topologies(2), ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_updates_when_ranks_are_several_then_each_takes_one_small_sum_over_them(
    window: int, topology: Topology
) -> None:
    num_updates = NUM_STEPS // window
    num_others = 10  # at the start, in prepare() and at the end
    for count in ranks.run(sums_over_ranks, topology.settings, window=window, ranks=topology.ranks):
        assert num_updates <= count <= num_updates + num_others


def run_as_if_ours(code: str, value: torch.Tensor) -> None:
    """Run code as if it stood in a file of the library."""
    exec(compile(code, f"{LIBRARY}/read.py", "exec"), {"value": value})


@pytest.mark.parametrize("name", READS)
def test_counter_when_the_library_reads_then_it_sees_that_and_nobody_elses(name: str) -> None:
    value = torch.ones((), dtype=torch.int64)
    with counted_reads() as reads:
        run_as_if_ours(f"value.{name}()", value)
        getattr(value, name)()
    assert reads == {f"{name} at read.py:1": 1}


def test_counter_when_a_read_is_hidden_in_the_language_or_in_torch_then_it_sees_that_too() -> None:
    with counted_reads() as reads:
        run_as_if_ours("if value:\n    f'{value:g}'", torch.ones(()))
    assert reads == {"__bool__ at read.py:1": 1, "item at read.py:2": 1}
