"""The loss rule: what one update is the gradient of.

A *scope* is one entry of `accumulate`, or all that happens between two steps where `accumulate` is not used. A
*window* is the run of scopes that makes one update. Every scope has one weight n per rank: the items that its loss
is a mean or a sum over. However scopes, ranks and counts fall,

    gradient of the update = sum over scopes and ranks of gradient(loss sum) / sum over scopes and ranks of n

An engine accumulates gradients and, with several ranks, divides their sum by its `divisor` (the number of ranks where
it averages, 1 where it adds up). So each loss is divided before its backward, and the accumulated gradient is
multiplied once at the end:

    loss divided by    base / (n * divisor)  for a mean,   base / divisor  for a sum
    gradient times     base / total items

`base` is any number that is the same for a whole window on all ranks. Where the total is known beforehand it *is* the
total, and nothing is left to multiply: a window of W equal batches is exactly `loss / W`. Elsewhere it is a power of
two, so that the result does not depend on it in any bit.

Pure: counts in, factors out. No tensors, no ranks to talk to, no engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from drivetrain.errors import TrainingStepError


class Form(StrEnum):
    """What the losses of a window are: means over their items, or sums."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What the driving loader says of the batch that a scope trains on.

    Args:
        rows: of this rank; 0 marks a filler, which takes part in collectives and contributes nothing.
        is_last: whether it is the last one of the loader's epoch; it ends the window.
        rows_ahead: rows over all ranks, in this batch and the following ones of the window, as far as the epoch goes;
            None where the loader cannot know.
        epoch: which pass over the data it belongs to.
    """

    rows: int
    is_last: bool = False
    rows_ahead: int | None = None
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What one rank, or all of them added up, put into a window.

    Args:
        items: the sum of the weights.
        means: ranks whose losses are means.
        sums: ranks whose losses are sums.
    """

    items: float
    means: int
    sums: int


class Window:
    """The scopes that make one update of one tuple of models, as this rank sees them.

    Args:
        size: scopes that the update is made of, unless the epoch ends before.
        ranks: how many read different data.
        divisor: what the engine divides the sum over ranks by.
        rows_ahead: rows over all ranks and scopes of this window; None where unknown.
        reference: the power of two to divide by where the total is unknown.

    Attributes:
        base: what the losses of this window are divided by, up to weight and divisor.
        form: means or sums; None before the first backward.
        items: the sum of the weights so far.
        scopes: how many have been entered.
        is_complete: whether the scope that is open, or was closed last, ends the window.
        loss_weight: what a loss of the open scope counts for in the sum of all: its weight for a mean, 1 for a sum.
    """

    # Read and written several times per step: plain slots, and no call where there is nothing to work out.
    __slots__ = (
        "_batch",
        "_divisor",
        "_ranks",
        "_rows_ahead",
        "_weight",
        "base",
        "form",
        "is_complete",
        "items",
        "loss_weight",
        "scopes",
        "size",
    )

    def __init__(
        self, *, size: int, ranks: int, divisor: int, rows_ahead: int | None = None, reference: float = 1.0
    ) -> None:
        self.size = size
        self._ranks = ranks
        self._divisor = divisor
        self._rows_ahead = rows_ahead
        self.base = reference * divisor
        self.form: Form | None = None
        self.items = 0.0
        self.scopes = 0
        self.is_complete = False
        self.loss_weight = 1.0
        self._batch: Batch | None = None
        self._weight: float | None = None

    @property
    def epoch(self) -> int:
        """Which pass over the data the last scope was trained on; 0 where no prepared loader drives."""
        return 0 if self._batch is None else self._batch.epoch

    def enter(self, batch: Batch | None) -> None:
        """Open the next scope, trained on `batch`; None where no prepared loader drives it."""
        self.scopes += 1
        self._batch = batch
        self._weight = None
        self.is_complete = self.scopes >= self.size or (batch is not None and batch.is_last)

    def weigh(self, num_items: float | None) -> float | None:
        """Return what a loss of the open scope is to be divided by before its backward; None for a filler.

        Args:
            num_items: what the loss is a sum over, on this rank; None for a loss that is a mean over the batch.

        Raises:
            TrainingStepError: means and sums in one window, or another `num_items` than before in this scope.
        """
        rows = 1 if self._batch is None else self._batch.rows
        form = Form.MEAN if num_items is None else Form.SUM
        weight = 0.0 if rows == 0 else float(rows) if num_items is None else _checked(num_items)
        if self.form is None:
            self.form = form
            self.base = self._known_total(form, weight) or self.base
        if form is not self.form:
            raise TrainingStepError(
                f"backward() was given a {form} in a window whose losses are {self.form}s",
                hint="give `num_items` in every backward of a window, or in none",
            )
        if self._weight is None:
            self._weight = weight
            self.items += weight
        elif form is Form.SUM and weight != self._weight:
            raise TrainingStepError(
                f"num_items={weight:g} after num_items={self._weight:g} in one scope",
                hint="losses of one scope add up and are over the same items; open another scope for other items",
            )
        self.loss_weight = 1.0 if form is Form.SUM else weight
        if rows == 0:
            return None
        return self.base / self._divisor if form is Form.SUM else self.base / (weight * self._divisor)

    def tally(self) -> Tally:
        """Return what this rank has put in so far."""
        return Tally(items=self.items, means=int(self.form is Form.MEAN), sums=int(self.form is Form.SUM))

    def factor(self, total_items: float) -> float:
        """Return what the accumulated, reduced gradient is to be multiplied by; `total_items` is over all ranks."""
        return self.base / total_items

    def _known_total(self, form: Form, weight: float) -> float | None:
        if form is Form.SUM:
            return weight if self._ranks == 1 and self.size == 1 else None
        if self._batch is None:
            return float(self.size * self._ranks)
        return self._rows_ahead


def total(tallies: Iterable[Tally]) -> Tally:
    """Return the sum over ranks."""
    items = means = sums = 0.0
    for tally in tallies:
        items, means, sums = items + tally.items, means + tally.means, sums + tally.sums
    return Tally(items=items, means=int(means), sums=int(sums))


def reference_for(total_items: float) -> float:
    """Return the power of two nearest to a total, at least 1: a good reference for the next window in fp16."""
    return 2.0 ** max(0, round(math.log2(total_items))) if total_items > 0 else 1.0


def _checked(num_items: float) -> float:
    try:
        count = math.nan if isinstance(num_items, bool | str) else float(num_items)
    except (TypeError, ValueError, RuntimeError):
        count = math.nan
    if not 0 <= count < math.inf:
        raise TrainingStepError(f"num_items={num_items!r} is not a count", hint="give the number of items, 0 or more")
    return count
