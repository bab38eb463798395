"""What ranks tell each other of an update: how many items it holds, and the sum of its losses.

One small sum over ranks on the CPU per update. Where a scope has one backward, as nearly always, it is started before
the last backward of the window and over when that ends; where a scope has several models, a second one afterwards says
which of them its losses have reached. On an accelerator the losses, which only the device knows, are
added up there by a second one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.cluster.control import Agreement, Call, Control, Rows
from drivetrain.errors import RankMismatchError, TopologyError
from drivetrain.window import Window

_LAST_WORD_SECONDS = 2.0

_PLACE = (
    "items that the window was planned for",
    "scope of the window",
    "scopes in a window",
    "epoch of the loader",
    "losses since the last step",
    "models that the losses reach, a bit for each",
    "sum of the learning rates",
    "clippings before this update",
)


class Totals:
    """The losses since the last step of this rank, and their sums over ranks."""

    def __init__(self, control: Control, *, device: torch.device) -> None:
        self._control = control
        self._device = device
        self._losses: list[tuple[Tensor, float]] = []
        self.reset()

    def reset(self) -> None:
        """Forget all losses."""
        self._losses.clear()
        self._agreement: Agreement | None = None
        self._device_sum: Tensor | None = None
        self._device_work: dist.Work | None = None
        self._told = (0, 0)
        self._reached = 0
        self.num_backwards = 0

    def add(self, loss: Tensor | None, weight: float) -> None:
        """Count a backward; its loss is None where it contributes nothing."""
        self.num_backwards += 1
        if loss is not None:
            self._losses.append((loss, weight))

    def note_reached(self, models: int) -> None:
        """Note which of the models, a bit for each, a backward has reached."""
        self._reached |= models

    def start(self, window: Window, place: Sequence[float]) -> None:
        """Begin to tell the other ranks; nothing to do on one process, or if it has begun. Collective.

        Args:
            place: further numbers that must be the same on all ranks.
        """
        if self._control.world_size > 1 and self._agreement is None:
            self._start(Call.UPDATE, window, place)

    def agree(self, window: Window, place: Sequence[float]) -> tuple[float, Tensor | None]:
        """Return items and mean loss over all ranks; collective, waits for all.

        Raises:
            RankMismatchError: some ranks gave sums and others means, or ranks are at different places.
        """
        if self._control.world_size == 1:
            return window.items, self._mean_here(window.items)
        if self._agreement is None:
            self._start(Call.UPDATE, window, place)
        items, loss = self._wait()
        if self._told != (self.num_backwards, self._reached):
            self._start(Call.UPDATE_REST, window, place)
            items, rest = self._wait()
            loss = loss + rest
        return items, _mean(loss, items)

    def abandon(self) -> None:
        """Meet the other ranks in what was started, and forget it."""
        if self._agreement is not None:
            self._agreement.wait()

    def check_places(self) -> None:
        """Raise if ranks turn out to be at different places; waits a moment for them to say so.

        Raises:
            RankMismatchError: they are.
            TopologyError: one has left.
        """
        if self._agreement is not None:
            try:
                self._agreement.wait(seconds=_LAST_WORD_SECONDS)
            except RankMismatchError:
                raise
            except TopologyError as error:
                # One that only takes long may yet say better itself what has happened.
                if "timed out" not in str(error).lower():
                    raise

    def _start(self, call: Call, window: Window, place: Sequence[float]) -> None:
        tally = window.tally()
        tally_values = tally.items, tally.means, tally.sums
        progress = self.num_backwards, self._reached
        losses = self._sum()
        self._losses.clear()
        self._told = progress
        on_host = self._device.type == "cpu"
        self._agreement = self._control.start(
            call,
            (*tally_values, window.base, window.scopes, window.size, window.epoch, *progress, *place),
            tensor=losses if on_host else None,
        )
        if not on_host:
            self._device_sum = torch.zeros((), device=self._device) if losses is None else losses.float()
            self._device_work = dist.all_reduce(self._device_sum, async_op=True)

    def _wait(self) -> tuple[float, Tensor]:
        assert self._agreement is not None
        rows = self._agreement.wait()
        _check_forms(rows)
        _check_windows(rows)
        items = sum(row[0] for row in rows)
        if self._device_sum is None or self._device_work is None:
            return items, self._agreement.tensor
        self._device_work.wait()
        return items, self._device_sum

    def _mean_here(self, items: float) -> Tensor | None:
        if len(self._losses) == 1:
            loss, weight = self._losses[0]
            if weight == items and loss.dtype is torch.float32:
                return loss
        return _mean(self._sum(), items)

    def _sum(self) -> Tensor | None:
        total = None
        for loss, weight in self._losses:
            value = loss if weight == 1.0 else loss * weight
            total = value if total is None else total + value
        return total


def _check_forms(rows: Rows) -> None:
    with_means, with_sums = ([rank for rank, row in enumerate(rows) if row[column]] for column in (1, 2))
    if with_means and with_sums:
        raise RankMismatchError(
            f"backward() was given `num_items` on ranks {with_sums} and not on ranks {with_means}",
            hint="give it on every rank; a rank without items gives num_items=0",
        )


def _check_windows(rows: Rows) -> None:
    ranks = [rank for rank, row in enumerate(rows) if row[1] or row[2]]
    differing = [
        f"\n  {name}: " + ", ".join(f"{rows[rank][column]:g} on rank {rank}" for rank in ranks)
        for column, name in enumerate(_PLACE, 3)
        if any(rows[rank][column] != rows[ranks[0]][column] for rank in ranks)
    ]
    if differing:
        raise RankMismatchError(
            f"ranks are at different places of one update:{''.join(differing)}",
            hint="every rank must enter the same scopes, driven by the same loader, with as many losses through the "
            "same models, and step schedules alike",
        )


def _mean(total: Tensor | None, items: float) -> Tensor | None:
    if total is None or items == 0:
        return None
    return (total if items == 1.0 else total / items).float()
