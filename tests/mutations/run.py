"""Shows that the tests can fail: breaks one line of the package at a time and looks for a test that notices.

    python tests/mutations/run.py                       all breaks of the list
    python tests/mutations/run.py --only 'ddp|fsdp'     those whose names match
    python tests/mutations/run.py --list                what is in the list
    python tests/mutations/run.py --break 'window.py:is not None=>is None' --tests tests/unit/test_window.py

The working tree is copied once, at the start, and never touched. Every break is made in a further copy of its own,
and tests run there against that copy. First the same tests run once without a break and must pass. The exit code is 1
where they do not, or where a break survives: either the line does nothing, or a test is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from breaks import PACKAGE, ROOT, BadBreak, Break, listed, made_up

COPIED = ("src", "tests", "examples", "pyproject.toml")
BREAK_SECONDS = 90.0  # a break may make ranks wait for each other
CONTROL_SECONDS = 600.0
DETAIL_LENGTH = 220
BY_TIME = "by time"
PYTEST = ("-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "--hypothesis-seed=0")
PASSED, FAILED = 0, 1  # exit codes of pytest; others mean that tests did not run

Verdict = Literal["killed", "SURVIVED", "UNUSABLE"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process ended.

    Args:
        code: its exit code; None where it was stopped for taking too long.
    """

    code: int | None
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a break."""

    broken: Break
    verdict: Verdict
    detail: str
    seconds: float


# -- a copy, and what runs in it -------------------------------------------------------------------------------------


@contextmanager
def copied(source: Path) -> Iterator[Path]:
    """Give a folder with a copy of what tests need, and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="drivetrain-mutations-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for entry in COPIED:
            if (source / entry).is_dir():
                shutil.copytree(source / entry, folder / entry, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source / entry, folder / entry)
        (folder / "tmp").mkdir()
        yield folder


def run_in(folder: Path, *arguments: str, seconds: float) -> Ended:
    """Run Python in a copy, on the package of that copy, with all that it starts in a group that can be stopped."""
    changed = {"PYTHONPATH": str(folder / "src"), "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
    environ = {**os.environ, **changed, "COLUMNS": "400"}
    output = folder / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return Ended(code=code, output=output.read_text("utf-8", errors="replace"))


def where_not_the_copy(folder: Path) -> list[str]:
    """Return the places outside the copy from which the package is imported there."""
    ended = run_in(folder, "tests/mutations/where.py", seconds=CONTROL_SECONDS)
    if ended.code != 0:
        return [ended.output.strip()]
    package = str((folder / PACKAGE).resolve())
    return [place for place in ended.output.split() if not str(Path(place).resolve()).startswith(package)]


# -- the control and the breaks --------------------------------------------------------------------------------------


def control(breaks: Iterable[Break], *, whole: Path) -> str | None:
    """Run the tests of all breaks on the package as it is; return what is wrong, None if they pass."""
    tests = list(dict.fromkeys(test for broken in breaks for test in broken.tests))
    begun = time.monotonic()
    if places := where_not_the_copy(whole):
        return "tests would not run on the copy: " + "; ".join(places)
    ended = run_in(whole, *PYTEST, *tests, seconds=CONTROL_SECONDS)
    if ended.code == PASSED:
        print(f"control: {len(tests)} tests pass without a break, {time.monotonic() - begun:.1f} s", flush=True)
        return None
    return "the tests fail without a break:\n" + ended.output


def attempt(broken: Break, *, whole: Path, seconds: float) -> Result:
    """Make one break in a copy of the whole and run its tests until one fails."""
    begun = time.monotonic()
    with copied(whole) as folder:
        try:
            path = folder / broken.path
            path.write_text(broken.apply(path.read_text("utf-8")), "utf-8")
        except BadBreak as error:
            return Result(broken=broken, verdict="UNUSABLE", detail=str(error), seconds=0.0)
        ended = run_in(folder, *PYTEST, "-x", *broken.tests, seconds=seconds)
    verdict, detail = judge(ended, seconds=seconds)
    return Result(broken=broken, verdict=verdict, detail=detail, seconds=time.monotonic() - begun)


def judge(ended: Ended, *, seconds: float) -> tuple[Verdict, str]:
    """Return what the end of a run of tests says of a break, and the reason."""
    if ended.code is None:
        # No test has failed: that it hangs is likely, and no proof.
        return "UNUSABLE", f"{BY_TIME}: no end after {seconds:g} s"
    if ended.code == PASSED:
        return "SURVIVED", ""
    failures = re.findall(r"^(?:FAILED|ERROR) \S*?::(.*)", ended.output, re.MULTILINE)
    if ended.code == FAILED:
        return "killed", f"by {failures[0]}" if failures else "by the deadline of a test"
    # Not collected: the package cannot be imported, or a test that is named is not there.
    lines = ended.output.strip().splitlines() or [f"exit code {ended.code}"]
    return "UNUSABLE", next((line for line in lines if line.startswith(("ERROR", "E  "))), lines[-1])


def attempts(breaks: Sequence[Break], *, whole: Path, jobs: int, seconds: float) -> Iterator[Result]:
    """Yield the results as they come; what runs when this is left ends by itself."""
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        pending = [pool.submit(attempt, broken, whole=whole, seconds=seconds) for broken in breaks]
        try:
            yield from (done.result() for done in as_completed(pending))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


# -- the command line ------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="PATTERN", default="", help="breaks whose name this finds")
    parser.add_argument("--list", action="store_true", help="print the breaks and run none")
    parser.add_argument("--break", dest="rule", metavar="FILE:PATTERN=>TEXT", help="break each line found instead")
    parser.add_argument("--tests", nargs="+", metavar="TEST", default=[], help="with --break: what must fail")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="breaks at a time (default 1)")
    parser.add_argument("--seconds", type=float, default=BREAK_SECONDS, help="for each break (default %(default)g)")
    options = parser.parse_args(arguments)
    if bool(options.rule) != bool(options.tests):
        parser.error("--break and --tests belong together")
    return options


