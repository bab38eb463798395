"""What the accelerator does besides training steps, on one process."""

from __future__ import annotations

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.errors import PrepareError
from scalar import Scalar, loader


def test_loop_over_a_loader_of_another_accelerator_is_refused_in_the_first_scope() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(Scalar())
    for _ in Accelerator(cpu=True).prepare(loader([1.0, 2.0, 3.0], batch_size=1)):
        with pytest.raises(PrepareError, match="from a loader that another Accelerator has prepared"):
            accelerator.accumulate(model).__enter__()
        break


def test_gathered_evaluation_is_whole_inside_the_training_loop() -> None:
    accelerator = Accelerator(cpu=True)
    batches = accelerator.prepare(loader([0.0, 1.0, 2.0], batch_size=2))
    evaluation = accelerator.prepare(loader([0.0, 1.0, 2.0, 3.0], batch_size=2))
    for _ in batches:
        collected = torch.cat(list(evaluation))
        assert accelerator.gather_for_metrics(collected).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_member_of_the_other_library_is_explained() -> None:
    with pytest.raises(AttributeError, match="save_state"):
        Accelerator(cpu=True).save_state("folder")
