"""How many scopes make an update: as asked for, or derived from the global batch."""

from __future__ import annotations

from typing import Protocol

from drivetrain.config import Resolved
from drivetrain.data.drivers import Iteration
from drivetrain.errors import ConfigError, Problem


class Announce(Protocol):
    """Says the arithmetic of the global batch."""

    def __call__(self, *, batch_size: int, num_ranks: int, num_steps: int) -> None: ...


class WindowSize:
    """The size of windows, asked when one begins; calling it is all that costs per update.

    Args:
        announce: called once, when the batch size is known.

    Attributes:
        steps: scopes per window, as far as known.
    """

    def __init__(self, resolved: Resolved, *, num_ranks: int, announce: Announce | None) -> None:
        self._global_batch = resolved.config.global_batch_size
        self._asked = resolved.config.gradient_accumulation_steps
        self._sources = resolved.sources
        self._num_ranks = num_ranks
        self._announce = announce
        self._batch_size: int | None = None
        self.steps = self._asked or 1

    def set_steps(self, steps: int) -> None:
        """Change the number from the next window on.

        Raises:
            ConfigError: it is not a positive number, or `global_batch_size` sets it.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError([_assigned(steps, "must be 1 or more")])
        if self._global_batch is not None:
            message = f"is derived from `global_batch_size` = {self._global_batch}"
            raise ConfigError([_assigned(steps, message)])
        self.steps = steps

    def __call__(self, iteration: Iteration | None) -> int:
        """Return the size of a window that begins with the batch that `iteration` yielded last.

        Raises:
            ConfigError: the global batch is no multiple of batch size x ranks, or no loader gives a batch size.
        """
        batch_size = None if iteration is None else iteration.batch_size
        if batch_size == self._batch_size and batch_size is not None:
            return self.steps
        if self._global_batch is not None:
            self.steps = self._derive(self._global_batch, batch_size)
        if batch_size is not None:
            self._batch_size = batch_size
            if self._announce is not None:
                self._announce(batch_size=batch_size, num_ranks=self._num_ranks, num_steps=self.steps)
        return self.steps

    def _derive(self, global_batch: int, batch_size: int | None) -> int:
        if batch_size is None:
            message = "no prepared loader says how many rows a batch has"
            hint = "prepare the data loader that the training reads, or set `gradient_accumulation_steps` instead"
            raise ConfigError([self._problem("global_batch_size", global_batch, message, hint=hint)])
        per_step = batch_size * self._num_ranks
        steps, rest = divmod(global_batch, per_step)
        if rest or steps == 0:
            message = f"is no multiple of {per_step} = {batch_size} per micro-batch x {self._num_ranks} ranks"
            raise ConfigError(
                [self._problem("global_batch_size", global_batch, message, hint=self._advice(global_batch))]
            )
        if self._asked is not None and self._asked != steps:
            message = (
                f"makes {steps} accumulation steps of {per_step} rows, "
                f"and `gradient_accumulation_steps` = {self._asked} ({self._sources['gradient_accumulation_steps']})"
            )
            raise ConfigError([self._problem("global_batch_size", global_batch, message, hint="give one of the two")])
        return steps

    def _advice(self, global_batch: int) -> str:
        share, rest = divmod(global_batch, self._num_ranks)
        if rest:
            return f"{self._num_ranks} ranks need a global batch that they divide"
        sizes = ", ".join(str(size) for size in range(1, share + 1) if share % size == 0)
        return f"batch sizes that divide: {sizes}"

    def _problem(self, path: str, value: object, message: str, *, hint: str | None = None) -> Problem:
        source = str(self._sources[path]) if path in self._sources else None
        return Problem(path=path, value=str(value), source=source, message=message, hint=hint)


def _assigned(steps: object, message: str) -> Problem:
    path = "gradient_accumulation_steps"
    return Problem(path=path, value=str(steps), source=f"accelerator.{path} = ...", message=message)
