"""Reads from the environment which rank this process is; torch-free. No other module touches `os.environ`.

Each launcher speaks through variables of its own. They are asked in one order, as one may run inside another: the
variables of torchrun come first (torchrun runs inside steps of Slurm and of Open MPI), then Open MPI (its daemons are
started by Slurm), then Slurm. A process without any of them is a run of one.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from drivetrain.errors import LaunchError

Launcher = Literal["none", "drivetrain", "torchrun", "slurm", "openmpi"]

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_OPENMPI_PREFIX = "OMPI_COMM_WORLD_"
_OPENMPI = tuple(_OPENMPI_PREFIX + name for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE"))
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")

# Slurm numbers the steps that are not srun's (batch script, interactive shell, extern) from the top of 32 bits.
# Source: slurm/slurm.h, SLURM_BATCH_SCRIPT and its neighbours.
_FIRST_INTERNAL_STEP = 0xFFFFFFF0

# Derived ports stay below Linux's range for outgoing connections (from 32768), where any of them may be taken.
_FIRST_PORT = 15000
_PORTS = 15000


class _Own(TypedDict):
    variables: Mapping[str, str]
    config_file: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnvironment:
    """Which rank this process is, and how it finds the others.

    Args:
        rank: over all nodes; 0 for a process on its own.
        local_rank: on this node.
        world_size: ranks over all nodes.
        local_world_size: ranks on this node.
        node_rank: which node this is.
        num_nodes: how many there are.
        master_addr: where rank 0 listens; None when nothing says so.
        master_port: its port.
        launcher: who started this process.
        size_source: the variable that holds the world size, or why there is none, for messages.
        variables: those that begin with `DRIVETRAIN_`.
        config_file: file of settings that somebody named for every process.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    launcher: Launcher = "none"
    size_source: str = "no launcher set a variable"
    variables: Mapping[str, str] = field(default_factory=dict)
    config_file: str | None = None


def variables() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def add_variables(more: Mapping[str, str]) -> None:
    """Set these variables in this process, for itself and for the processes that it starts."""
    os.environ.update(more)


def replace_variables(all_of_them: Mapping[str, str]) -> None:
    """Give this process these variables and no others."""
    os.environ.clear()
    os.environ.update(all_of_them)


def read_environ(mapping: Mapping[str, str] | None = None) -> ProcessEnvironment:
    """Return what the environment says about this process.

    Args:
        mapping: stands for the environment in tests; by default the process's own.

    Raises:
        LaunchError: a launcher's variables are set in part, are no numbers, or contradict each other.
    """
    variables = _Variables(os.environ if mapping is None else mapping)
    for applies, read in _LAUNCHERS:
        if applies(variables):
            return _checked(read(variables))
    return ProcessEnvironment(
        launcher="drivetrain" if variables.has("DRIVETRAIN_RUN_ID") else "none", **variables.own()
    )


class _Variables:
    """The environment, with numbers checked as they are read. An empty variable counts as not set."""

    def __init__(self, mapping: Mapping[str, str]) -> None:
        self._set = {name: text for name, text in mapping.items() if text}

    def has(self, name: str) -> bool:
        return name in self._set

    def text(self, *names: str) -> str | None:
        """Return the first of these variables that is set."""
        return next((self._set[name] for name in names if name in self._set), None)

    def number(self, *names: str) -> int:
        """Return the first of these variables that is set, as a number from 0."""
        name = next((name for name in names if name in self._set), names[0])
        text = self._set.get(name, "")
        if not re.fullmatch(r"[0-9]{1,18}", text):
            raise LaunchError(f"`{name}` is `{text}`, expected a whole number from 0", hint=f"correct or unset {name}")
        return int(text)

    def require(self, *names: str, launcher: str) -> None:
        """Raise unless all these variables are set."""
        if missing := [name for name in names if not self.has(name)]:
            present = [f"{name}={self._set[name]}" for name in names if self.has(name)]
            raise LaunchError(
                f"the variables of {launcher} are half set: {', '.join(present)} without {', '.join(missing)}",
                hint=f"set {' and '.join(missing)}, or unset the others to run one process",
            )

    def port(self) -> int | None:
        """Return MASTER_PORT."""
        if not self.has("MASTER_PORT"):
            return None
        port = self.number("MASTER_PORT")
        if not 0 < port < 65536:
            raise LaunchError(
                f"`MASTER_PORT` is `{port}`, expected 1 to 65535",
                hint="all ranks must know the port beforehand, so choose one that is free on the first machine",
            )
        return port

    def own(self) -> _Own:
        """Return the fields that do not depend on who started this process."""
        variables = {name: text for name, text in self._set.items() if name.startswith("DRIVETRAIN_")}
        return {"variables": variables, "config_file": variables.get("DRIVETRAIN_CONFIG_FILE")}


