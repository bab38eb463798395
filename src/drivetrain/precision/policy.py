"""`mixed_precision` as a value: which dtype computes, and whether losses are scaled. Engines interpret it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from drivetrain.errors import TopologyError


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How numbers are computed; parameters stay in the dtype that the model has.

    Args:
        compute_dtype: of matrix products inside the model; None for that of the parameters.
        scales_loss: whether small gradients need a loss scale.
    """

    compute_dtype: torch.dtype | None
    scales_loss: bool

    @classmethod
    def of(cls, mixed_precision: Literal["no", "bf16", "fp16"]) -> Precision:
        """Return the meaning of the setting."""
        compute_dtype = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}[mixed_precision]
        return cls(compute_dtype=compute_dtype, scales_loss=mixed_precision == "fp16")

    def make_scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """Return a loss scaler for the device; None where losses are not scaled."""
        return torch.amp.GradScaler(device.type) if self.scales_loss else None

    def check(self, device: torch.device) -> None:
        """Refuse a device that cannot compute in this dtype.

        Raises:
            TopologyError: no autocast in this dtype there.
        """
        if self.compute_dtype is not None and not torch.amp.is_autocast_available(device.type):
            raise TopologyError(
                f"{device.type} has no autocast for {self.compute_dtype}", hint="use --mixed_precision no"
            )
