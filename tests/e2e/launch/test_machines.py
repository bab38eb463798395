"""Several machines, each a launcher of its own on this one."""

from __future__ import annotations

import socket
from typing import Any

import pytest

SUM_OF_RANKS = """
    import os
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    print(f"rank {os.environ['RANK']} local {os.environ['LOCAL_RANK']} sum {int(total)}" + chr(10), end="")
    dist.destroy_process_group()
"""

FAIL_ONCE = """
    import os
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    for step in range(20):
        dist.all_reduce(torch.ones(4))
        if step == 10 and dist.get_rank() == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("cause-7f3")
    print(f"rank {dist.get_rank()} done" + chr(10), end="")
    dist.destroy_process_group()
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(jobs: Any, script: str, *more: str) -> list[Any]:
    words = ("--cpu", "--num_processes", "4", "--num_machines", "2", "--main_process_ip", "127.0.0.1")
    port = f"--main_process_port={_free_port()}"
    return [jobs.start(*words, port, "--machine_rank", str(rank), *more, script) for rank in range(2)]


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_launch_when_two_machines_meet_then_their_ranks_are_one_job(jobs: Any, backend: str) -> None:
    started = _start(jobs, jobs.write("train.py", SUM_OF_RANKS), "--rdzv_backend", backend)
    outcomes = [job.finish() for job in started]
    assert [outcome.code for outcome in outcomes] == [0, 0], [outcome.err for outcome in outcomes]
    lines = sorted(line for outcome in outcomes for line in outcome.out.splitlines())
    assert lines == [f"rank {rank} local {rank % 2} sum 6" for rank in range(4)]


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_restart_when_a_rank_of_one_machine_fails_then_both_start_again(jobs: Any, backend: str) -> None:
    words = ("--rdzv_backend", backend, "--max_restarts", "1")
    outcomes = [job.finish() for job in _start(jobs, jobs.write("train.py", FAIL_ONCE), *words)]
    assert [outcome.code for outcome in outcomes] == [0, 0], [outcome.err for outcome in outcomes]
    lines = sorted(line for outcome in outcomes for line in outcome.out.splitlines())
    assert lines == [f"rank {rank} done" for rank in range(4)]
    told = "".join(outcome.err for outcome in outcomes)
    assert "error: rank 3 failed: ValueError: cause-7f3" in told
    assert told.count("starting all ranks again: attempt 2 of 2") == 2
