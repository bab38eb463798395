"""In which precision FSDP2 adds up what ranks have computed in bf16."""

from __future__ import annotations

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.testing import ranks
from scalar import Scalar, whole

SETTINGS = {"distributed_type": "FSDP", "cpu": True}

pytestmark = pytest.mark.deadline(60)


def gradient_over_ranks(parts: list[float]) -> float:
    with Accelerator(mixed_precision="bf16", **SETTINGS) as accelerator:
        model = Scalar()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        accelerator.backward(model(torch.tensor([parts[accelerator.process_index]])).mean())
        optimizer.step()
        return whole(model.weight.grad).item()


def test_gradients_when_computed_in_bf16_then_are_added_up_in_float32() -> None:
    # Each part fits into the 8 bits of bf16; their sum does not, and would lose the smaller one.
    parts = [1.0, 2.0**-10]
    expected = sum(parts) / 2
    assert torch.tensor(expected).bfloat16().item() != expected
    assert ranks.run(gradient_over_ranks, parts, ranks=2) == [expected] * 2
