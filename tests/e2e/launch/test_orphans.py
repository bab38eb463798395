"""However the launcher ends, no process of its job is left, loader workers included."""

from __future__ import annotations

import signal
from typing import Any

import pytest

# Two ranks with two loader workers each, all of them asleep. A worker is forked off the main thread or off another.
SLEEPERS = """
    import sys, threading, time
    from torch.utils.data import DataLoader, Dataset

    class Sleepy(Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, index):
            time.sleep(300)

    def work():
        for _ in DataLoader(Sleepy(), num_workers=2, multiprocessing_context=sys.argv[1]):
            pass

    if __name__ == "__main__":
        if sys.argv[2] == "thread":
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        else:
            work()
"""
LAUNCHER_RANKS_WORKERS = 1 + 2 + 2 * 2


@pytest.mark.parametrize("repeats", [3, pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_processes_when_the_launcher_is_signalled_then_none_is_left(jobs: Any, number: int, repeats: int) -> None:
    script = jobs.write("train.py", SLEEPERS)
    for _ in range(repeats):
        job = jobs.start("--cpu", "--num_processes", "2", script, "fork", "main")
        job.wait_for_living(LAUNCHER_RANKS_WORKERS)
        job.process.send_signal(number)
        job.wait_for_end_of_all(timeout=8)
        assert job.finish().code == -number


def test_processes_when_workers_are_forked_off_a_thread_then_none_is_left(jobs: Any) -> None:
    job = jobs.start("--cpu", "--num_processes", "2", jobs.write("train.py", SLEEPERS), "fork", "thread")
    job.wait_for_living(LAUNCHER_RANKS_WORKERS)
    job.process.send_signal(signal.SIGKILL)
    job.wait_for_end_of_all(timeout=8)


def test_worker_when_the_thread_that_forked_it_ends_then_lives_on(jobs: Any) -> None:
    script = """
        import multiprocessing, threading, time

        def work(queue):
            time.sleep(1.5)
            queue.put("still here")

        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        process = context.Process(target=work, args=(queue,))
        thread = threading.Thread(target=process.start)
        thread.start()
        thread.join()
        process.join()
        assert process.exitcode == 0, process.exitcode
        print(queue.get() + chr(10), end="")
    """
    outcome = jobs.run("--cpu", "--num_processes", "2", jobs.write("train.py", script))
    assert (outcome.code, outcome.out) == (0, "still here\n" * 2)


def test_processes_when_ranks_are_spawned_and_the_launcher_is_killed_then_none_is_left(jobs: Any) -> None:
    words = ("--cpu", "--num_processes", "2", "--start_method", "spawn")
    job = jobs.start(*words, jobs.write("train.py", SLEEPERS), "fork", "main")
    job.wait_for_living(LAUNCHER_RANKS_WORKERS)
    job.process.send_signal(signal.SIGKILL)
    job.wait_for_end_of_all(timeout=8)
