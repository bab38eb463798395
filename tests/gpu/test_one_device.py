"""One process on one accelerator: the same paths as on the CPU, and a host that waits for nothing it need not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from scalar import loader, train_on_counts


def test_tokens_in_two_micro_batches_weigh_alike() -> None:
    assert train_on_counts({}, [[[10.0], [0.0, 0.0, 0.0, 0.0]]]) == (-2.0, 0.0, 5.0)


def trained(**settings: Any) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(**settings)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    return accelerator, *accelerator.prepare(model, optimizer)


def test_device_is_the_accelerator_and_batches_are_moved_there() -> None:
    accelerator, model, _ = trained()
    assert accelerator.device.type == torch.accelerator.current_accelerator().type
    (batch, *_) = list(accelerator.prepare(loader([1.0] * 4, batch_size=2)))
    assert batch.device.type == accelerator.device.type
    assert next(model.parameters()).device.type == accelerator.device.type


@pytest.mark.parametrize("distributed_type", ["NO", "FSDP"])
@pytest.mark.parametrize("non_finite", ["skip", "ignore"])
def test_step_never_waits_for_the_device(non_finite: str, distributed_type: str) -> None:
    accelerator, model, optimizer = trained(non_finite=non_finite, distributed_type=distributed_type)
    rows = torch.ones(4, 8, device=accelerator.device)

    def step() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        accelerator.end_training()
    assert accelerator.last_update.loss.device.type == accelerator.device.type


@pytest.mark.parametrize("mixed_precision", ["bf16", "fp16"])
def test_mixed_precision_trains(mixed_precision: str) -> None:
    torch.manual_seed(0)
    accelerator, model, optimizer = trained(mixed_precision=mixed_precision)
    rows = torch.randn(16, 8, device=accelerator.device)
    losses = []
    for _ in range(20):
        loss = model(rows).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
