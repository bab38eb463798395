"""How an accelerator starts: settings, device, ranks, strategy, and the line that says so.

Everything that can be wrong with one rank's settings is said before the process group starts; the first thing that
ranks do together is to compare the settings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from drivetrain.cluster.control import Call
from drivetrain.cluster.device import Placement, activate, choose_device, num_accelerators
from drivetrain.cluster.environ import ProcessEnvironment, read_environ
from drivetrain.cluster.log import say
from drivetrain.cluster.process_group import Ranks, open_ranks
from drivetrain.cluster.seed import set_seed
from drivetrain.config import (
    Resolved,
    RunConfig,
    StrategySpec,
    check_accelerator,
    digest,
    resolve_for_process,
    shared_settings,
    strategy_for,
)
from drivetrain.errors import RankMismatchError
from drivetrain.precision import Precision
from drivetrain.protocols import Strategy
from drivetrain.registry import resolve
from drivetrain.strategies.common import StrategyContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What an accelerator starts from."""

    resolved: Resolved
    ranks: Ranks
    device: torch.device
    precision: Precision
    strategy: Strategy


def start(
    *, config: str | os.PathLike[str] | Mapping[str, object] | RunConfig | None, code: Mapping[str, object]
) -> Setup:
    """Resolve the settings of this process, join the other ranks, and say on rank 0 what there is; collective.

    Args:
        config: takes the place of the file.
        code: settings given in code; None for those not given.

    Raises:
        ConfigError: the settings are wrong.
        TopologyError: they do not fit the machine, or ranks differ in them.
    """
    environment = _environment()
    resolved = resolve_for_process(
        config_file=environment.config_file,
        variables=environment.variables,
        code=code,
        config=config,
        world_size=environment.world_size,
        world_source=environment.size_source,
    )
    settings = resolved.config
    spec = strategy_for(settings, world_size=environment.world_size)
    placement = choose_device(
        use_cpu=settings.wants_cpu,
        local_rank=environment.local_rank,
        local_world_size=environment.local_world_size,
    )
    check_accelerator(
        settings,
        count=0 if placement.device.type == "cpu" else num_accelerators(),
        source=resolved.sources.get("distributed_type"),
    )
    precision = Precision.of(settings.mixed_precision)
    precision.check(placement.device)
    activate(placement.device)
    implementation = resolve(spec.implementation)
    communication = implementation.communication(settings)
    ranks = open_ranks(
        environment,
        device=placement.device,
        backend=communication.backend,
        timeout_seconds=communication.timeout_seconds,
        needs_group=communication.needs_group,
    )
    _compare_settings(settings, ranks)
    if settings.seed is not None:
        set_seed(settings.seed)
    context = StrategyContext(device=placement.device, ranks=ranks, precision=precision, config=settings)
    if ranks.rank == 0:
        say(_first_line(resolved, ranks, placement, spec))
        for note in resolved.notes:
            say(note)
    return Setup(
        resolved=resolved, ranks=ranks, device=placement.device, precision=precision, strategy=implementation(context)
    )


def say_batch(*, batch_size: int, num_ranks: int, num_steps: int) -> None:
    """Print the arithmetic of the global batch; for the main rank."""
    total = batch_size * num_ranks * num_steps
    say(
        f"global batch {total} = {batch_size} per micro-batch x {num_ranks} {_plural(num_ranks, 'rank')} "
        f"x {num_steps} accumulation {_plural(num_steps, 'step')}"
    )


def _environment() -> ProcessEnvironment:
    """Return which rank this is; a process group that exists already knows best."""
    environment = read_environ()
    if not dist.is_initialized() or dist.get_world_size() == environment.world_size:
        return environment
    return replace(
        environment,
        rank=dist.get_rank(),
        local_rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_world_size=dist.get_world_size(),
        size_source="the process group that exists already",
    )


def _compare_settings(settings: RunConfig, ranks: Ranks) -> None:
    """Compare all ranks' settings; the first collective of a run."""
    if ranks.control.all_equal(Call.SETTINGS, digest(settings)):
        return
    by_rank = ranks.control.exchange(shared_settings(settings))
    lines = [
        f"\n  {key}: " + ", ".join(f"{values[key]!r} on rank {rank}" for rank, values in enumerate(by_rank))
        for key in by_rank[0]
        if any(values[key] != by_rank[0][key] for values in by_rank)
    ]
    raise RankMismatchError(
        f"ranks were started with unlike settings:{''.join(lines)}",
        hint="give every rank the same file, variables and arguments of Accelerator(...)",
    )


def _first_line(resolved: Resolved, ranks: Ranks, placement: Placement, spec: StrategySpec) -> str:
    mixed_precision = resolved.config.mixed_precision
    by_type = resolved.config.wants_cpu and not resolved.config.use_cpu
    reason = f"`distributed_type: {resolved.config.distributed_type}`" if by_type else placement.reason
    precision = "fp32" if mixed_precision == "no" else f"{mixed_precision} over fp32 parameters"
    source = resolved.sources.get("mixed_precision", "default")
    through = f" through {ranks.backend}" if ranks.backend else ""
    return (
        f"{ranks.world_size} {_plural(ranks.world_size, 'rank')} on {placement.device.type} ({reason}), "
        f"{spec.title}{through}, {precision} ({source})"
    )


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"
