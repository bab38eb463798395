"""Ranks compare which unit they gather or spread before they do so, on the CPU: unlike ones would mix, or wait forever.

Torch gathers whatever comes next on each rank. Where ranks run different parts of a model, parameters of one block land
in another without a sign, or every rank waits for a message that nobody sends.

A meeting for each unit costs a third of a small step, so they are held during the first updates, where most mistakes
show. Later the ranks compare what they ran since the last pass: blocks that mix are found, and ranks that wait for each
other inside a pass wait for the time-out.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

from drivetrain.cluster.control import Call, Control
from drivetrain.errors import RankMismatchError

_UPDATES_WITH_MEETINGS = 3
_HINT = "every rank must run the same parts of a model, with the same parameters trained; look for a branch on the rank"


class UnitWatch:
    """The meetings of ranks before each unit of their models travels; nobody goes on before all are there."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._num_units = 0
        self._passed = 0

    def watch(self, group: Any, *, name: str, keeps_graph: Callable[[], bool]) -> None:
        """Hold a meeting before the parameters of a unit are gathered, and before its gradients are spread.

        Args:
            group: torch's own record of the unit.
            keeps_graph: whether the model's forward is one that a backward can follow.
        """
        number, self._num_units = self._num_units, self._num_units + 1
        gather, spread, pieces = group._all_gather_comm, group.post_backward, group.fsdp_params

        def spread_after_meeting(*unused: Any) -> Any:
            if group.reduce_grads:
                used = [_has_gradient(piece) for piece in pieces]
                self._meet((number, 1, zlib.crc32(bytes(used))), lambda: _spreading(name, pieces, used))
            return spread(*unused)

        def meet_to_gather() -> None:
            trained = [bool(piece.sharded_param.requires_grad) for piece in pieces]
            grad = keeps_graph()
            self._meet((number, 0, 2 * zlib.crc32(bytes(trained)) + grad), lambda: _gathering(name, trained, grad))

        group._all_gather_comm = _AfterMeeting(gather, meet_to_gather)
        group.post_backward = spread_after_meeting

    def begin_pass(self, call: Call) -> None:
        """Meet before a forward or backward, where units do not meet one by one any more; collective.

        Raises:
            RankMismatchError: ranks are at different places, or have run different parts since they met last.
        """
        if self._control.updates < _UPDATES_WITH_MEETINGS:
            return
        passed, self._passed = self._passed, 0
        rows = self._control.agree(call, (float(passed),))
        if any(row != rows[0] for row in rows):
            raise RankMismatchError("ranks have run different parts of a sharded model in the last pass", hint=_HINT)

    def _meet(self, values: Sequence[float], describe: Callable[[], str]) -> None:
        if self._control.updates >= _UPDATES_WITH_MEETINGS:
            self._passed = zlib.crc32(repr((self._passed, *values)).encode())
            return
        rows = self._control.agree(Call.UNIT, values)
        if any(row != rows[0] for row in rows):
            # All ranks see this, and are here.
            lines = [f"\n  rank {rank}: {text}" for rank, text in enumerate(self._control.exchange(describe()))]
            raise RankMismatchError(f"ranks run different parts of a sharded model:{''.join(lines)}", hint=_HINT)


class _AfterMeeting:
    """A way to gather that meets the other ranks first."""

    def __init__(self, gather: Any, meet: Callable[[], None]) -> None:
        self._gather = gather
        self._meet = meet

    def allocate(self, *arguments: Any, **options: Any) -> Any:
        """Return room for what is gathered."""
        return self._gather.allocate(*arguments, **options)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Meet and gather."""
        self._meet()
        return self._gather(*arguments, **options)


def _has_gradient(piece: Any) -> bool:
    whole = getattr(piece, "_unsharded_param", None)
    return piece.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def _gathering(name: str, trained: Sequence[bool], grad: bool) -> str:
    mode = "with gradients" if grad else "without gradients"
    return f"gathers {name} {mode}, {sum(trained)} of its {len(trained)} parameters trained"


def _spreading(name: str, pieces: Sequence[Any], used: Sequence[bool]) -> str:
    unused = [piece._param_fqn or "a parameter" for piece, is_used in zip(pieces, used, strict=True) if not is_used]
    return f"spreads gradients of {name}" + (f", none of {', '.join(unused)}" if unused else "")
