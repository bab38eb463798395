"""What `mixed_precision` means."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from drivetrain.errors import TopologyError
from drivetrain.precision import Precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("setting", "dtype", "scales"),
    [("no", None, False), ("bf16", torch.bfloat16, False), ("fp16", torch.float16, True)],
)
def test_setting_decides_dtype_and_loss_scale(
    setting: Literal["no", "bf16", "fp16"], dtype: torch.dtype | None, scales: bool
) -> None:
    precision = Precision.of(setting)
    assert precision == Precision(compute_dtype=dtype, scales_loss=scales)
    scaler = precision.make_scaler(CPU)
    assert (scaler is not None) == scales
    assert scaler is None or scaler.is_enabled()
    precision.check(CPU)


def test_check_when_the_device_has_no_autocast_is_an_error_only_where_it_is_needed() -> None:
    device = torch.device("meta")
    Precision.of("no").check(device)
    with pytest.raises(TopologyError, match=r"meta has no autocast for torch\.bfloat16"):
        Precision.of("bf16").check(device)
