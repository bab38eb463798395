"""How an accelerator starts, on one process."""

from __future__ import annotations

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.errors import ConfigError


def test_accelerator_when_its_type_needs_accelerators_and_none_is_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"MULTI_GPU \(Accelerator\(distributed_type=...\)\)\n.*needs accelerators"):
        Accelerator(distributed_type="MULTI_GPU")
