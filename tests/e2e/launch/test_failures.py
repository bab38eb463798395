"""A rank that fails ends the job soon, and the screen ends with the cause."""

from __future__ import annotations

import signal
from typing import Any

import pytest

LOOP = """
    import ctypes, os, signal, sys, time
    import torch
    import torch.distributed as dist

    def fail():
        {failure}

    dist.init_process_group("gloo")
    for step in range(10**6):
        if step == 20 and dist.get_rank() == 1:
            fail()
        dist.all_reduce(torch.ones(4))
"""

CAUSES = {
    'raise ValueError("cause-7f3")': ("rank 1 failed: ValueError: cause-7f3", "train.py:7"),
    "os.kill(os.getpid(), signal.SIGKILL)": ("rank 1 was killed by signal 9 (SIGKILL)", "maybe out of memory"),
    "ctypes.string_at(0)": ("rank 1 was killed by signal 11 (SIGSEGV)", '/train.py", line 7 in fail'),
    "os._exit(3)": ("rank 1 ended with exit code 3", ""),
    "sys.exit(5)": ("rank 1 ended by sys.exit(5)", "train.py:7"),
    "sys.exit(0)": ("rank 1 ended with exit code 0 while other ranks still waited for it", ""),
    "raise KeyboardInterrupt": ("rank 1 failed: KeyboardInterrupt", "train.py:7"),
}


@pytest.mark.parametrize("failure", CAUSES)
def test_report_when_one_rank_fails_then_names_it_last(jobs: Any, failure: str) -> None:
    verdict, detail = CAUSES[failure]
    outcome = jobs.run("--cpu", "--num_processes", "3", jobs.write("train.py", LOOP.format(failure=failure)))
    assert outcome.code == 1
    assert outcome.seconds < 10 + 5  # ten, and the start of python and torch on a busy machine
    assert f"error: {verdict}" in outcome.last_lines
    assert detail in outcome.last_lines
    last = [line for line in outcome.err.splitlines() if not line.startswith("  hint:")][-1]
    assert last.startswith(f"error: {verdict}")
    # Nobody else's traceback, nothing of torch's launcher.
    assert outcome.err.count("Traceback (most recent call last)") == ("raise" in failure)
    assert "elastic" not in outcome.err
    assert "[rank" not in outcome.err


def test_report_when_a_rank_raises_then_the_traceback_is_that_of_python(jobs: Any) -> None:
    jobs.write("train.py", "def f():\n    raise ValueError('cause-7f3')\n\nf()\n")
    outcome = jobs.run("--cpu", "--num_processes", "2", "train.py")
    path = jobs.folder / "train.py"
    expected = (
        f'Traceback (most recent call last):\n  File "{path}", line 4, in <module>\n    f()\n'
        f"  File \"{path}\", line 2, in f\n    raise ValueError('cause-7f3')\nValueError: cause-7f3\n"
    )
    assert expected in outcome.err
    assert "worker.py" not in outcome.err


def test_report_when_the_script_has_a_syntax_error_then_shows_its_line(jobs: Any) -> None:
    jobs.write("train.py", "x = (\n")
    outcome = jobs.run("--cpu", "--num_processes", "2", "train.py")
    assert outcome.code == 1
    assert "SyntaxError: '(' was never closed" in outcome.last_lines
    assert f"{jobs.folder}/train.py:1" in outcome.last_lines


def test_failure_when_a_peer_ignores_sigterm_then_the_job_still_ends(jobs: Any) -> None:
    script = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.environ["RANK"] == "1":
            time.sleep(0.5)
            raise ValueError("cause-7f3")
        time.sleep(300)
    """
    outcome = jobs.run("--cpu", "--num_processes", "2", jobs.write("train.py", script))
    assert outcome.code == 1
    assert "error: rank 1 failed: ValueError: cause-7f3" in outcome.last_lines
    assert "rank 0 stopped by the launcher" in outcome.err
    assert outcome.seconds < 15


def test_failure_when_exit_handlers_hang_then_the_recorded_cause_is_still_told(jobs: Any) -> None:
    script = """
        import atexit, os, time
        if os.environ["RANK"] == "0":
            atexit.register(time.sleep, 300)
            raise ValueError("cause-7f3")
        time.sleep(300)
    """
    outcome = jobs.run("--cpu", "--num_processes", "2", jobs.write("train.py", script))
    assert outcome.code == 1
    assert "error: rank 0 failed: ValueError: cause-7f3" in outcome.last_lines
    assert outcome.seconds < 15


def test_hook_when_the_script_set_one_then_hears_of_the_failure(jobs: Any) -> None:
    script = """
        import os, sys
        import torch.distributed as dist
        sys.excepthook = lambda kind, error, trace: print("hook", os.environ["RANK"], error)
        if os.environ["RANK"] == "1":
            raise ValueError("cause-7f3")
    """
    outcome = jobs.run("--cpu", "--num_processes", "2", jobs.write("train.py", script))
    assert outcome.out == "hook 1 cause-7f3\n"


RESTART = """
    import os, pathlib
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    for _ in range(5):
        dist.all_reduce(torch.ones(4))
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_rank()
    if rank == 1 and int(attempt) < int(os.environ["FAILURES"]):
        raise ValueError(f"cause-{attempt}")
    dist.all_reduce(torch.ones(4))
    print(f"rank {rank} finished in attempt {attempt}" + chr(10), end="")
    dist.destroy_process_group()
"""


def test_restart_when_one_attempt_fails_then_the_next_finishes(jobs: Any) -> None:
    jobs.variables["FAILURES"] = "1"
    words = ("--cpu", "--num_processes", "2", "--max_restarts", "1")
    outcome = jobs.run(*words, jobs.write("train.py", RESTART))
    assert outcome.code == 0, outcome.err
    assert sorted(outcome.out.splitlines()) == [f"rank {rank} finished in attempt 1" for rank in (0, 1)]
    assert "error: rank 1 failed: ValueError: cause-0" in outcome.err
    assert outcome.err.splitlines()[-1] == "starting all ranks again: attempt 2 of 2"


def test_restart_when_all_attempts_fail_then_the_last_cause_is_last(jobs: Any) -> None:
    jobs.variables["FAILURES"] = "9"
    words = ("--cpu", "--num_processes", "2", "--max_restarts", "2")
    outcome = jobs.run(*words, jobs.write("train.py", RESTART))
    assert outcome.code == 1
    assert [f"cause-{attempt}" in outcome.err for attempt in range(4)] == [True, True, True, False]
    assert outcome.err.splitlines()[-1].startswith("error: rank 1 failed: ValueError: cause-2")


def test_restart_when_there_is_one_rank_then_works_too(jobs: Any) -> None:
    script = "import os; assert os.environ['TORCHELASTIC_RESTART_COUNT'] == '1'; print('done')"
    outcome = jobs.run("--cpu", "--num_processes", "1", "--max_restarts", "1", jobs.write("train.py", script))
    assert (outcome.code, outcome.out) == (0, "done\n")


def test_exit_code_when_ranks_are_interrupted_then_the_launcher_dies_of_the_signal(jobs: Any) -> None:
    job = jobs.start("--cpu", "--num_processes", "2", jobs.write("train.py", "import time; time.sleep(300)"))
    job.wait_for_living(3)
    job.process.send_signal(signal.SIGTERM)
    outcome = job.finish(timeout=10)
    assert outcome.code == -signal.SIGTERM
    assert outcome.err == "interrupted by SIGTERM: all ranks were stopped\n"
