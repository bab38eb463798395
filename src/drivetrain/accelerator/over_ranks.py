"""Who and where this rank is, and what ranks do with each other's values."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from drivetrain.accelerator.start import Setup
from drivetrain.cluster.collectives import Collectives
from drivetrain.cluster.control import Call
from drivetrain.cluster.log import say
from drivetrain.cluster.splitting import Part, part_of
from drivetrain.cluster.tree import num_rows, tensors_in
from drivetrain.cluster.turns import turn
from drivetrain.data.drivers import Drivers, Iteration
from drivetrain.errors import DataError, PrepareError, TopologyError

Function = Callable[..., Any]


class OverRanks:
    """The ranks of a run, and the operations over them."""

    def __init__(self, setup: Setup) -> None:
        self.config = setup.resolved.config
        self._setup = setup
        self._ranks = setup.ranks
        self._drivers = LoopDrivers()
        self._is_triggered = False
        self._collectives = Collectives(
            setup.ranks.control, device=setup.device, checks=self.config.check_collectives == "always"
        )

    # Who and where

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._setup.device

    @property
    def num_processes(self) -> int:
        """The number of ranks."""
        return self._ranks.world_size

    @property
    def process_index(self) -> int:
        """The rank of this process, from 0."""
        return self._ranks.rank

    @property
    def local_process_index(self) -> int:
        """The rank of this process among those of its machine."""
        return self._ranks.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._ranks.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self._ranks.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self._ranks.rank == self._ranks.world_size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self._ranks.world_size > 1

    @property
    def mixed_precision(self) -> str:
        """`no`, `bf16` or `fp16`."""
        return self.config.mixed_precision

    @property
    def project_dir(self) -> Path:
        """The folder of this run."""
        return Path(self.config.project_dir or ".")

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0 alone."""
        if self.is_main_process:
            print(*values, **options)

    def wait_for_everyone(self) -> None:
        """Wait until every rank is here. Collective."""
        self._ranks.control.agree(Call.BARRIER)

    # Who does what

    def on_main_process(self, function: Function | None = None) -> Any:
        """Decorate a function that rank 0 alone runs; elsewhere it returns None."""
        return _only(self.is_main_process, function, name="on_main_process")

    def on_local_main_process(self, function: Function | None = None) -> Any:
        """Decorate a function that the first rank of each machine runs; elsewhere it returns None."""
        return _only(self.is_local_main_process, function, name="on_local_main_process")

    def on_last_process(self, function: Function | None = None) -> Any:
        """Decorate a function that the last rank alone runs; elsewhere it returns None."""
        return _only(self.is_last_process, function, name="on_last_process")

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Any:
        """Decorate a function that one rank alone runs; elsewhere it returns None. A run of one rank runs it anyway.

        Raises:
            TopologyError: there is no such rank, so that nobody would run it.
        """
        is_own = self._is_own(process_index, own=self.process_index, count=self.num_processes, name="process_index")
        return _only(is_own, function, name="on_process")

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Any:
        """Decorate a function that one rank of each machine runs; elsewhere it returns None.

        A run of one rank runs it anyway.

        Raises:
            TopologyError: there is no such rank, so that nobody would run it.
        """
        is_own = self._is_own(
            local_process_index,
            own=self.local_process_index,
            count=self._ranks.local_world_size,
            name="local_process_index",
        )
        return _only(is_own, function, name="on_local_process")

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that rank 0 goes through before the others, which then read what it left. Collective.

        All ranks wait for each other at the end. An error in it ends the context on every rank, with its name.
        """
        return turn(self._ranks.control, goes_first=self.is_main_process, name="main_process_first")

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that the first rank of each machine goes through before the others. Collective.

        All ranks wait for each other at the end. An error in it ends the context on every rank, with its name.
        """
        return turn(self._ranks.control, goes_first=self.is_local_main_process, name="local_main_process_first")

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give this rank its part of what every rank has whole: contiguous, in the order of the ranks.

        Args:
            inputs: a list, tuple, tensor, array or data set with a length; or a dict of those, all of one length.
            apply_padding: repeat the last item at the end until all parts are equal. Of what is gathered, the first
                `len(inputs)` are then the results. Without it parts differ by at most one, and can be empty.

        Raises:
            DataError: it cannot be split.
        """
        part = Part(rank=self.process_index, num_ranks=self.num_processes, fills=apply_padding)
        yield part_of(inputs, part)

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Iterable[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Let a loop over unequal data be written as in Accelerate; a prepared loader needs no such context.

        It gives every rank the same number of batches, and those that only fill up count for nothing.

        Args:
            joinables: the models that are trained.
            even_batches: without effect, and said to be so when it is False.

        Raises:
            DataError: the setting `even_batches` is off, so that nothing makes batches even.
            PrepareError: there is something other than a model.
        """
        for position, model in enumerate(joinables, 1):
            if not isinstance(model, nn.Module):
                raise PrepareError(
                    f"item {position} given to join_uneven_inputs() is a {type(model).__name__}",
                    hint="pass a list of the prepared models: join_uneven_inputs([model])",
                )
        if not self.config.even_batches:
            raise DataError(
                "join_uneven_inputs() relies on loaders that give every rank the same number of batches, and "
                "`even_batches` is off",
                hint="leave `even_batches` on; batches that only fill up count for nothing",
            )
        if even_batches is False and self.is_main_process:
            say("join_uneven_inputs(even_batches=False) has no effect: batches that only fill up count for nothing")
        yield

    def set_trigger(self) -> None:
        """Raise a flag that `check_trigger` shows to all ranks; any rank may."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Return whether any rank has raised its flag since the last look, and lower them all. Collective."""
        flags = self._ranks.control.agree(Call.TRIGGER, (float(self._is_triggered),))
        self._is_triggered = False
        return any(flag for flag, *_ in flags)

    # Each other's values

    def gather(self, tensor: Any) -> Any:
        """Return the ranks' tensors joined along dim 0, in nested containers. Collective."""
        return self._collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the ranks' values of a batch joined, each row of the data once. Collective.

        Args:
            input_data: nested containers of tensors, or, without any tensor, a list of objects; per row of the batch.
            use_gather_object: take tensors for objects too.

        Raises:
            DataError: in an evaluation, a tensor has not as many rows as the batch.
        """
        iteration = self._drivers.current(trains=False)
        rows: int | None = None
        contributes = True
        if iteration is not None and self._drivers.is_training_loop(iteration):
            # A filler has one row: more rows in a batch of the training are those of an evaluation that is over.
            contributes = not iteration.is_filler or num_rows(input_data) > 1
        elif iteration is not None:
            contributes = not iteration.is_filler
            rows = iteration.facts(window_size=1).rows if contributes else None
        if use_gather_object or next(tensors_in(input_data), None) is None:
            return self._collectives.gather_object(input_data, contributes=contributes)
        return self._collectives.gather(input_data, contributes=contributes, rows=rows)

    def gather_object(self, object: Any) -> list[Any]:  # noqa: A002 - the name that users know
        """Return the ranks' lists joined, by rank; of any objects that can be pickled. Collective."""
        return self._collectives.gather_object(object)

    def reduce(self, tensor: Any, reduction: Literal["sum", "mean", "none"] = "sum", scale: float = 1.0) -> Any:
        """Return the ranks' tensors added up or averaged elementwise, in nested containers. Collective."""
        return self._collectives.reduce(tensor, reduction=reduction, scale=scale)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Return the tensors of one rank, in nested containers; those that were given stay as they are. Collective."""
        return self._collectives.broadcast(tensor, source=from_process)

    def broadcast_object_list(self, object_list: list[Any], from_process: int = 0) -> list[Any]:
        """Put the objects of one rank's list into everyone's, in place, and return it. Collective."""
        self._collectives.broadcast_object_list(object_list, source=from_process)
        return object_list

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Return this rank's tensors as long in `dim` as the longest of any rank, in nested containers. Collective.

        Args:
            pad_index: what is filled in, at the end or, if `pad_first`, at the beginning.
        """
        return self._collectives.pad(tensor, dim=dim, fill=pad_index, first=pad_first)

    def _is_own(self, index: int | None, *, own: int, count: int, name: str) -> bool:
        """Return whether an index given to a decorator means this rank."""
        is_number = isinstance(index, int) and not isinstance(index, bool)
        if is_number and not self.use_distributed:
            return True
        if not is_number or index not in range(count):
            raise TopologyError(
                f"{name}={index!r} is no rank, so nobody would run the function",
                hint=f"give `{name}` a number from 0 to {count - 1}",
            )
        return index == own


class LoopDrivers(Drivers):
    """Drivers that also tell the loop of the training from that of an evaluation, however its batches were yielded."""

    def __init__(self) -> None:
        super().__init__()
        self._of_training: weakref.WeakSet[Any] = weakref.WeakSet()

    def current(self, *, trains: bool = True) -> Iteration | None:
        found = super().current(trains=trains)
        if trains and found is not None:  # a scope asks for it
            self._of_training.add(found)
        return found

    def close(self, iteration: Iteration) -> None:
        super().close(iteration)
        around = super().current(trains=False)
        if around is not None:  # an evaluation has no loop of its own inside
            self._of_training.add(around)

    def is_training_loop(self, iteration: Iteration) -> bool:
        """Return whether a pass has made a scope, or had another pass in it from beginning to end."""
        return iteration in self._of_training


def _only(is_here: bool, function: Function | None, *, name: str) -> Any:
    """Return a function as it is, or on the other ranks one that does nothing; a decorator if there is none yet."""
    if function is None:
        return lambda decorated: _only(is_here, decorated, name=name)
    if not callable(function):
        raise TypeError(f"{name}() decorates functions, and was given {function!r}; name the index")
    return function if is_here else wraps(function)(lambda *_args, **_options: None)
