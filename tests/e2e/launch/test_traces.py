"""However a job ends, it leaves no file behind; its settings reach whatever its script starts."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def scratch(jobs: Any) -> Path:
    """The temporary folder of the jobs, empty so far."""
    folder: Path = jobs.folder / "scratch"
    folder.mkdir()
    jobs.variables["TMPDIR"] = str(folder)
    return folder


TWO_RANKS = ("--num_processes", "2")
SPAWNED = (*TWO_RANKS, "--start_method", "spawn")

FAILS_ON_THE_LAST_RANK = """
    import os, signal, sys, time
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        {ending}
"""


@pytest.mark.parametrize("words", [(), TWO_RANKS, SPAWNED])
@pytest.mark.parametrize("ending", ["pass", "raise ValueError('cause-7f3')", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_temporary_folder_when_the_script_ends_then_is_empty(
    jobs: Any, scratch: Path, words: tuple[str, ...], ending: str
) -> None:
    script = jobs.write("train.py", FAILS_ON_THE_LAST_RANK.format(ending=ending))
    outcome = jobs.run("--cpu", *words, script)
    assert (outcome.code == 0) == (ending == "pass"), outcome.err
    assert [path.name for path in scratch.iterdir()] == []


def test_temporary_folder_when_ranks_are_restarted_then_is_empty(jobs: Any, scratch: Path) -> None:
    script = jobs.write("train.py", FAILS_ON_THE_LAST_RANK.format(ending="raise ValueError('cause-7f3')"))
    outcome = jobs.run("--cpu", *TWO_RANKS, "--max_restarts", "1", script)
    assert outcome.err.count("error: rank 1 failed: ValueError: cause-7f3") == 2
    assert [path.name for path in scratch.iterdir()] == []


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ((), signal.SIGKILL),
        (TWO_RANKS, signal.SIGINT),
        (TWO_RANKS, signal.SIGTERM),
        (TWO_RANKS, signal.SIGKILL),
        (SPAWNED, signal.SIGKILL),
    ],
)
def test_temporary_folder_when_the_launcher_is_signalled_then_is_empty(
    jobs: Any, scratch: Path, words: tuple[str, ...], number: int
) -> None:
    # One write, so that the lines of two ranks do not mix.
    script = "import sys, time; sys.stdout.write('up' + chr(10)); sys.stdout.flush(); time.sleep(300)"
    job = jobs.start("--cpu", *words, jobs.write("train.py", script))
    job.wait_for_line("up")
    job.process.send_signal(number)
    job.wait_for_end_of_all(timeout=8)
    assert job.finish().code == -number
    assert [path.name for path in scratch.iterdir()] == []


SAYS_ITS_SETTINGS = """
    import json, os, subprocess, sys
    from torch.utils.data import DataLoader
    from drivetrain import Accelerator

    class Settings:
        def __len__(self):
            return 1
        def __getitem__(self, index):
            return settings()

    def settings():
        config = Accelerator().config
        return [config.seed, config.mixed_precision, config.section(type(config.ddp_config)).timeout]

    if __name__ == "__main__":
        if sys.argv[1:] == ["again"]:
            print(json.dumps(settings()))
        else:
            again = subprocess.run([sys.executable, __file__, "again"], stdout=subprocess.PIPE, check=True)
            loader = DataLoader(Settings(), num_workers=1, collate_fn=list, multiprocessing_context="spawn")
            told = [settings(), json.loads(again.stdout), *next(iter(loader))]
            print(json.dumps(told))
"""


def test_settings_when_the_script_starts_itself_again_then_reach_all_its_processes(jobs: Any) -> None:
    jobs.write("run.yaml", "seed: 3\nmixed_precision: bf16\nddp_config: {timeout: 60}\n")
    outcome = jobs.run("--cpu", "--config_file", "run.yaml", jobs.write("train.py", SAYS_ITS_SETTINGS))
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out) == [[3, "bf16", 60.0]] * 3