def run(breaks: Sequence[Break], *, whole: Path, jobs: int, seconds: float) -> int:
    """Run the control and then the breaks, and print what becomes of them; return the exit code."""
    begun = time.monotonic()
    if problem := control(breaks, whole=whole):
        print(f"error: {problem}", file=sys.stderr)
        return 1
    results = []
    for result in attempts(breaks, whole=whole, jobs=jobs, seconds=seconds):
        results.append(result)
        name, detail = result.broken.name, result.detail[:DETAIL_LENGTH]
        print(f"{result.verdict:8} {result.seconds:5.1f} s  {name:<{width_of(breaks)}}  {detail}", flush=True)
    left = [result for result in results if result.verdict != "killed"]
    killed = f"{len(results) - len(left)} of {len(results)} breaks killed"
    print(f"{killed}; {time.monotonic() - begun:.0f} s")
    for result in left:
        print(f"{result.verdict} {result.broken.name}: {result.broken.loses} ({result.broken.path})")
    return 1 if left else 0


def width_of(breaks: Iterable[Break]) -> int:
    """Return the length of the longest name."""
    return max(len(broken.name) for broken in breaks)


def chosen(options: argparse.Namespace, *, root: Path) -> list[Break]:
    """Return the breaks that are asked for.

    Raises:
        BadBreak: there is none, or the rule for new ones is wrong.
    """
    breaks = list(made_up(options.rule, tests=options.tests, root=root)) if options.rule else listed()
    found = [broken for broken in breaks if re.search(options.only, broken.name)]
    if not found:
        raise BadBreak(f"no break has a name like `{options.only}`, see --list")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; return the exit code: 2 where the request is wrong."""
    options = parse(arguments)
    try:
        if options.list:
            breaks = chosen(options, root=ROOT)
            print(*(f"{one.name:<{width_of(breaks)}}  {one.path}: {one.loses}" for one in breaks), sep="\n")
            return 0
        with copied(ROOT) as whole:
            return run(chosen(options, root=whole), whole=whole, jobs=options.jobs, seconds=options.seconds)
    except BadBreak as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ctrl-C: what was copied and started goes
    sys.exit(main())
