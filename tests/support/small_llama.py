"""A small Llama with random weights, real text to train it on, and what a training notes of each update."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

NUM_BYTES = 32  # of a row of text
PADDING = -100  # a label that no loss counts
WARM_UP = 4
DECAY = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a training goes, wherever it runs.

    Args:
        scores: every byte, each row's loss a mean; or only some, the loss a sum over them.
        max_norm: at which gradients are clipped.
    """

    optimizer: Literal["adamw", "sgd"]
    scores: Literal["means", "sums"]
    max_norm: float

    def __str__(self) -> str:
        return f"{self.optimizer}-{self.scores}"

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of all weights."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=2e-3)
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@dataclass(slots=True, kw_only=True)
class Trace:
    """What a training did: per update the rows in order, loss, norm before clipping and learning rate."""

    rows: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


class Text(Dataset[dict[str, Any]]):
    """Rows of bytes from the standard library's files, evenly spread over them.

    Args:
        is_padded: score a row only up to its first line end: some bytes of it, or none.
    """

    def __init__(self, num_rows: int, *, is_padded: bool) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)
        all_rows = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        all_rows = all_rows[: len(text) // NUM_BYTES * NUM_BYTES].view(-1, NUM_BYTES)
        self._rows = all_rows[torch.arange(num_rows) * len(all_rows) // num_rows].long()
        self._labels = self._rows.clone()
        if is_padded:
            line_ends = (self._rows == ord("\n")).long()
            comes_later = line_ends.flip(1).cumsum(1).flip(1) - line_ends
            is_first_line = (comes_later + line_ends > 0) & (line_ends.cumsum(1) - line_ends == 0)
            self._labels[~is_first_line] = PADDING

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"input_ids": self._rows[row], "labels": self._labels[row], "row": row}


def build_model() -> nn.Module:
    """Return the model, with the same weights each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=NUM_BYTES,
        attention_dropout=0.0,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def make_schedule(optimizer: Optimizer) -> LambdaLR:
    """Return a schedule that changes the rate with every update: up first, then down."""
    return LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, 1 - step / DECAY))


def summed_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return the cross-entropy summed over the scored bytes of a batch, and how many these are."""
    labels = batch["labels"][:, 1:]
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PADDING, reduction="sum")
    return loss, int((labels != PADDING).sum())
