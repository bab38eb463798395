"""A model of one weight whose gradient is its input, and loops over it: what a wrong scale shows in at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator


class Scalar(nn.Module):
    """The loss of an item x is w * x, so its gradient is x and does not depend on w."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), start))

    def forward(self, items: Tensor) -> Tensor:
        return self.weight * items


def weight_of(accelerator: Accelerator, model: nn.Module) -> float:
    """Return the weight, whole."""
    return accelerator.get_state_dict(model)["weight"].item()


def train_on_counts(
    settings: dict[str, Any],
    micro_batches: Sequence[Sequence[Sequence[float]]],
    *,
    start: float = 0.0,
    lr: float = 1.0,
) -> tuple[float, float, float]:
    """Train one window on token lists, `micro_batches[rank]`; return weight, logged loss and number of items."""
    with Accelerator(gradient_accumulation_steps=len(micro_batches[0]), **settings) as accelerator:
        model = Scalar(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        model, optimizer = accelerator.prepare(model, optimizer)
        for tokens in micro_batches[accelerator.process_index]:
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.tensor(tokens)).sum(), num_items=len(tokens))
                optimizer.step()
                optimizer.zero_grad()
        update = accelerator.last_update
        assert update is not None
        assert update.loss is not None
        return weight_of(accelerator, model), update.loss.item(), update.num_items


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with the parts that other ranks hold; collective where there are any."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def loader(values: Sequence[float], *, batch_size: int) -> DataLoader[Tensor]:
    """Return an unshuffled loader of single numbers."""
    return DataLoader(torch.tensor(values), batch_size=batch_size)  # type: ignore[arg-type]