def _has_torchrun(variables: _Variables) -> bool:
    return any(variables.has(name) for name in _TORCHRUN)


def _read_torchrun(variables: _Variables) -> ProcessEnvironment:
    variables.require(*_TORCHRUN, launcher="torchrun")
    world_size = variables.number("WORLD_SIZE")
    if any(variables.has(name) for name in _ADDRESS) or (world_size > 1 and not variables.has("DRIVETRAIN_RENDEZVOUS")):
        variables.require(*_TORCHRUN, *_ADDRESS, launcher="torchrun")
    rank, local_world_size = variables.number("RANK"), variables.number("LOCAL_WORLD_SIZE")
    by_count = _nodes_of_equal_size(rank, world_size=world_size, local_world_size=local_world_size)
    return ProcessEnvironment(
        rank=rank,
        local_rank=variables.number("LOCAL_RANK"),
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=variables.number("GROUP_RANK") if variables.has("GROUP_RANK") else by_count[0],
        num_nodes=variables.number("GROUP_WORLD_SIZE") if variables.has("GROUP_WORLD_SIZE") else by_count[1],
        master_addr=variables.text("MASTER_ADDR"),
        master_port=variables.port(),
        launcher="drivetrain" if variables.has("DRIVETRAIN_RUN_ID") else "torchrun",
        size_source="WORLD_SIZE",
        **variables.own(),
    )


def _has_openmpi(variables: _Variables) -> bool:
    return any(variables.has(name) for name in _OPENMPI)


def _read_openmpi(variables: _Variables) -> ProcessEnvironment:
    variables.require(*_OPENMPI, launcher="Open MPI")
    rank, local_rank, world_size, local_world_size = map(variables.number, _OPENMPI)
    node_rank, num_nodes = _nodes_of_equal_size(rank, world_size=world_size, local_world_size=local_world_size)
    address, port = variables.text("MASTER_ADDR"), variables.port()
    if world_size == local_world_size:
        job = variables.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")
        address = address or "127.0.0.1"
        port = port or (None if job is None else _derived_port(job))
    if world_size > 1 and (address is None or port is None):
        raise LaunchError(
            f"Open MPI started {world_size} ranks, and nothing says where rank 0 listens",
            hint="mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<free port> ...",
        )
    return ProcessEnvironment(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr=address,
        master_port=port,
        launcher="openmpi",
        size_source="OMPI_COMM_WORLD_SIZE",
        **variables.own(),
    )


def _in_slurm_step(variables: _Variables) -> bool:
    """Return whether srun started this process; the shells of sbatch and salloc only prepare a run."""
    step = variables.text("SLURM_STEP_ID", "SLURM_STEPID")
    if step is None or not variables.has("SLURM_PROCID"):
        return False
    return variables.number("SLURM_STEP_ID", "SLURM_STEPID") < _FIRST_INTERNAL_STEP


