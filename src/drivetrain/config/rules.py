"""Rules between settings: small functions that return problems; a strategy adds its own through its `StrategySpec`.

A rule knows values, not where they come from: `resolve` adds the source of a problem's `path` and of each further
setting that the message names in backticks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from drivetrain.config.keys import did_you_mean
from drivetrain.config.schema import CoreConfig
from drivetrain.errors import Problem
from drivetrain.registry import strategy_specs, tracker_specs


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What is known of the processes that exist already.

    Args:
        size: number of ranks; None before any is started.
        source: what says so.
    """

    size: int | None
    source: str


def check(config: CoreConfig, *, world: World) -> Iterator[Problem]:
    """Yield all contradictions between settings, and between settings and the ranks that run."""
    for rule in _RULES:
        yield from rule(config, world)
    for spec in strategy_specs():
        yield from spec.check(config, world.size)


def _machines_divide_processes(config: CoreConfig, _world: World) -> Iterator[Problem]:
    if config.num_processes is not None and config.num_processes % config.num_machines:
        yield Problem(
            path="num_processes",
            message=f"{config.num_processes} processes cannot be shared out equally, see `num_machines`",
            hint="`num_processes` counts the processes of all machines together",
        )


def _machine_rank_exists(config: CoreConfig, _world: World) -> Iterator[Problem]:
    if config.machine_rank >= config.num_machines:
        yield Problem(
            path="machine_rank",
            message=f"ranks of machines go from 0 to {config.num_machines - 1}, see `num_machines`",
            hint="number the machines from 0",
        )


def _machines_need_an_address(config: CoreConfig, world: World) -> Iterator[Problem]:
    if world.size is not None or config.num_machines == 1:
        return
    missing = [key for key in ("main_process_ip", "main_process_port") if getattr(config, key) is None]
    if missing:
        yield Problem(
            path="num_machines",
            message=f"several machines need {' and '.join(missing)} to find each other",
            hint=" ".join(f"--{key} ..." for key in missing) + ", the same on every machine",
        )


def _world_has_the_size_asked_for(config: CoreConfig, world: World) -> Iterator[Problem]:
    if world.size is None or config.num_processes in (None, world.size):
        return
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
    start = "start the script with `drivetrain launch`" if world.size == 1 else f"use {world.size}"
    yield Problem(
        path="num_processes",
        message=f"this run has {ranks} ({world.source})",
        hint=f"{start}, or leave `num_processes` out",
    )


def _cpu_has_no_devices(config: CoreConfig, _world: World) -> Iterator[Problem]:
    if config.wants_cpu and config.names_devices:
        key = "use_cpu" if config.use_cpu else "distributed_type"
        yield Problem(
            path="gpu_ids",
            message=f"this picks devices, and `{key}` forbids them",
            hint="leave one of the two out",
        )


def _trackers_are_there(config: CoreConfig, _world: World) -> Iterator[Problem]:
    if not config.trackers:
        return
    if "none" in config.trackers and len(config.trackers) > 1:
        yield Problem(path="log_with", message="`none` goes with no other name", hint="leave it or the others out")
    specs = tracker_specs()
    for name in config.trackers:
        if name in ("all", "none"):
            continue
        if name not in specs:
            yield Problem(
                path="log_with",
                message=f"there is no tracker {name!r}; allowed: {', '.join(specs)}, all, none",
                hint=did_you_mean(name, specs) or "one of your own goes into code: Accelerator(log_with=MyTracker)",
            )
        elif not specs[name].is_installed:
            yield Problem(
                path="log_with",
                message=f"the package {specs[name].package!r} is not installed",
                hint=f"pip install 'drivetrain[{name}]'",
            )


_RULES: tuple[Callable[[CoreConfig, World], Iterator[Problem]], ...] = (
    _machines_divide_processes,
    _machine_rank_exists,
    _machines_need_an_address,
    _world_has_the_size_asked_for,
    _cpu_has_no_devices,
    _trackers_are_there,
)
