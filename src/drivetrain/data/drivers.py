"""Which loader drives the training: whose batch the open scope trains on, and whose last batch ends a window.

It is the innermost prepared loader whose iteration is open and whose batch was yielded with gradients enabled. Where
two are at the same depth, as under `zip`, it is the one that was advanced first.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from drivetrain.errors import PrepareError
from drivetrain.window import Batch


class Iteration(Protocol):
    """One pass over a prepared loader."""

    @property
    def batch_size(self) -> int:
        """Rows per rank and full batch."""

    @property
    def is_training(self) -> bool:
        """Whether the batch yielded last came with gradients enabled."""

    @property
    def is_filler(self) -> bool:
        """Whether the batch yielded last only keeps this rank in step with the others."""

    def facts(self, *, window_size: int) -> Batch:
        """Return what is known of the batch yielded last, in a window of so many batches that begins with it."""


class Drivers:
    """The passes that are open, in the order in which they were advanced first.

    Holds none of them alive: one that is dropped is closed.
    """

    def __init__(self) -> None:
        self._open: list[tuple[int, weakref.ref[Iteration]]] = []
        # What runs inside the loop of another run, from beginning to end, is not driven by that loop.
        self._around = weakref.WeakSet(one for other in _ALL if (one := other._innermost(trains=True)) is not None)
        _ALL.add(self)

    def depth(self) -> int:
        """Return how deep a pass that begins now is nested: one more than those that have yielded already."""
        self._drop_dead()
        return 1 + max((depth for depth, _ in self._open), default=-1)

    def advance(self, iteration: Iteration, *, depth: int) -> None:
        """Note that a pass has yielded its first batch."""
        self._drop_dead()
        self._open.append((depth, weakref.ref(iteration)))

    def close(self, iteration: Iteration) -> None:
        """Note that a pass is over."""
        self._open = [(depth, ref) for depth, ref in self._open if ref() is not None and ref() is not iteration]

    def current(self, *, trains: bool = True) -> Iteration | None:
        """Return the innermost pass; None when none is open.

        Args:
            trains: pass over those whose batch was yielded without gradients.

        Raises:
            PrepareError: none is open here, and one that trains is open over a loader of another accelerator.
        """
        best = self._innermost(trains=trains)
        if best is None and trains and len(_ALL) > 1:
            self._refuse_other_loops()
        return best

    def _innermost(self, *, trains: bool) -> Iteration | None:
        best: Iteration | None = None
        best_depth = -1
        for depth, ref in self._open:
            iteration = ref()
            if iteration is not None and depth > best_depth and (iteration.is_training or not trains):
                best, best_depth = iteration, depth
        return best

    def _refuse_other_loops(self) -> None:
        for other in _ALL:
            iteration = other._innermost(trains=True)
            if iteration is not None and other is not self and iteration not in self._around:
                raise PrepareError(
                    "the batches of this loop come from a loader that another Accelerator has prepared, so this one "
                    "sees neither their rows nor the end of the epoch",
                    hint="prepare the loader with the Accelerator that trains on it, and keep one per training",
                )

    def _drop_dead(self) -> None:
        self._open = [(depth, ref) for depth, ref in self._open if ref() is not None]


_ALL: weakref.WeakSet[Drivers] = weakref.WeakSet()  # of this process: one for each accelerator that is still there
