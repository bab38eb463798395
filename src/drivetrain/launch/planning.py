"""What a launch is going to do, as a value: made by a pure function, printed by `--dry-run`, carried out by `start`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from drivetrain.config import SETTINGS_VARIABLE, Resolved, RunConfig, Topology, accelerator_problems, without_effect
from drivetrain.errors import ConfigError, Problem
from drivetrain.launch.machine import Devices, Machine, count_visible
from drivetrain.launch.script import Script

StartMethod = Literal["exec", "fork", "spawn"]
LOCALHOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoned:
    """A detected value with the reason for it."""

    value: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One launch on one machine.

    Args:
        resolved: the settings, which every rank gets as one text.
        local_world_size: ranks on this machine.
        start_method: `exec` replaces the launcher by the script; the others keep it as the parent of the ranks.
        rendezvous: how machines find each other; a single one has nothing to find.
        master_addr: address of the first machine.
        master_port: where the ranks meet; None takes a free port.
        max_restarts: how often all ranks are started again after one failed.
        monitor_interval: seconds between two looks at the ranks where the system does not tell when one ends.
        devices: accelerators that are used, 0 for the CPU.
        threads: of each rank, for operations on the CPU.
        visible_devices: variable that hides other devices from the ranks, empty when nothing is hidden.
        log_dir: folder for the output of each rank; None leaves it on the terminal.
    """

    script: Script
    resolved: Resolved
    python: str
    num_machines: int
    machine_rank: int
    local_world_size: int
    start_method: StartMethod
    rendezvous: Literal["static", "c10d"]
    master_addr: str
    master_port: int | None
    max_restarts: int
    monitor_interval: float
    devices: Reasoned
    threads: Reasoned
    visible_devices: Mapping[str, str]
    log_dir: str | None

    @property
    def world_size(self) -> int:
        """Ranks on all machines."""
        return self.num_machines * self.local_world_size

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence for each setting that somebody set and that changes nothing in this launch.

        Raises:
            ConfigError: such a setting was typed as a flag.
        """
        topology = Topology(
            num_machines=self.num_machines,
            is_on_cpu=self.devices.value == 0,
            keeps_launcher=self.start_method != "exec",
        )
        return tuple(without_effect(self.resolved, topology=topology))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place of one rank in a running job: what a plan cannot know beforehand.

    Args:
        attempt: 0, and one more after each restart.
        launcher_holds_store: whether the launcher serves the store at the master's address, rather than rank 0.
        settings: the resolved ones, as text.
    """

    local_rank: int
    machine_rank: int
    master_addr: str
    master_port: int | str
    run_id: str
    attempt: int
    launcher_holds_store: bool
    settings: str


def plan(resolved: Resolved, *, script: Script, machine: Machine) -> LaunchPlan:
    """Return what to start on this machine.

    Raises:
        ConfigError: the settings ask for what this machine does not have.
    """
    config = resolved.config
    devices = _usable_devices(config, machine.devices)
    local_world_size = _local_world_size(config, devices)
    problems = list(_problems(config, machine.devices, devices, local_world_size))
    if problems:
        raise ConfigError([_with_source(problem, resolved) for problem in problems])
    return LaunchPlan(
        script=script,
        resolved=resolved,
        python=machine.python,
        num_machines=config.num_machines,
        machine_rank=config.machine_rank,
        local_world_size=local_world_size,
        start_method=_start_method(config, local_world_size, machine.platform),
        rendezvous=config.rdzv_backend if config.rdzv_backend and config.num_machines > 1 else "static",
        master_addr=config.main_process_ip if config.main_process_ip and config.num_machines > 1 else LOCALHOST,
        master_port=config.main_process_port,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        devices=devices,
        threads=_threads(config, machine, local_world_size),
        visible_devices=_visible_devices(config, machine.devices, devices),
        log_dir=config.log_dir,
    )


