"""What a training step costs over the same torch calls by hand: on one process, and under DDP and FSDP2 on two ranks.

    python benchmarks/step.py

The loops take turns, a few steps each, so that all of them see the same machine, and the first step of a turn, which
finds the caches full of another loop's work, is not timed. `median` is over the turns, its `over` the median of the
differences to the loop by hand of the same round. `fastest` is what one turn in twenty stays below: on a machine that
does other things too, it is the number to trust.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from drivetrain import Accelerator
from drivetrain.testing import ranks

BY_HAND = "by hand"
MAX_NORM = 1.0
NUM_UNTIMED = 5  # steps that make optimizer states, buckets and caches
TURN = 10  # steps
GOAL_MICROSECONDS = 20.0  # on one process
GOAL_PERCENT = 3.0  # of a step of about 20 ms on two ranks

Loop = Iterator[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained: a network of equal layers on random rows.

    Args:
        width: of each layer.
        batch_size: per rank.
        num_steps: in an epoch.
    """

    width: int
    depth: int
    batch_size: int
    num_steps: int

    @property
    def title(self) -> str:
        """The sizes in words."""
        weights = sum(parameter.numel() for parameter in self.model().parameters())
        return f"{self.depth} layers of {self.width}, {weights:,} weights, {self.batch_size} rows per rank"

    def model(self) -> nn.Module:
        """Return the network, with the same weights each time."""
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(self.width, self.width), nn.Tanh()) for _ in range(self.depth)]
        return nn.Sequential(*layers, nn.Linear(self.width, 1))

    def data(self, *, num_ranks: int) -> TensorDataset:
        """Return rows for an epoch on so many ranks."""
        rows = torch.randn(self.batch_size * self.num_steps * num_ranks, self.width)
        return TensorDataset(rows, rows.mean(1, keepdim=True))

    def parts(self, *, num_ranks: int) -> tuple[nn.Module, Optimizer, DataLoader[Any], LRScheduler]:
        """Return model, optimizer, loader and schedule as a script makes them."""
        model = self.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = DataLoader(self.data(num_ranks=num_ranks), batch_size=self.batch_size, shuffle=True)
        return model, optimizer, loader, schedule_of(optimizer)


TINY = Workload(width=16, depth=2, batch_size=8, num_steps=500)
RANKS_WORKLOAD = Workload(width=512, depth=5, batch_size=64, num_steps=50)


def schedule_of(optimizer: Optimizer) -> LRScheduler:
    """Return a schedule that changes the rate with every step."""
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean squared error of a batch."""
    return F.mse_loss(model(batch[0]), batch[1])


# The loops: each yields after a step, and never ends


def by_hand(workload: Workload, *, clips: bool, kind: str = "NO") -> Loop:
    """Train in plain torch, under DDP or FSDP2 where a process group is open."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    model, optimizer, loader, schedule = workload.parts(num_ranks=num_ranks)
    if kind == "FSDP":
        for layer in model.children():
            if isinstance(layer, nn.Sequential):
                fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = schedule_of(optimizer)
    elif num_ranks > 1:
        model = DistributedDataParallel(model)
    if num_ranks > 1:
        sampler: DistributedSampler[Any] = DistributedSampler(loader.dataset)
        loader = DataLoader(loader.dataset, batch_size=workload.batch_size, sampler=sampler)
    while True:
        for batch in loader:
            loss_of(model, batch).backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            yield


def through(accelerator: Any, workload: Workload, *, clips: bool) -> Loop:
    """Train through an accelerator, ours or the other one: the loop is the same."""
    prepared = accelerator.prepare(*workload.parts(num_ranks=accelerator.num_processes))
    model, optimizer, loader, schedule = prepared
    while True:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                if clips:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            yield


def ours(workload: Workload, *, non_finite: str, clips: bool, kind: str) -> Loop:
    """Train with drivetrain."""
    units = {"transformer_layer_cls_to_wrap": "Sequential"} if kind == "FSDP" else None
    accelerator = Accelerator(
        cpu=True,
        non_finite=non_finite,  # type: ignore[arg-type]
        distributed_type=kind,
        fsdp_config=units,
    )
    return through(accelerator, workload, clips=clips)


def theirs(workload: Workload, *, clips: bool) -> Loop:
    """Train with Accelerate."""
    from accelerate import Accelerator as OtherAccelerator

    return through(OtherAccelerator(cpu=True), workload, clips=clips)


def other_title() -> str | None:
    """Return name and version of Accelerate; None where it is not installed."""
    with contextlib.suppress(PackageNotFoundError):
        return f"accelerate {version('accelerate')}"
    return None


