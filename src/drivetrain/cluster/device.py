"""Which device a rank computes on, and why. The one place that asks `torch.accelerator` whether there is one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drivetrain.errors import TopologyError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The device of this rank with the reason for it."""

    device: torch.device
    reason: str


def choose_device(
    *, use_cpu: bool, local_rank: int, local_world_size: int, device_count: int | None = None
) -> Placement:
    """Return this rank's device: its own accelerator, or the CPU where that is asked for or nothing else is there.

    Args:
        local_rank: among the ranks of this machine.
        local_world_size: ranks on this machine.
        device_count: accelerators that this process sees; counted when not given.

    Raises:
        TopologyError: more ranks than accelerators. Fewer ranks than asked for are never started instead.
    """
    if use_cpu:
        return Placement(device=torch.device("cpu"), reason="`use_cpu`")
    count = num_accelerators() if device_count is None else device_count
    if count == 0:
        return Placement(device=torch.device("cpu"), reason="no accelerator found")
    if local_world_size > count:
        raise TopologyError(
            f"{local_world_size} ranks on this machine need {local_world_size} accelerators, {count} found",
            hint=f"launch with --num_processes {count} per machine, or with --cpu",
        )
    accelerator = torch.accelerator.current_accelerator()
    kind = "cuda" if accelerator is None else accelerator.type
    return Placement(device=torch.device(kind, local_rank), reason=f"{count} found")


def num_accelerators() -> int:
    """Return how many accelerators this process sees; 0 without any."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def activate(device: torch.device) -> None:
    """Make an accelerator the current device of this process; nothing to do for the CPU."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
