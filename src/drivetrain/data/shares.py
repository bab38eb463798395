"""Who reads which rows: one global order per epoch, cut into micro-steps, each split over ranks.

Pure functions of (length, batch size, ranks, seed, epoch). Rows are cut in order into micro-steps of ranks x batch
rows, contiguous by rank. Only the last micro-step can be short; it is split into parts that differ by at most one
row, so a rank can be left without any.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drivetrain.cluster.seed import derive


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How the rows of an epoch are shared out.

    Args:
        length: rows of the data set.
        batch_size: rows per rank and micro-step.
        num_ranks: ranks that read different rows.
        drop_last: leave out a last micro-step that is short.
    """

    length: int
    batch_size: int
    num_ranks: int
    drop_last: bool

    @property
    def rows_per_step(self) -> int:
        """Rows of a full micro-step over all ranks."""
        return self.batch_size * self.num_ranks

    @property
    def num_steps(self) -> int:
        """Micro-steps of an epoch, the same on every rank."""
        full, rest = divmod(self.length, self.rows_per_step)
        return full + int(rest > 0 and not self.drop_last)

    def rows_of(self, step: int, *, rank: int) -> range:
        """Return the positions in the epoch's order that a rank reads in a micro-step; empty if none are left."""
        start = step * self.rows_per_step
        rows = min(self.rows_per_step, self.length - start)
        share, extra = divmod(rows, self.num_ranks)
        first = start + rank * share + min(rank, extra)
        return range(first, first + share + int(rank < extra))

    def rows_ahead(self, step: int, *, steps: int) -> int:
        """Return the rows over all ranks of a micro-step and those after it, `steps` in all or as many as are left."""
        end = min(step + steps, self.num_steps) * self.rows_per_step
        return min(end, self.length) - step * self.rows_per_step


def shuffled(length: int, *, seed: int, epoch: int) -> list[int]:
    """Return the order of an epoch: a permutation that depends on length, seed and epoch alone."""
    generator = torch.Generator()
    generator.manual_seed(derive(seed, epoch))
    order: list[int] = torch.randperm(length, generator=generator).tolist()
    return order
