"""How long it takes to start: help, imports, and a launch beside the other launchers.

Two scripts are launched: an empty one, and one that imports torch, as every training script does. With several ranks
the empty one is no goal: both torchrun and drivetrain import torch once in the launcher, and that is what it measures.

    python benchmarks/startup.py [--repeats 5]

All commands of a group take turns within one run, so that a busy machine slows all of them alike; medians are printed,
and ratios to the command that a goal names. Absolute times mean little on a shared machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

DRIVETRAIN = (sys.executable, "-m", "drivetrain.cli.main")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A limit: the median of `command`, over that of `beside` or in seconds when that is None."""

    command: str
    beside: str | None
    below: float


GOALS: Mapping[tuple[str, int], Goal] = {
    ("empty script", 1): Goal(command="drivetrain launch", beside=None, below=0.3),
    ("script that imports torch", 4): Goal(command="drivetrain launch", beside="torchrun", below=0.5),
}


def main() -> None:
    """Measure every group and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # nobody's default file
        scripts = {"empty script": "", "script that imports torch": "import torch\n"}
        measure_help(repeats)
        measure_import(repeats)
        for number, (title, text) in enumerate(scripts.items()):
            script = Path(folder) / f"script{number}.py"
            script.write_text(text)
            for ranks in (1, 2, 4):
                goal = GOALS.get((title, ranks))
                show(f"{title}, ranks: {ranks}", race(launchers(script, ranks=ranks), repeats=repeats), goal)


def measure_help(repeats: int) -> None:
    """Help pages beside `import torch`."""
    medians = race(
        {
            "import torch": (sys.executable, "-c", "import torch"),
            "drivetrain --help": (*DRIVETRAIN, "--help"),
            "launch --help": (*DRIVETRAIN, "launch", "--help"),
        },
        repeats=repeats,
    )
    show("help", medians, Goal(command="launch --help", beside="import torch", below=0.25))


def measure_import(repeats: int) -> None:
    """What `from drivetrain import Accelerator` takes once torch is there; the process measures itself."""
    code = "import torch, time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
    statements = {"nothing": "pass", "Accelerator": "from drivetrain import Accelerator"}
    times: dict[str, list[float]] = {name: [] for name in statements}
    for _ in range(repeats):
        for name, statement in statements.items():
            command = (sys.executable, "-c", code.format(statement))
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                print(f"\nimport after torch: not measured, {done.stderr.splitlines()[-1]}")
                return
            times[name].append(float(done.stdout))
    medians = {name: statistics.median(values) for name, values in times.items()}
    show("import after torch", medians, Goal(command="Accelerator", beside=None, below=0.15))


def launchers(script: Path, *, ranks: int) -> dict[str, Sequence[str]]:
    """Return the command line of every launcher that is installed."""
    count = str(ranks)
    commands: dict[str, Sequence[str]] = {
        "drivetrain launch": (*DRIVETRAIN, "launch", "--cpu", "--num_processes", count, str(script)),
        "torchrun": (*TORCHRUN, "--nproc-per-node", count, str(script)),
    }
    if ranks == 1:
        commands["python"] = (sys.executable, str(script))
    if find_spec("accelerate") is not None:
        # On the CPU it starts one process whatever is asked for; that is what is measured.
        commands["accelerate launch"] = (*ACCELERATE, "--cpu", "--num_processes", count, str(script))
    return commands


def race(commands: Mapping[str, Sequence[str]], *, repeats: int) -> dict[str, float]:
    """Return the median seconds of each command; they take turns, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(repeats + 1):
        for name, command in commands.items():
            start = time.perf_counter()
            subprocess.run(command, capture_output=True, check=True)
            if turn > 0:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def show(title: str, medians: Mapping[str, float], goal: Goal | None) -> None:
    """Print one group, each command with its ratio to the slowest, and whether the goal is met."""
    slowest = max(medians.values())
    print(f"\n{title}")
    for name, seconds in medians.items():
        print(f"  {name:20} {seconds:7.3f} s   {seconds / slowest:5.2f}")
    if goal is not None:
        value = medians[goal.command] / (1.0 if goal.beside is None else medians[goal.beside])
        unit = "s" if goal.beside is None else f"of {goal.beside}"
        verdict = "met" if value < goal.below else "MISSED"
        print(f"  goal: {goal.command} below {goal.below} {unit}: {value:.3f}, {verdict}")


if __name__ == "__main__":
    main()
