"""Training in bf16 and fp16 on one process and on DDP: close to fp32, and right when the loss scale is too large."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain.testing import ranks

Setting = Literal["no", "bf16", "fp16"]
COUNTS = (1, 2)
WINDOWS = (1, 2)
GLOBAL_MICRO_BATCH = 4
FIRST_SCALE = 65536.0  # torch's default
# A number is rounded to 11 bits in fp16 and to 8 in bf16. Gradients of a layer pass through about four roundings, and
# those of 13 rows average out; a wrong scale or a lost row changes results by tens of percent.
TOLERANCE = {"bf16": 4 * 2.0**-8, "fp16": 4 * 2.0**-11}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a training noted after each update, and the weights at its end."""

    losses: list[float]
    norms: list[float]
    weights: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What was seen of one update.

    Args:
        scale: that its last loss was scaled by.
        rate: after the schedule was stepped.
    """

    scale: float
    weights: list[float]
    skipped: bool
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What one rank saw, by precision and window, or by number of optimizers and window."""

    traces: dict[tuple[str, int], Trace]
    overflows: dict[tuple[int, int], tuple[list[Step], int, int]]


def train(precision: Setting, *, window: int) -> Trace:
    """Train on rows in order, the last window short; gradients are clipped to where about every second one is."""
    torch.manual_seed(0)
    rows: Any = torch.randn(13, 8)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    losses, norms = [], []
    with Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=window) as accelerator:
        loader = DataLoader(rows, batch_size=GLOBAL_MICRO_BATCH // accelerator.num_processes)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for _ in range(2):
            for batch in loader:
                with accelerator.accumulate(model):
                    output = model(batch)
                    assert output.dtype is torch.float32
                    accelerator.backward((output - batch[:, :4]).square().mean())
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.6)
                    optimizer.step()
                    optimizer.zero_grad()
                if norm is not None and accelerator.last_update is not None:
                    norms.append(norm.item())
                    losses.append(accelerator.last_update.loss.item())
        weights = torch.cat([value.flatten() for value in accelerator.get_state_dict(model).values()])
    return Trace(losses=losses, norms=norms, weights=weights.clone())


def overflow(*, num_optimizers: int, window: int) -> tuple[list[Step], int, int]:
    """Make four updates with gradients of 1/16; in the second, one loss of the last rank is 2**14 times as large.

    Returns:
        The updates, how many steps of optimizers were skipped, and the accelerator's count of updates.
    """
    model: Any = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    steps = []
    with Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=window) as accelerator:
        groups = [[model.weight], [model.bias]] if num_optimizers == 2 else [[model.weight, model.bias]]
        optimizers = [torch.optim.SGD(group, lr=1.0) for group in groups]
        schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda k: 1 - k / 10) for each in optimizers]
        model, *prepared = accelerator.prepare(model, *optimizers, *schedules)
        for update in range(4):
            for scope in range(window):
                is_large = update == 1 and scope == 0 and accelerator.is_last_process
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.ones(1, 1)).mean() * (2.0**10 if is_large else 2.0**-4))
                    assert accelerator.scaler is not None
                    scale = accelerator.scaler.get_scale()
                    for each in prepared:
                        each.step()
                    for each in prepared[:num_optimizers]:
                        each.zero_grad()
            last = accelerator.last_update
            assert last is not None
            assert bool(last.skipped) == accelerator.optimizer_step_was_skipped
            state = accelerator.get_state_dict(model)
            rates = {schedule.get_last_lr()[0] for schedule in prepared[num_optimizers:]}
            steps.append(
                Step(
                    scale=scale,
                    weights=[state["weight"].item(), state["bias"].item()],
                    skipped=accelerator.optimizer_step_was_skipped,
                    rate=rates.pop(),
                )
            )
            assert not rates
        return steps, int(accelerator.num_skipped_steps), accelerator.step


def train_in_every_way() -> Results:
    precisions: tuple[Setting, ...] = ("no", "bf16", "fp16")
    return Results(
        traces={(precision, window): train(precision, window=window) for precision in precisions for window in WINDOWS},
        overflows={
            (count, window): overflow(num_optimizers=count, window=window) for count in (1, 2) for window in WINDOWS
        },
    )


@pytest.fixture(scope="module")
def results() -> dict[int, list[Results]]:
    """What ranks saw, by number of ranks and by rank."""
    return {count: ranks.run(train_in_every_way, ranks=count) for count in COUNTS}


every_count = pytest.mark.parametrize("count", COUNTS)
every_window = pytest.mark.parametrize("window", WINDOWS)


def relative(difference: Tensor, whole: Tensor) -> float:
    return (difference.norm() / whole.norm()).item()


@every_count
@every_window
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_training_in_half_precision_follows_fp32(
    results: dict[int, list[Results]], count: int, window: int, precision: str
) -> None:
    exact = results[1][0].traces["no", window]
    assert len(exact.losses) == 2 * (4 if window == 1 else 2)
    for one in results[count]:
        trace = one.traces[precision, window]
        assert trace.losses == pytest.approx(exact.losses, rel=TOLERANCE[precision])
        assert trace.norms == pytest.approx(exact.norms, rel=TOLERANCE[precision])
        error = relative(trace.weights - exact.weights, exact.weights)
        # Not nothing: then the model would not have computed in half precision at all.
        assert 2.0**-24 < error < TOLERANCE[precision]
        assert torch.equal(trace.weights, results[count][0].traces[precision, window].weights)


@every_count
@every_window
@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_update_when_the_loss_scale_is_too_large_is_left_out_and_the_scale_halved(
    results: dict[int, list[Results]], count: int, window: int, num_optimizers: int
) -> None:
    rates = [1.0, 1.0 - 1 / 10, 1.0 - 2 / 10]
    weights = [-1 / 16]
    weights += [weights[0], weights[0] - rates[1] / 16]
    weights += [weights[2] - rates[2] / 16]
    for one in results[count]:
        steps, num_skipped, num_updates = one.overflows[num_optimizers, window]
        assert [step.skipped for step in steps] == [False, True, False, False]
        assert [step.scale for step in steps] == [FIRST_SCALE, FIRST_SCALE, FIRST_SCALE / 2, FIRST_SCALE / 2]
        assert [step.rate for step in steps] == pytest.approx([rates[1], rates[1], rates[2], 1 - 3 / 10])
        for step, expected in zip(steps, weights, strict=True):
            assert step.weights == pytest.approx([expected] * 2, rel=1e-6)
        assert (num_skipped, num_updates) == (num_optimizers, 4)
