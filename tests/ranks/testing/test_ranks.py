from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from drivetrain.errors import DrivetrainError
from drivetrain.testing import ranks

JOB_VARIABLE = "DRIVETRAIN_TEST_JOB"


@dataclass(frozen=True)
class Pair:
    """A value of a class of the test's own."""

    rank: int
    tensor: torch.Tensor


def variables(*names: str) -> list[str]:
    return [os.environ[name] for name in names]


def pair(tensor: torch.Tensor, *, factor: float) -> Pair:
    rank = int(os.environ["RANK"])
    return Pair(rank=rank, tensor=tensor * factor * rank)


def summed() -> float:
    ones = torch.ones(())
    dist.all_reduce(ones)
    return float(ones)


def summed_in_own_group(init_method: str | None) -> float:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=init_method or os.environ["DRIVETRAIN_RENDEZVOUS"], rank=rank, world_size=world_size
    )
    return summed()  # and leaves the group open


def rank_1_raises() -> None:
    rank = dist.get_rank()
    dist.barrier()
    if rank == 1:
        raise ValueError("cause-7f3")
    dist.barrier()


def rank_1_raises_while_0_works() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("cause-7f3")
    time.sleep(60)


def rank_1_gets(number: int) -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    dist.barrier()


def rank_0_sleeps_and_1_waits() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)
    dist.barrier()


def leaves_at_once(code: int) -> None:
    os._exit(code)


def raises_system_exit() -> None:
    sys.exit(5)


def unpicklable() -> object:
    return threading.Lock()


def prints() -> None:
    print("to stdout")
    print("to stderr", file=sys.stderr)
    print("without a newline", end="")


def ends_like_an_interpreter(folder: Path) -> None:
    def late() -> None:
        time.sleep(0.2)
        (folder / "thread").touch()

    atexit.register((folder / "atexit").touch)
    threading.Thread(target=late).start()


def aborts_at_exit() -> int:
    atexit.register(os.abort)
    return 1


def starts_a_child_and_ends() -> int:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    return child.pid


def pool_of_processes() -> list[int]:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(abs, [-1, -2])


def runs_ranks_inside() -> list[list[str]]:
    return ranks.run(variables, "WORLD_SIZE", ranks=2)


def changes_the_environment() -> tuple[int, str | None]:
    before = os.environ.get("CHANGED")
    os.environ["CHANGED"] = "1"
    torch.set_default_dtype(torch.float64)
    return os.getpid(), before


def signal_handlers() -> list[bool]:
    return [
        signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
        signal.getsignal(signal.SIGINT) == signal.default_int_handler,
        signal.set_wakeup_fd(-1) == -1,
    ]


def open_sockets() -> list[str]:
    folder = Path("/proc/self/fd")
    targets = [os.readlink(entry) for entry in folder.iterdir() if entry.exists()]
    return [target for target in targets if target.startswith("socket:")]


def test_run_when_all_return_then_results_come_in_order_of_rank() -> None:
    results = ranks.run(pair, torch.tensor([1.0, 2.0]), factor=10.0, ranks=3)
    assert [result.rank for result in results] == [0, 1, 2]
    assert all(torch.equal(result.tensor, torch.tensor([10.0, 20.0]) * result.rank) for result in results)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_run_when_ranks_look_around_then_they_find_torchruns_variables(count: int) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    expected = [[str(rank), str(rank), str(count), str(count), "127.0.0.1", "1"] for rank in range(count)]
    assert ranks.run(variables, *names, ranks=count) == expected


def test_run_when_ranks_start_then_each_has_one_thread() -> None:
    assert ranks.run(torch.get_num_threads, ranks=2) == [1, 1]
    assert ranks.run(threading.active_count, ranks=2) == [1, 1]


def test_run_when_ranks_start_then_signals_and_sockets_are_those_of_a_fresh_process() -> None:
    assert ranks.run(signal_handlers, ranks=1) == [[True] * 4]
    if sys.platform == "linux":
        assert ranks.run(open_sockets, ranks=1) == [[]]


