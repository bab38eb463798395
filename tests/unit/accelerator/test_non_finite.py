"""A gradient that is not finite, in a part of the model that was not clipped."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.errors import NonFiniteError
from scalar import Scalar


@pytest.mark.parametrize("clipped", ["left", "right"])
def test_non_finite_gradient_when_only_a_part_is_clipped_then_ends_the_run(clipped: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.ModuleDict({"left": Scalar(), "right": Scalar()})
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward((model["left"](torch.ones(1)) + model["right"](torch.tensor([math.inf]))).sum())
    accelerator.clip_grad_norm_(model[clipped].parameters(), 1.0)
    with pytest.raises(NonFiniteError, match="update 1: the gradient is not finite"):
        optimizer.step()
    assert model["left"].weight.item() == 0.0