def loops(workload: Workload, *, clips: bool, kind: str = "NO") -> dict[str, Loop]:
    """Return the loops to compare, by title; the one by hand first."""
    found = {BY_HAND: by_hand(workload, clips=clips, kind=kind)}
    for non_finite in ("ignore", "raise"):
        found[f"drivetrain, non_finite={non_finite}"] = ours(workload, non_finite=non_finite, clips=clips, kind=kind)
    # Accelerate has no FSDP2 on the CPU.
    if (title := other_title()) is not None and kind != "FSDP":
        found[title] = theirs(workload, clips=clips)
    return found


# Measuring


def measure(contenders: Mapping[str, Loop], *, rounds: int) -> dict[str, list[float]]:
    """Let the loops take turns; return the microseconds of a step, by round. Collective under DDP."""
    for loop in contenders.values():
        for _ in range(NUM_UNTIMED):
            next(loop)
    costs: dict[str, list[float]] = {title: [] for title in contenders}
    for _ in range(rounds):
        for title, loop in contenders.items():
            costs[title].append(_timed(loop))
    return costs


def _timed(loop: Loop) -> float:
    next(loop)
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    for _ in range(TURN):
        next(loop)
    return 1e6 * (time.perf_counter() - start) / TURN


def measure_ranks(kind: str, *, rounds: int, clips: bool) -> dict[str, list[float]]:
    """Measure a `distributed_type`; for every rank of an open group."""
    torch.set_num_threads(1)
    return measure(loops(RANKS_WORKLOAD, clips=clips, kind=kind), rounds=rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A loop beside the loop by hand, in microseconds per step, by one way to sum up the rounds."""

    by_hand: float
    over: float

    @property
    def ratio(self) -> float:
        """How many times as long as by hand."""
        return 1 + self.over / self.by_hand


def at_median(costs: Mapping[str, list[float]], title: str) -> Comparison:
    """Compare by the median difference within a round."""
    pairs = zip(costs[title], costs[BY_HAND], strict=True)
    return Comparison(
        by_hand=statistics.median(costs[BY_HAND]), over=statistics.median(own - reference for own, reference in pairs)
    )


def at_fastest(costs: Mapping[str, list[float]], title: str) -> Comparison:
    """Compare what one turn in twenty stays below."""
    own, reference = (sorted(costs[name])[len(costs[name]) // 20] for name in (title, BY_HAND))
    return Comparison(by_hand=reference, over=own - reference)


def report(heading: str, costs: Mapping[str, list[float]]) -> None:
    """Print a table: a step's time, what it takes over the loop by hand, and the ratio of the two."""
    columns = " ".join(f"{name:>9} {'over':>9} {'ratio':>7}" for name in ("median", "fastest"))
    print(f"\n{heading}\n  {'microseconds per step':32} {columns}")
    for title in costs:
        found = at_median(costs, title), at_fastest(costs, title)
        cells = " ".join(f"{one.by_hand + one.over:9.1f} {one.over:+9.1f} {one.ratio:7.3f}" for one in found)
        print(f"  {title:32} {cells}")


def judge(
    title: str, costs: Mapping[str, list[float]], *, limit: float, unit: Literal["microseconds", "percent"]
) -> None:
    """Print whether a goal is met; the median decides."""
    found = at_median(costs, title), at_fastest(costs, title)
    median, fastest = (one.over if unit == "microseconds" else 100 * (one.ratio - 1) for one in found)
    print(
        f"  goal, {title}: below {limit:g} {unit} over the loop by hand; "
        f"median {median:.1f}, fastest {fastest:.1f}: {'met' if median < limit else 'not met'}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The cost of a step over the same torch calls by hand.")
    parser.add_argument(
        "--rounds", type=int, default=300, help=f"turns of {TURN} steps for each loop; on two ranks a tenth"
    )
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, one thread per rank")

    plain = measure(loops(TINY, clips=False), rounds=rounds)
    report(f"one process: {TINY.title}", plain)
    judge("drivetrain, non_finite=ignore", plain, limit=GOAL_MICROSECONDS, unit="microseconds")
    report("one process, clipping", measure(loops(TINY, clips=True), rounds=rounds))

    for title, kind in (("DDP", "MULTI_CPU"), ("FSDP2", "FSDP")):
        for clips in (False, True):
            options = {"rounds": rounds // 10, "clips": clips}
            costs = ranks.run(measure_ranks, kind, ranks=2, timeout=600, init_group=True, **options)[0]
            report(f"{title} on 2 ranks{', clipping' if clips else ''}: {RANKS_WORKLOAD.title}", costs)
            for non_finite in ("ignore", "raise"):
                judge(f"drivetrain, non_finite={non_finite}", costs, limit=GOAL_PERCENT, unit="percent")


if __name__ == "__main__":
    main()