def test_run_when_the_caller_sets_a_variable_then_ranks_see_its_present_value(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("first", "second"):
        monkeypatch.setenv("SEEN_BY_RANKS", value)
        assert ranks.run(variables, "SEEN_BY_RANKS", ranks=1) == [[value]]


def test_run_when_called_twice_then_nothing_of_the_first_call_is_left() -> None:
    (first_pid, _), (second_pid, before) = (ranks.run(changes_the_environment, ranks=1)[0] for _ in range(2))
    assert first_pid != second_pid
    assert before is None
    assert ranks.run(torch.get_default_dtype, ranks=1) == [torch.float32]


def test_run_when_a_group_is_asked_for_then_collectives_work() -> None:
    assert ranks.run(summed, ranks=3, init_group=True) == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("init_method", [None, "env://"])
def test_run_when_a_rank_leaves_its_group_open_then_it_ends_cleanly(init_method: str | None) -> None:
    assert ranks.run(summed_in_own_group, init_method, ranks=2) == [2.0, 2.0]


def test_run_when_called_again_then_it_takes_less_than_half_a_second() -> None:
    ranks.run(int, ranks=2)
    seconds = []
    for _ in range(3):
        start = time.monotonic()
        ranks.run(int, ranks=2)
        seconds.append(time.monotonic() - start)
    assert min(seconds) < 0.5


def test_run_when_one_rank_raises_then_its_traceback_comes_last() -> None:
    with pytest.raises(ranks.RanksFailed) as caught:
        ranks.run(rank_1_raises, ranks=3, init_group=True)
    assert caught.value.exceptions[1] == ("ValueError", "cause-7f3")
    last = list(caught.value.failures)[-1]
    assert last == 1
    own = caught.value.failures[1]
    assert own.startswith("rank 1 raised:\nTraceback (most recent call last):\n")
    assert own.endswith("ValueError: cause-7f3")
    assert "in rank_1_raises" in own
    assert "rank_process.py" not in own
    assert str(caught.value).endswith(own)


def test_run_when_one_rank_raises_then_others_are_stopped_soon_and_shown() -> None:
    start = time.monotonic()
    with pytest.raises(ranks.RanksFailed, match=r"rank 0 stopped 0\.5 s later") as caught:
        ranks.run(rank_1_raises_while_0_works, ranks=2)
    assert time.monotonic() - start < 10
    assert list(caught.value.failures) == [0, 1]
    assert "rank 0 was stopped before `rank_1_raises_while_0_works` returned; it was here:" in caught.value.failures[0]
    assert "in rank_1_raises_while_0_works" in caught.value.failures[0]
    assert caught.value.exceptions == {1: ("ValueError", "cause-7f3")}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_run_when_a_signal_kills_a_rank_then_it_is_named_as_the_cause(number: signal.Signals) -> None:
    with pytest.raises(ranks.RanksFailed) as caught:
        ranks.run(rank_1_gets, int(number), ranks=3, init_group=True)
    assert list(caught.value.failures)[-1] == 1
    assert f"rank 1 was killed by signal {int(number)} ({number.name})" in caught.value.failures[1]
    assert 1 not in caught.value.exceptions


def test_run_when_the_time_is_up_then_each_ranks_place_is_shown() -> None:
    start = time.monotonic()
    with pytest.raises(ranks.RanksFailed, match=re.escape("ranks 0 and 1 of 2 had not finished")) as caught:
        ranks.run(rank_0_sleeps_and_1_waits, ranks=2, init_group=True, timeout=1.0)
    assert time.monotonic() - start < 10
    assert "in barrier" in caught.value.failures[1]  # below Python, where no exception could reach it
    assert "in barrier" not in caught.value.failures[0]
    assert all("in rank_0_sleeps_and_1_waits" in text for text in caught.value.failures.values())


def test_run_when_a_rank_leaves_without_a_result_then_its_exit_code_is_told() -> None:
    with pytest.raises(ranks.RanksFailed, match="rank 0 ended with exit code 3 before `leaves_at_once` returned"):
        ranks.run(leaves_at_once, 3, ranks=1)
    with pytest.raises(ranks.RanksFailed, match="rank 0 ended with exit code 0 before `leaves_at_once` returned"):
        ranks.run(leaves_at_once, 0, ranks=1)


def test_run_when_a_rank_calls_sys_exit_then_it_failed() -> None:
    with pytest.raises(ranks.RanksFailed) as caught:
        ranks.run(raises_system_exit, ranks=1)
    assert caught.value.exceptions == {0: ("SystemExit", "5")}


def test_run_when_a_rank_aborts_after_its_result_then_it_failed() -> None:
    with pytest.raises(ranks.RanksFailed, match=r"rank 0 was killed by signal 6 .* after `aborts_at_exit` returned"):
        ranks.run(aborts_at_exit, ranks=1)


def test_run_when_a_result_does_not_pickle_then_it_failed() -> None:
    with pytest.raises(ranks.RanksFailed, match="cannot pickle"):
        ranks.run(unpicklable, ranks=1)


@pytest.mark.parametrize("fn", [lambda: None, pytest.MonkeyPatch().setenv], ids=["lambda", "bound method"])
def test_run_when_a_function_has_no_name_of_its_own_then_type_error(fn: object) -> None:
    with pytest.raises(TypeError, match="hint: define it with `def` at the top level of a module"):
        ranks.run(fn, ranks=1)  # type: ignore[arg-type]


def test_run_when_ranks_print_then_it_appears_here_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    ranks.run(prints, ranks=2)
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        f"[rank {rank}] {text}" for rank in (0, 1) for text in ("to stdout", "without a newline")
    ]
    assert err.splitlines() == ["[rank 0] to stderr", "[rank 1] to stderr"]


