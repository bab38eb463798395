from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from drivetrain.cluster.environ import (
    ProcessEnvironment,
    add_variables,
    first_host,
    read_environ,
    replace_variables,
    tasks_per_node,
    variables,
)
from drivetrain.errors import LaunchError

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
TORCHRUN_SEEN = {
    "rank": 5,
    "local_rank": 1,
    "world_size": 8,
    "local_world_size": 4,
    "node_rank": 1,
    "num_nodes": 2,
    "master_addr": "10.0.0.1",
    "master_port": 29500,
    "launcher": "torchrun",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "5",
    "SLURM_NNODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_STEP_NODELIST": "node[007-008]",
}
SLURM_SEEN = {
    "rank": 4,
    "local_rank": 1,
    "world_size": 5,
    "local_world_size": 2,
    "node_rank": 1,
    "num_nodes": 2,
    "master_addr": "node007",
    "launcher": "slurm",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "23456",
}
OPENMPI_SEEN = {
    "rank": 3,
    "local_rank": 1,
    "world_size": 4,
    "local_world_size": 2,
    "node_rank": 1,
    "num_nodes": 2,
    "master_addr": "first",
    "master_port": 23456,
    "launcher": "openmpi",
}
ALONE = {
    "rank": 0,
    "local_rank": 0,
    "world_size": 1,
    "local_world_size": 1,
    "node_rank": 0,
    "num_nodes": 1,
    "master_addr": None,
    "master_port": None,
    "launcher": "none",
}

# The shell of sbatch has the variables of task 0; that of salloc, run as an interactive step, a step of its own.
SBATCH_SHELL = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SALLOC_SHELL = {**SBATCH_SHELL, "SLURM_NODEID": "0", "SLURM_STEP_ID": str(0xFFFFFFFA)}


def without(mapping: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: text for name, text in mapping.items() if name not in names}


