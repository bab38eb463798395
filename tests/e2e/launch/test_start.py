"""The ranks that were asked for start, and see what `python script.py` would show them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

SUM_OF_RANKS = """
    import os
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print("world", dist.get_world_size(), "sum", int(total))
    dist.destroy_process_group()
"""


def test_launch_when_two_ranks_are_asked_for_by_flag_then_two_run(jobs: Any) -> None:
    outcome = jobs.run("--cpu", "--num_processes", "2", jobs.write("train.py", SUM_OF_RANKS))
    assert (outcome.code, outcome.out, outcome.err) == (0, "world 2 sum 1\n", "")


def test_launch_when_two_ranks_are_asked_for_by_file_then_two_run(jobs: Any) -> None:
    jobs.write("run.yaml", "num_processes: 2\nuse_cpu: true\n")
    outcome = jobs.run("--config_file", "run.yaml", jobs.write("train.py", SUM_OF_RANKS))
    assert (outcome.code, outcome.out) == (0, "world 2 sum 1\n")


def test_launch_when_two_jobs_start_at_once_then_both_get_a_port(jobs: Any) -> None:
    script = jobs.write("train.py", SUM_OF_RANKS)
    started = [jobs.start("--cpu", "--num_processes", "2", script) for _ in range(2)]
    assert [job.finish().out for job in started] == ["world 2 sum 1\n"] * 2


def test_launch_when_spawned_then_ranks_meet_as_well(jobs: Any) -> None:
    words = ("--cpu", "--num_processes", "2", "--start_method", "spawn")
    outcome = jobs.run(*words, jobs.write("train.py", SUM_OF_RANKS))
    assert (outcome.code, outcome.out, outcome.err) == (0, "world 2 sum 1\n", "")


def test_launch_when_the_port_is_taken_then_says_so_before_a_rank_starts(jobs: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ("--cpu", "--num_processes", "2", f"--main_process_port={port}")
        outcome = jobs.run(*words, jobs.write("train.py", "print('started')"))
    assert outcome.code == 2
    assert outcome.out == ""
    assert f"error: port {port} cannot be used" in outcome.err
    assert "--main_process_port" in outcome.err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--num_proceses", "2"), "did you mean `--num_processes`?"),
        (("--config_file", "run.yaml"), "did you mean `gradient_accumulation_steps`?"),
    ],
)
def test_launch_when_a_name_is_misspelled_then_says_so_before_a_rank_starts(
    jobs: Any, words: tuple[str, ...], hint: str
) -> None:
    jobs.write("run.yaml", "use_cpu: true\ngradient_acumulation_steps: 4\n")
    outcome = jobs.run(*words, "--cpu", jobs.write("train.py", "print('started')"))
    assert (outcome.code, outcome.out) == (2, "")
    assert hint in outcome.err
    assert outcome.seconds < 3


FACTS = """
    import json, os, sys
    facts = {
        "name": __name__, "file": __file__, "spec": __spec__ and __spec__.name, "argv": sys.argv, "path": sys.path[0],
        "main": sys.modules["__main__"].__dict__ is globals(),
        "descriptors": [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")],
        "variables": {k: v for k, v in os.environ.items() if k not in os.environ.get("BEFORE", "").split(",")},
    }
    print(json.dumps(facts) + chr(10), end="")
"""


def _facts(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_script_when_launched_then_sees_what_python_shows_it(jobs: Any, ranks: int) -> None:
    jobs.write("folder/train.py", FACTS)
    words = ["folder/train.py", "--cpu", "--num_processes", "4", "--", "-m", "x"]
    plain = subprocess.run([sys.executable, *words], cwd=jobs.folder, capture_output=True, check=True, timeout=30)
    (expected,) = _facts(plain.stdout.decode())
    outcome = jobs.run("--use-cpu", f"--num-processes={ranks}", *words)
    assert outcome.code == 0, outcome.err
    for facts in _facts(outcome.out):
        for key in ("name", "file", "spec", "argv", "path", "main"):
            assert facts[key] == expected[key], key


@pytest.mark.parametrize("ranks", [1, 2])
def test_module_when_launched_then_sees_what_python_shows_it(jobs: Any, ranks: int) -> None:
    jobs.write("package/__init__.py", "")
    jobs.write("package/__main__.py", FACTS)
    words = ["-m", "package", "--cpu"]
    plain = subprocess.run([sys.executable, *words], cwd=jobs.folder, capture_output=True, check=True, timeout=30)
    (expected,) = _facts(plain.stdout.decode())
    outcome = jobs.run("--cpu", "--num_processes", str(ranks), *words)
    assert outcome.code == 0, outcome.err
    assert len(_facts(outcome.out)) == ranks
    for facts in _facts(outcome.out):
        for key in ("name", "file", "spec", "argv", "path", "main"):
            assert facts[key] == expected[key], key


@pytest.mark.parametrize("ranks", [1, 2])
def test_variables_when_a_rank_starts_then_are_those_of_the_dry_run_and_no_others(jobs: Any, ranks: int) -> None:
    script = jobs.write("train.py", FACTS)
    jobs.variables["BEFORE"] = ",".join([*jobs.variables, "BEFORE", "TEST_JOB_TOKEN", "LC_CTYPE"])
    words = ("--cpu", "--num_processes", str(ranks), script)
    shown = re.findall(r"^  ([A-Z_]+)=", jobs.run("--dry-run", *words).out, re.MULTILINE)
    for facts in _facts(jobs.run(*words).out):
        assert sorted(facts["variables"]) == sorted(set(shown))


def test_rank_when_forked_then_holds_no_socket_of_the_launcher(jobs: Any) -> None:
    for facts in _facts(jobs.run("--cpu", "--num_processes", "2", jobs.write("train.py", FACTS)).out):
        assert facts["descriptors"]
        assert not [target for target in facts["descriptors"] if "socket:" in target or "anon_inode:" in target]


def test_launch_when_one_rank_then_the_script_takes_the_launchers_place(jobs: Any) -> None:
    job = jobs.start("--cpu", "--num_processes", "1", jobs.write("train.py", "import os; print(os.getpid())"))
    assert int(job.finish().out) == job.process.pid


@pytest.mark.parametrize(
    ("ending", "code"), [("raise SystemExit(7)", 7), ("import os, signal; os.kill(os.getpid(), 15)", -signal.SIGTERM)]
)
def test_exit_code_when_one_rank_then_is_the_scripts(jobs: Any, ending: str, code: int) -> None:
    assert jobs.run("--cpu", "--num_processes", "1", jobs.write("train.py", ending)).code == code


ORDINARY_PROCESS = """
    import atexit, os, pickle, random, signal, sys, threading, time
    import numpy, torch
    from torch.utils.data import DataLoader, Dataset

    class Item:
        def __init__(self, number):
            self.number = number

    class Numbers(Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, index):
            return Item(index)

    def first(items):
        return items[0]

    def say(text):
        sys.stdout.write(f"{os.environ['RANK']} {text}" + chr(10))
        sys.stdout.flush()

    def late():
        time.sleep(0.3)
        say(f"thread {pickle.loads(pickle.dumps(Item(5))).number}")

    if __name__ == "__main__":
        say(f"draws {random.random()} {numpy.random.rand()} {torch.rand(1).item()}")
        say(f"threads {torch.get_num_threads()} {os.environ['OMP_NUM_THREADS']}")
        handlers = [signal.getsignal(getattr(signal, name)) for name in ("SIGTERM", "SIGINT")]
        say(f"handlers {handlers == [signal.SIG_DFL, signal.default_int_handler]}")
        for context in ("fork", "spawn"):
            loader = DataLoader(Numbers(), num_workers=1, collate_fn=first, multiprocessing_context=context)
            say(f"{context} {[item.number for item in loader]}")
        atexit.register(lambda: say(f"exit {pickle.loads(pickle.dumps(Item(6))).number}"))
        threading.Thread(target=late).start()
        sys.stdout.write(os.environ["RANK"] + " end")
"""


def test_rank_when_forked_then_is_an_ordinary_process_to_its_end(jobs: Any) -> None:
    words = ("--cpu", "--num_processes", "2", "--num_cpu_threads_per_process", "3")
    outcome = jobs.run(*words, jobs.write("train.py", ORDINARY_PROCESS))
    assert (outcome.code, outcome.err) == (0, "")
    for rank in "01":
        for line in (
            "threads 3 3",
            "handlers True",
            "fork [0, 1, 2, 3]",
            "spawn [0, 1, 2, 3]",
            "thread 5",
            "exit 6",
            "end",
        ):
            assert f"{rank} {line}" in outcome.out
    draws = re.findall(r"draws (\S+) (\S+) (\S+)", outcome.out)
    assert len(draws) == 2
    for first, second in zip(*draws, strict=True):
        assert first != second


def test_output_when_log_dir_is_set_then_each_rank_has_a_file(jobs: Any) -> None:
    script = jobs.write("train.py", "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)")
    outcome = jobs.run("--cpu", "--num_processes", "2", "--log_dir", "logs", script)
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err == f"drivetrain: output of the ranks: {os.path.join('logs', 'rank-N.log')}\n"
    texts = {path.name: path.read_text() for path in (jobs.folder / "logs").iterdir()}
    assert sorted(texts) == ["rank-0.log", "rank-1.log"]
    for rank in "01":
        assert sorted(texts[f"rank-{rank}.log"].splitlines()) == ["err", f"out {rank}"]


@pytest.mark.parametrize("runs", [5, pytest.param(50, marks=pytest.mark.soak)])
def test_empty_job_when_run_many_times_then_always_ends_cleanly(jobs: Any, runs: int) -> None:
    script = jobs.write("train.py", SUM_OF_RANKS)
    for _ in range(runs):
        outcome = jobs.run("--cpu", "--num_processes", "2", script)
        assert (outcome.code, outcome.err) == (0, "")