def rank_variables(plan: LaunchPlan, seat: Seat) -> dict[str, str]:
    """Return the environment variables that one rank gets on top of the launcher's: all of them, nothing else."""
    rank = seat.machine_rank * plan.local_world_size + seat.local_rank
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(seat.local_rank),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_WORLD_SIZE": str(plan.local_world_size),
        "GROUP_RANK": str(seat.machine_rank),
        "GROUP_WORLD_SIZE": str(plan.num_machines),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(plan.world_size),
        "MASTER_ADDR": seat.master_addr,
        "MASTER_PORT": str(seat.master_port),
        "TORCHELASTIC_RUN_ID": seat.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(seat.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(seat.launcher_holds_store),
        "OMP_NUM_THREADS": str(plan.threads.value),
        **plan.visible_devices,
        "DRIVETRAIN_RUN_ID": seat.run_id,
        SETTINGS_VARIABLE: seat.settings,
    }


def _usable_devices(config: RunConfig, devices: Devices) -> Reasoned:
    if config.wants_cpu:
        return Reasoned(value=0, reason="`use_cpu`" if config.use_cpu else f"`{config.distributed_type}`")
    if config.names_devices:
        return Reasoned(value=count_visible(str(config.gpu_ids)), reason=f"`gpu_ids` {config.gpu_ids}")
    return Reasoned(value=devices.visible, reason=devices.reason)


def _local_world_size(config: RunConfig, devices: Reasoned) -> int:
    if config.num_processes is not None:
        return max(1, config.num_processes // config.num_machines)
    return 1 if config.distributed_type == "NO" else max(1, devices.value)


def _problems(config: RunConfig, found: Devices, devices: Reasoned, local_world_size: int) -> Iterator[Problem]:
    if config.names_devices and not config.wants_cpu:
        missing = [name for name in _device_numbers(str(config.gpu_ids)) if name >= found.present]
        if missing or found.present == 0:
            there = f"0 to {found.present - 1}" if found.present else found.reason
            yield Problem(path="gpu_ids", message=f"this machine has no such device: {there}")
            return
    yield from accelerator_problems(config, count=devices.value, reason=devices.reason)
    if devices.value and local_world_size > devices.value:
        asked = f"{local_world_size} processes need {local_world_size} devices"
        yield Problem(
            path="num_processes",
            message=f"{asked} on this machine, {devices.value} can be used ({devices.reason})",
            hint=f"use --num_processes {devices.value * config.num_machines}, or --cpu to train on the CPU",
        )


def _with_source(problem: Problem, resolved: Resolved) -> Problem:
    source = resolved.sources.get(problem.path)
    value = getattr(resolved.config, problem.path)
    return replace(problem, value=None if value is None else str(value), source=None if source is None else str(source))


def _device_numbers(names: str) -> list[int]:
    return [int(name) for name in names.split(",") if name.strip().isdecimal()]


def _start_method(config: RunConfig, local_world_size: int, platform: str) -> StartMethod:
    needs_parent = config.max_restarts > 0 or config.log_dir is not None
    if local_world_size * config.num_machines == 1 and not needs_parent:
        return "exec"
    return config.start_method or ("fork" if platform == "linux" else "spawn")


def _threads(config: RunConfig, machine: Machine, local_world_size: int) -> Reasoned:
    if config.num_cpu_threads_per_process is not None:
        return Reasoned(value=config.num_cpu_threads_per_process, reason="`num_cpu_threads_per_process`")
    given = machine.variables.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if given.isdecimal() and int(given) > 0:
        return Reasoned(value=int(given), reason="variable OMP_NUM_THREADS")
    reason = f"{machine.cpus} usable CPUs / {local_world_size} local ranks"
    return Reasoned(value=max(1, machine.cpus // local_world_size), reason=reason)


def _visible_devices(config: RunConfig, found: Devices, devices: Reasoned) -> dict[str, str]:
    if config.names_devices and not config.wants_cpu and found.variable and devices.value:
        return {found.variable: str(config.gpu_ids)}
    return {}
