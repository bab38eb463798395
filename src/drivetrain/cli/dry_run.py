"""What `launch --dry-run` prints: the plan, the settings with their sources, the variables of each rank."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from drivetrain.config import flatten
from drivetrain.launch.planning import LaunchPlan, Seat, rank_variables

_HOW = {
    "exec": "takes the launcher's place",
    "fork": "forked from the launcher, which imports torch once",
    "spawn": "each started as a Python of its own",
}


def describe(plan: LaunchPlan) -> str:
    """Return the plan as text, the same for the same plan."""
    return "\n".join([*_processes(plan), *_settings(plan), *_variables(plan)]) + "\n"


def _processes(plan: LaunchPlan) -> Iterator[str]:
    yield f"command: {shlex.join((plan.python, *plan.script.command))}"
    machines = f", {plan.local_world_size} on this machine (rank {plan.machine_rank} of {plan.num_machines})"
    noun = "process" if plan.world_size == 1 else "processes"
    yield f"processes: {plan.world_size} {noun}{machines if plan.num_machines > 1 else ''}, {_HOW[plan.start_method]}"
    device = f"{plan.devices.value} accelerators" if plan.devices.value else "cpu"
    yield f"device: {device} ({plan.devices.reason})"
    yield f"threads per process: {plan.threads.value} ({plan.threads.reason})"
    if plan.num_machines > 1:
        yield f"meeting point: {plan.master_addr}:{plan.master_port} ({plan.rendezvous})"
    yield f"restarts: {plan.max_restarts}"
    if plan.log_dir is not None:
        yield f"output: in {plan.log_dir}"


def _settings(plan: LaunchPlan) -> Iterator[str]:
    yield "settings, without those that the script itself gives to Accelerator(...), which come first:"
    for path, value in flatten(plan.resolved.config).items():
        yield f"  {path} = {_text(value)} ({plan.resolved.sources.get(path, 'default')})"


def _variables(plan: LaunchPlan) -> Iterator[str]:
    by_rank = [rank_variables(plan, _seat(plan, local_rank)) for local_rank in range(plan.local_world_size)]
    first, *others = by_rank
    own = [name for name in first if any(variables[name] != first[name] for variables in others)]
    yield "variables of every rank:" if others else "variables:"
    yield from (f"  {name}={value}" for name, value in first.items() if name not in own)
    for variables in by_rank if others else ():
        yield f"variables of rank {variables['RANK']}:"
        yield from (f"  {name}={variables[name]}" for name in own)


def _seat(plan: LaunchPlan, local_rank: int) -> Seat:
    return Seat(
        local_rank=local_rank,
        machine_rank=plan.machine_rank,
        master_addr=plan.master_addr,
        master_port=plan.master_port or "<a free port>",
        run_id="<name of the run>",
        attempt=0,
        launcher_holds_store=plan.start_method != "exec" and plan.rendezvous == "static",
        settings="<the settings above that are not defaults>",
    )


def _text(value: object) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)