def test_run_when_a_rank_ends_then_threads_are_joined_and_atexit_runs(tmp_path: Path) -> None:
    ranks.run(ends_like_an_interpreter, tmp_path, ranks=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["atexit", "thread"]


def test_run_when_a_rank_starts_processes_then_none_outlives_it() -> None:
    (process_id,) = ranks.run(starts_a_child_and_ends, ranks=1)
    wait_for(lambda: not is_running(process_id))
    assert ranks.run(pool_of_processes, ranks=1) == [[1, 2]]


def test_run_when_called_on_a_rank_then_it_works_there_too() -> None:
    assert ranks.run(runs_ranks_inside, ranks=1) == [[["2"], ["2"]]]


SCRIPT = """
import os, sys, time
from drivetrain.testing import ranks

class Result:
    rank = os.environ.get("RANK")

def result():
    return Result()

def sleep():
    time.sleep(60)

if __name__ == "__main__":
    print([type(each) is Result for each in ranks.run(result, ranks=2)], flush=True)
    if len(sys.argv) > 1:
        ranks.run(sleep, ranks=2)
"""


def test_run_when_the_function_is_of_a_script_then_the_script_is_not_run_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[True, True]\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_run_when_a_signal_ends_the_caller_then_no_process_is_left(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    job = str(tmp_path)
    with subprocess.Popen(
        [sys.executable, script, "sleep"],
        env={**os.environ, JOB_VARIABLE: job},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as caller:
        assert caller.stdout is not None
        caller.stdout.readline()
        wait_for(lambda: len(processes_of(job)) == 4)  # itself, the server and two ranks
        caller.send_signal(number)
        caller.wait(timeout=20)
    wait_for(lambda: not processes_of(job))


def processes_of(job: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(JOB_VARIABLE) == job and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def is_running(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool], *, seconds: float = 8.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        time.sleep(0.05)


KILL_THE_SERVER = """
def kill():
    os.kill(os.getppid(), 9)
    time.sleep(60)

if __name__ == "__main__":
    try:
        ranks.run(kill, ranks=1)
    except Exception as error:
        print(error)
"""


def test_run_when_the_fork_server_dies_then_an_error_says_so_and_the_next_call_works(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("if __name__", KILL_THE_SERVER + "\nif __name__"))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["the process that forks ranks ended with exit code -9", "[True, True]"], done
    assert issubclass(ranks.RanksFailed, DrivetrainError)
