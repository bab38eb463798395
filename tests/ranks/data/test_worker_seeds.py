"""What worker processes of a loader draw: a function of seed, epoch and rank, and of nothing else."""

from __future__ import annotations

import random

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from drivetrain import Accelerator
from drivetrain.testing import ranks

EPOCHS = 2
ROWS = 4


class Noise(Dataset[Tensor]):
    """Rows that are drawn anew each time: what an augmentation does."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Tensor:
        return torch.tensor([torch.rand(()).item(), random.random()], dtype=torch.float64)


def drawn(*, seed: int) -> list[list[float]]:
    """Return what this rank's worker draws, by epoch."""
    with Accelerator(cpu=True, seed=seed) as accelerator:
        loader = accelerator.prepare(DataLoader(Noise(), num_workers=1))
        return [[value for batch in loader for value in batch.flatten().tolist()] for _ in range(EPOCHS)]


def drawn_with_seeds(seeds: list[int]) -> list[list[list[float]]]:
    return [drawn(seed=seed) for seed in seeds]


def test_draws_of_workers_when_repeated_are_the_same_and_elsewhere_are_others() -> None:
    of_rank_0, of_rank_1 = ranks.run(drawn_with_seeds, [5, 5, 6], ranks=2)
    for first, again, other in (of_rank_0, of_rank_1):
        assert again == first
        assert other != first
    epochs = [tuple(epoch) for of_rank in (of_rank_0, of_rank_1) for seed in (0, 2) for epoch in of_rank[seed]]
    assert {len(epoch) for epoch in epochs} == {2 * ROWS // 2}
    # Ranks, epochs and seeds all draw apart.
    assert len({value for epoch in epochs for value in epoch}) == len(epochs) * ROWS