@pytest.mark.parametrize(
    ("variables", "seen"),
    [
        pytest.param({}, ALONE, id="plain"),
        pytest.param({"MASTER_ADDR": "host", "MASTER_PORT": "1"}, ALONE, id="plain-with-an-address-in-the-shell"),
        pytest.param({"RANK": "", "WORLD_SIZE": ""}, ALONE, id="plain-with-empty-variables"),
        pytest.param(SBATCH_SHELL, ALONE, id="sbatch-shell"),
        pytest.param(SALLOC_SHELL, ALONE, id="salloc-shell"),
        pytest.param({"DRIVETRAIN_RUN_ID": "a"}, {**ALONE, "launcher": "drivetrain"}, id="drivetrain-one-rank"),
        pytest.param(TORCHRUN, TORCHRUN_SEEN, id="torchrun"),
        pytest.param(
            {**TORCHRUN, "DRIVETRAIN_RUN_ID": "a"}, {**TORCHRUN_SEEN, "launcher": "drivetrain"}, id="drivetrain"
        ),
        pytest.param(without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE"), TORCHRUN_SEEN, id="torchrun-nodes-derived"),
        pytest.param(
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
            {**ALONE, "launcher": "torchrun"},
            id="torchrun-one-rank-without-address",
        ),
        pytest.param(SLURM, SLURM_SEEN, id="slurm"),
        pytest.param({**SLURM, "MASTER_ADDR": "x"}, {**SLURM_SEEN, "master_addr": "x"}, id="slurm-own-address"),
        pytest.param({**SLURM, "MASTER_PORT": "99"}, {**SLURM_SEEN, "master_port": 99}, id="slurm-own-port"),
        pytest.param(
            {**without(SLURM, "SLURM_STEP_TASKS_PER_NODE"), "SLURM_TASKS_PER_NODE": "3,2"},
            SLURM_SEEN,
            id="slurm-tasks-of-the-job",
        ),
        pytest.param(
            {
                **without(SLURM, "SLURM_STEP_TASKS_PER_NODE"),
                "SLURM_NTASKS": "6",
                "SLURM_NTASKS_PER_NODE": "3",
                "SLURM_TASKS_PER_NODE": "40(x2)",
            },
            {**SLURM_SEEN, "world_size": 6, "local_world_size": 3},
            id="slurm-tasks-of-the-job-do-not-fit-the-step",
        ),
        pytest.param({**SLURM, "SLURM_NTASKS": "40", "SLURM_STEP_NUM_TASKS": "5"}, SLURM_SEEN, id="slurm-step-in-job"),
        pytest.param(OPENMPI, OPENMPI_SEEN, id="openmpi"),
        pytest.param(
            {
                **without(OPENMPI, "MASTER_ADDR", "MASTER_PORT"),
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "3",
                "PMIX_NAMESPACE": "prterun-1",
            },
            {**OPENMPI_SEEN, "local_world_size": 4, "local_rank": 3, "node_rank": 0, "num_nodes": 1}
            | {"master_addr": "127.0.0.1", "master_port": None},
            id="openmpi-on-one-node",
        ),
        pytest.param({**SLURM, **TORCHRUN}, TORCHRUN_SEEN, id="torchrun-inside-srun"),
        pytest.param({**OPENMPI, **TORCHRUN}, TORCHRUN_SEEN, id="torchrun-inside-mpirun"),
        pytest.param({**SLURM, **OPENMPI}, OPENMPI_SEEN, id="mpirun-inside-slurm"),
    ],
)
def test_read_environ_when_a_launcher_set_its_variables_then_tells_the_rank(
    variables: dict[str, str], seen: dict[str, Any]
) -> None:
    found = read_environ(variables)
    derived = {"master_port"} if seen.get("master_port") is None and found.launcher in ("slurm", "openmpi") else set()
    assert {name: getattr(found, name) for name in seen if name not in derived} == {
        name: value for name, value in seen.items() if name not in derived
    }
    if derived:
        assert found.master_port is not None
        assert 1024 < found.master_port < 32768


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        pytest.param(
            {"WORLD_SIZE": "2"}, ["WORLD_SIZE=2 without RANK, LOCAL_RANK, LOCAL_WORLD_SIZE"], id="stale-world"
        ),
        pytest.param(without(TORCHRUN, "LOCAL_RANK"), ["RANK=5", "without LOCAL_RANK"], id="no-local-rank"),
        pytest.param(without(TORCHRUN, "MASTER_PORT"), ["MASTER_ADDR=10.0.0.1 without MASTER_PORT"], id="no-port"),
        pytest.param(
            without(TORCHRUN, "MASTER_PORT", "MASTER_ADDR"), ["without MASTER_ADDR, MASTER_PORT"], id="no-address"
        ),
        pytest.param({**TORCHRUN, "RANK": "first"}, ["`RANK` is `first`"], id="rank-is-a-word"),
        pytest.param({**TORCHRUN, "LOCAL_RANK": "-1"}, ["`LOCAL_RANK` is `-1`"], id="rank-is-negative"),
        pytest.param({**TORCHRUN, "WORLD_SIZE": "8.0"}, ["`WORLD_SIZE` is `8.0`"], id="size-is-no-integer"),
        pytest.param({**TORCHRUN, "MASTER_PORT": "0"}, ["`MASTER_PORT` is `0`"], id="port-0"),
        pytest.param({**TORCHRUN, "MASTER_PORT": "70000"}, ["`MASTER_PORT` is `70000`"], id="port-too-high"),
        pytest.param({**TORCHRUN, "RANK": "8"}, ["rank 8", "world size 8"], id="rank-beyond-the-world"),
        pytest.param({**TORCHRUN, "LOCAL_RANK": "4"}, ["local rank 4", "local world size 4"], id="local-rank-beyond"),
        pytest.param({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, ["local world size 9", "world size 8"], id="local-beyond"),
        pytest.param({**TORCHRUN, "GROUP_RANK": "2"}, ["node rank 2", "number of nodes 2"], id="node-beyond"),
        pytest.param(
            {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "0"}, ["world size 0"], id="empty-world"
        ),
        pytest.param(without(SLURM, "SLURM_NTASKS"), ["Slurm", "without SLURM_NTASKS"], id="slurm-no-size"),
        pytest.param(without(SLURM, "SLURM_STEP_NODELIST"), ["SLURM_STEP_NODELIST is not set"], id="slurm-no-hosts"),
        pytest.param(without(SLURM, "SLURM_STEP_TASKS_PER_NODE"), ["5 ranks on 2 nodes"], id="slurm-no-local-size"),
        pytest.param(without(OPENMPI, "OMPI_COMM_WORLD_SIZE"), ["without OMPI_COMM_WORLD_SIZE"], id="openmpi-no-size"),
        pytest.param(without(OPENMPI, "MASTER_ADDR"), ["4 ranks", "where rank 0 listens"], id="openmpi-no-address"),
    ],
)
def test_read_environ_when_variables_are_unusable_then_says_which(variables: dict[str, str], words: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        read_environ(variables)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.hint


def test_derived_port_when_ranks_share_a_step_then_is_equal_and_another_step_differs() -> None:
    ports = {
        (rank, step): read_environ({**SLURM, "SLURM_PROCID": str(rank), "SLURM_STEP_ID": str(step)}).master_port
        for rank in (3, 4)
        for step in (2, 3)
    }
    assert ports[3, 2] == ports[4, 2]
    assert ports[3, 3] == ports[4, 3]
    assert ports[3, 2] != ports[3, 3]


def test_read_environ_when_drivetrain_variables_are_set_then_keeps_only_these() -> None:
    own = {"DRIVETRAIN_SEED": "3", "DRIVETRAIN_CONFIG_FILE": "run.json"}
    found = read_environ({**TORCHRUN, **own, "HOME": "/home/someone"})
    assert found.variables == own
    assert found.config_file == "run.json"


def test_variables_when_added_or_replaced_then_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {"OLD": "1"})
    before = variables()
    add_variables({"MORE": "2"})
    assert (before, variables()) == ({"OLD": "1"}, {"OLD": "1", "MORE": "2"})
    replace_variables({"ONLY": "3"})
    assert variables() == {"ONLY": "3"}


