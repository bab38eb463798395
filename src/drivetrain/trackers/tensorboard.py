"""Logs to TensorBoard's event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from drivetrain.trackers.tracker import Tracker
from drivetrain.trackers.values import Scalar, flat_configuration, numbers_in, texts_in


class TensorBoardTracker(Tracker):
    """Writes to the folder `logging_dir/project_name`.

    Args:
        project_name: name of the run's folder.
        logging_dir: what `tensorboard --logdir` is to read.
        options: of torch's `SummaryWriter`.
    """

    name = "tensorboard"

    def __init__(self, project_name: str, *, logging_dir: Path, **options: Any) -> None:
        self._writer: Any = SummaryWriter(**{"log_dir": str(logging_dir / project_name), **options})

    @property
    def tracker(self) -> Any:
        """The writer, a `torch.utils.tensorboard.SummaryWriter`."""
        return self._writer

    def store_init_configuration(self, values: Mapping[str, object]) -> None:
        """Record the configuration as hyperparameters, with dotted keys."""
        # `add_hparams` of the writer would open a second event file for them.
        for summary in hparams(flat_configuration(values), metric_dict={}):
            self._writer.file_writer.add_summary(summary)
        self._writer.flush()

    def log(self, values: Mapping[str, Scalar], step: int, **options: Any) -> None:
        """Record numbers as scalars and texts as texts.

        Args:
            options: of `add_scalar` and `add_text`, such as `walltime`.
        """
        for key, number in numbers_in(values).items():
            self._writer.add_scalar(key, number, global_step=step, **options)
        for key, text in texts_in(values).items():
            self._writer.add_text(key, text, global_step=step, **options)
        self._writer.flush()

    def finish(self) -> None:
        """Close the event file."""
        self._writer.close()
