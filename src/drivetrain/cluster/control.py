"""Small agreements between ranks, on the CPU, that notice when ranks do different things.

Every call that needs all ranks passes through one primitive: each rank shows the others which call it is in, and a few
host numbers. Ranks that meet in different calls all see it, and raise the same error, instead of waiting for each
other or mixing up each other's data.

The numbers live on the host and travel over gloo, so nothing here reads a device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum, unique
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.errors import RankMismatchError, TopologyError

NUM_VALUES = 11
_HEAD = 2  # the call, and how far the rank is

Rows = list[list[float]]


@unique
class Call(IntEnum):
    """The calls that need every rank."""

    SETTINGS = 1
    BARRIER = 2
    UPDATE = 3
    UPDATE_REST = 4
    GATHER = 5
    REDUCE = 6
    PREPARE = 7
    ORDER = 8
    END = 9
    FORWARD = 10
    NORM = 11
    STATE = 12
    BACKWARD = 13
    BROADCAST = 14
    BROADCAST_OBJECT_LIST = 15
    PAD_ACROSS_PROCESSES = 16
    TURN = 17
    UNIT = 18
    TRIGGER = 19


_PLACES = {
    Call.SETTINGS: "Accelerator(...)",
    Call.BARRIER: "wait_for_everyone() after update {}",
    Call.UPDATE: "update {}",
    Call.UPDATE_REST: "a further loss of update {}",
    Call.GATHER: "gather() after update {}",
    Call.REDUCE: "reduce() after update {}",
    Call.PREPARE: "prepare() of a data loader after update {}",
    Call.ORDER: "the first batch of an epoch after update {}",
    Call.FORWARD: "a forward after update {}",
    Call.BACKWARD: "a backward after update {}",
    Call.UNIT: "a pass through a sharded model after update {}",
    Call.NORM: "a gradient norm after update {}",
    Call.STATE: "get_state_dict() or save_model() after update {}",
    Call.BROADCAST: "broadcast() after update {}",
    Call.BROADCAST_OBJECT_LIST: "broadcast_object_list() after update {}",
    Call.PAD_ACROSS_PROCESSES: "pad_across_processes() after update {}",
    Call.TURN: "main_process_first() or local_main_process_first() after update {}",
    Call.TRIGGER: "check_trigger() after update {}",
    Call.END: "the end of the run after update {}",
}


class Control:
    """The agreements of one run.

    Args:
        group: a gloo process group of all ranks; None on one process, where everything agrees.

    Attributes:
        updates: how many this rank has made; shown to ranks that are elsewhere.
    """

    def __init__(self, *, rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.group = group
        self.updates = 0

    def start(self, call: Call, values: Sequence[float] = (), *, tensor: Tensor | None = None) -> Agreement:
        """Begin to show this rank's place and values to all ranks; collective.

        Args:
            values: at most eleven numbers of this rank.
            tensor: one more, 0-d and on the CPU; the sum over ranks is the agreement's `tensor`, and nothing reads it.
        """
        if self.group is not None and not dist.is_initialized():
            raise TopologyError(
                "the process group of this Accelerator is closed",
                hint="make one Accelerator for the whole script, or a new one after end_training()",
            )
        # Every rank fills its own row and adds zeros to the others': a sum in which each value stays what it is.
        matrix = torch.zeros(self.world_size, _HEAD + NUM_VALUES + 1, dtype=torch.float64)
        own = matrix.numpy()[self.rank]
        own[0] = call
        own[1] = self.updates + (call in (Call.UPDATE, Call.UPDATE_REST))
        own[_HEAD : _HEAD + len(values)] = values
        if tensor is not None:
            matrix[self.rank, -1] = tensor
        work = None if self.group is None else dist.all_reduce(matrix, group=self.group, async_op=True)
        return Agreement(self, matrix=matrix, work=work)

    def agree(self, call: Call, values: Sequence[float] = ()) -> Rows:
        """Return every rank's values, a row each; collective, waits for all."""
        return self.start(call, values).wait()

    def all_equal(self, call: Call, text: str) -> bool:
        """Return whether every rank gave the same text; collective, the same answer on every rank."""
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())
        digests = [row[0] for row in self.agree(call, (float(digest),))]
        return all(other == digests[0] for other in digests)

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank; collective, for rare use: values are pickled between ranks."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values


class Agreement:
    """What all ranks show each other, under way; see `Control.start`."""

    __slots__ = ("_control", "_matrix", "_work")

    def __init__(self, control: Control, *, matrix: Tensor, work: dist.Work | None) -> None:
        self._control = control
        self._matrix = matrix
        self._work = work

    @property
    def tensor(self) -> Tensor:
        """The sum of the tensors given to `start`, 0-d, float64; to be used after `wait`."""
        return self._matrix[:, -1].sum()

    @property
    def tensors(self) -> Tensor:
        """The tensors given to `start`, by rank, float64; to be used after `wait`."""
        return self._matrix[:, -1]

    def wait(self, *, seconds: float | None = None) -> Rows:
        """Return every rank's eleven values, a row each.

        Args:
            seconds: how long to wait for the other ranks; None for the time-out of the group.

        Raises:
            RankMismatchError: ranks met in different calls; raised on every rank.
            TopologyError: a rank is gone, or did not come in time.
        """
        if self._work is not None:
            try:
                self._work.wait(*(() if seconds is None else (timedelta(seconds=seconds),)))
            except RuntimeError as error:
                own = self._matrix.numpy()[self._control.rank].tolist()
                raise TopologyError(
                    f"rank {self._control.rank} waited in {_place(own)} and another rank did not come: {error}",
                    hint="look for the rank that failed or left first; every rank must make the same calls",
                ) from error
        # Plain numbers: for few ranks quicker than arithmetic on arrays, and nothing is read from a device.
        rows: Rows = self._matrix.numpy().tolist()
        if any(row[:_HEAD] != rows[0][:_HEAD] for row in rows):
            _refuse_places(rows)
        return [row[_HEAD:-1] for row in rows]


def _place(row: Sequence[float]) -> str:
    return _PLACES[Call(int(row[0]))].format(int(row[1]))


def _refuse_places(rows: Rows) -> None:
    lines = [f"\n  rank {rank}: {_place(row)}" for rank, row in enumerate(rows)]
    raise RankMismatchError(
        f"ranks reached different calls:{''.join(lines)}",
        hint="every rank must make the same calls in the same order; look for a branch on the rank, "
        "or for unequal numbers of batches",
    )