def _read_slurm(variables: _Variables) -> ProcessEnvironment:
    # Inside a step srun's own variables describe the step; those without STEP may describe the whole job.
    sizes = tuple(name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if variables.has(name)) or ("SLURM_NTASKS",)
    nodes = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    variables.require(*_SLURM, sizes[0], launcher="Slurm")
    world_size, node_rank = variables.number(*sizes), variables.number("SLURM_NODEID")
    num_nodes = variables.number(*nodes) if variables.text(*nodes) else 1
    job = f"{variables.text('SLURM_JOB_ID', 'SLURM_JOBID')}.{variables.text('SLURM_STEP_ID', 'SLURM_STEPID')}"
    hosts = variables.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    address = variables.text("MASTER_ADDR") or (None if hosts is None else first_host(hosts))
    if world_size > 1 and address is None:
        raise LaunchError(
            f"Slurm started {world_size} ranks, and nothing says where rank 0 listens: SLURM_STEP_NODELIST is not set",
            hint="export MASTER_ADDR=<host of rank 0>",
        )
    return ProcessEnvironment(
        rank=variables.number("SLURM_PROCID"),
        local_rank=variables.number("SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=_slurm_tasks_here(variables, world_size=world_size, node_rank=node_rank, num_nodes=num_nodes),
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr=address,
        master_port=variables.port() or _derived_port(job),
        launcher="slurm",
        size_source=sizes[0],
        **variables.own(),
    )


def _slurm_tasks_here(variables: _Variables, *, world_size: int, node_rank: int, num_nodes: int) -> int:
    listed = variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if listed is not None:
        counts = tasks_per_node(listed)
        if sum(counts) == world_size and node_rank < len(counts):
            return counts[node_rank]
    if num_nodes == 1:
        return world_size
    if variables.has("SLURM_NTASKS_PER_NODE"):
        return variables.number("SLURM_NTASKS_PER_NODE")
    raise LaunchError(
        f"Slurm started {world_size} ranks on {num_nodes} nodes, and nothing says how many run on this one",
        hint="srun --ntasks-per-node ...",
    )


_LAUNCHERS: tuple[tuple[Callable[[_Variables], bool], Callable[[_Variables], ProcessEnvironment]], ...] = (
    (_has_torchrun, _read_torchrun),
    (_has_openmpi, _read_openmpi),
    (_in_slurm_step, _read_slurm),
)


def tasks_per_node(listed: str) -> tuple[int, ...]:
    """Return the tasks of each node from Slurm's short form: `2(x3),1` is 2, 2, 2, 1; nothing when it is malformed."""
    counts: list[int] = []
    for part in listed.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part.strip())
        if match is None:
            return ()
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def first_host(hosts: str) -> str:
    """Return the first host of Slurm's short form: `node[003-005,9],login` gives `node003`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else hosts)


def _nodes_of_equal_size(rank: int, *, world_size: int, local_world_size: int) -> tuple[int, int]:
    """Return node rank and number of nodes when ranks fill equal nodes one after the other."""
    size = max(local_world_size, 1)
    return rank // size, -(-world_size // size)


def _derived_port(job: str) -> int:
    """Return a port that all ranks of a job derive alike and other jobs most probably do not share."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def _checked(found: ProcessEnvironment) -> ProcessEnvironment:
    """Return the environment, or raise when its numbers contradict each other."""
    limits = (
        ("rank", found.rank, "world size", found.world_size),
        ("local rank", found.local_rank, "local world size", found.local_world_size),
        ("local world size", found.local_world_size - 1, "world size", found.world_size),
        ("node rank", found.node_rank, "number of nodes", found.num_nodes),
    )
    for name, value, limit_name, limit in limits:
        if value >= limit:
            shown = value + 1 if name == "local world size" else value
            raise LaunchError(
                f"{found.launcher} says {name} {shown} and {limit_name} {limit} ({found.size_source}), which cannot be",
                hint="unset variables that an earlier run left, and let one launcher set all of them",
            )
    return found