def test_read_environ_when_ranks_meet_in_a_file_then_needs_no_address() -> None:
    variables = without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT")
    found = read_environ({**variables, "DRIVETRAIN_RENDEZVOUS": "file:///tmp/meet"})
    assert (found.rank, found.master_addr, found.master_port) == (5, None, None)


def test_read_environ_when_no_mapping_is_given_then_reads_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in TORCHRUN.items():
        monkeypatch.setenv(name, text)
    assert read_environ() == read_environ(TORCHRUN) == ProcessEnvironment(**TORCHRUN_SEEN, size_source="WORLD_SIZE")


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("login", "login"),
        ("node3,node4", "node3"),
        ("node[003-005,010],other", "node003"),
        ("node[7,9]", "node7"),
        ("rack[1-2]node[04-06]", "rack1node04"),
        ("gpu-a[2-3]-ib", "gpu-a2-ib"),
        ("a,b[1-2]", "a"),
    ],
)
def test_first_host_when_hosts_are_in_short_form_then_is_written_out(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("listed", "counts"), [("4", (4,)), ("2(x3),1", (2, 2, 2, 1)), ("3,2", (3, 2)), ("many", ()), ("2(x", ())]
)
def test_tasks_per_node_when_in_short_form_then_is_written_out(listed: str, counts: tuple[int, ...]) -> None:
    assert tasks_per_node(listed) == counts


def test_environ_when_imported_then_loads_no_torch() -> None:
    code = "import sys, drivetrain.cluster.environ; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
