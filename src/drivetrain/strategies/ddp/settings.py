"""Settings of plain data parallelism, and what contradicts them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat, PositiveInt

from drivetrain.config.section import Section, StrategySpec
from drivetrain.errors import Problem

if TYPE_CHECKING:
    from drivetrain.config.schema import CoreConfig


class DDPSettings(Section):
    """Settings of plain data parallelism."""

    backend: Literal["nccl", "gloo"] | None = None
    """Library that moves the tensors. Unset: `nccl` on CUDA devices, `gloo` on the CPU."""

    timeout: PositiveFloat | None = None
    """Seconds after which a collective call that waits for a rank fails. Unset: torch's value for the backend."""

    bucket_cap_mb: PositiveInt | None = None
    """Size in MiB of the buckets in which gradients are reduced. Unset: torch's own."""

    find_unused_parameters: bool = False
    """Look in every step for parameters that took no part in the loss."""

    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""

    broadcast_buffers: bool = True
    """Copy rank 0's buffers, such as running means, to all ranks at each forward pass."""

    gradient_as_bucket_view: bool = False
    """Let gradients be views of the buckets, which saves one copy of them."""


def _check(config: CoreConfig, _world_size: int | None) -> Iterator[Problem]:
    settings = config.section(DDPSettings)
    if config.distributed_type == "MULTI_GPU" and config.use_cpu:
        yield Problem(
            path="distributed_type",
            message="`MULTI_GPU` needs accelerators, and `use_cpu` forbids them",
            hint="use MULTI_CPU, or leave `use_cpu` out",
        )
    if config.distributed_type == "MULTI_CPU" and "use_cpu" in config.model_fields_set and not config.use_cpu:
        yield Problem(
            path="distributed_type",
            message="`MULTI_CPU` stays on the CPU, and `use_cpu` denies that",
            hint="use MULTI_GPU, or leave `use_cpu` out",
        )
    if settings.backend == "nccl" and config.wants_cpu:
        key = "use_cpu" if config.use_cpu else "distributed_type"
        yield Problem(
            path="ddp_config.backend",
            message=f"`nccl` moves tensors between CUDA devices only, and `{key}` puts the run on the CPU",
            hint="use `gloo`, or leave the backend out",
        )


SPEC = StrategySpec(
    name="ddp",
    title="data parallelism (DDP)",
    distributed_types=("MULTI_CPU", "MULTI_GPU"),
    automatic=lambda world_size: world_size > 1,
    section="ddp_config",
    flag_prefix="ddp_",
    settings=DDPSettings,
    implementation="drivetrain.strategies.ddp.strategy:DDPStrategy",
    needs_accelerator=("MULTI_GPU",),
    check=_check,
)
