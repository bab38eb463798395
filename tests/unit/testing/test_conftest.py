"""Runs pytest inside pytest, with the same conftest, on tests that misbehave."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[3]
CONFIGURATION = f"""
[pytest]
addopts = -p no:hypothesispytest -p no:anyio --import-mode=importlib --strict-markers -m "not soak and not gpu"
pythonpath = {ROOT / "tests" / "support"}
markers =
    ranks
    e2e
    soak
    gpu
    deadline
"""


def run(pytester: pytest.Pytester, *arguments: str, in_subprocess: bool = False, **files: str) -> pytest.RunResult:
    pytester.makefile(".ini", pytest=CONFIGURATION)
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    for path, text in files.items():
        target = pytester.path / path.replace("__", "/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.with_suffix(".py").write_text(text)
    runner = pytester.runpytest_subprocess if in_subprocess else pytester.runpytest_inprocess
    return runner(*arguments)


def test_suite_when_a_test_leaks_then_it_fails_and_the_next_one_passes(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAKED", "0")
    result = run(
        pytester,
        test_it="""
import os
def test_bad():
    os.environ["LEAKED"] = "1"
def test_good():
    pass
""",
    )
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*left something behind*", "*variable LEAKED was changed from '0' to '1'*"])


def test_suite_when_a_fixture_cleans_up_then_nothing_is_reported(pytester: pytest.Pytester) -> None:
    result = run(pytester, test_it="def test_good(monkeypatch):\n    monkeypatch.setenv('NOT_LEAKED', '1')\n")
    result.assert_outcomes(passed=1)


def test_suite_when_a_test_passes_its_deadline_then_it_fails_and_the_run_goes_on(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        test_it="""
import time, pytest
@pytest.mark.deadline(0.2)
def test_slow():
    time.sleep(30)
@pytest.mark.deadline(0.2)
def test_swallows():
    while True:
        try:
            time.sleep(30)
        except Exception:
            pass
def test_good():
    pass
""",
    )
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*was not done after its deadline of 0.2 s*"])


def test_suite_when_a_test_cannot_be_interrupted_then_all_stacks_are_shown_and_the_run_ends(
    pytester: pytest.Pytester,
) -> None:
    result = run(
        pytester,
        in_subprocess=True,
        test_it="""
import deadlines, pytest, signal, time
@pytest.fixture(scope="session", autouse=True)
def quick():
    deadlines.UNINTERRUPTIBLE_SECONDS = 0.1
@pytest.mark.deadline(0.2)
def test_stuck_below_python():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(30)
""",
    )
    assert result.ret == 1
    result.stderr.fnmatch_lines(["Timeout*", "*in test_stuck_below_python*"])


def test_suite_when_markers_come_from_folders_then_gpu_and_soak_are_put_aside(pytester: pytest.Pytester) -> None:
    test = "def test_x(request):\n    print(sorted(mark.name for mark in request.node.iter_markers()))\n"
    soak = "import pytest\n@pytest.mark.soak\ndef test_x(): pass\n"
    result = run(pytester, "-s", e2e__test_a=test, gpu__test_b=test, test_c=soak)
    result.assert_outcomes(passed=1, deselected=2)
    result.stdout.fnmatch_lines(["*'e2e'*"])


def test_suite_when_gpu_tests_are_asked_for_without_one_then_it_says_why_none_ran(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stands in for torch, so that the test means the same on a machine with an accelerator.
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(accelerator=SimpleNamespace(is_available=lambda: False)))
    result = run(pytester, "-m", "gpu", gpu__test_b="def test_x(): pass")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["1 gpu tests not run: torch finds no accelerator here"])


def test_suite_when_a_soak_table_is_asked_for_then_it_counts_repeats_and_failures(pytester: pytest.Pytester) -> None:
    test = """
import pytest
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_many(seed, record_property):
    record_property("found", "7 of 7")
    assert seed != 1
"""
    result = run(pytester, "-m", "soak", "--soak-results=table.md", test_it=test)
    result.assert_outcomes(passed=2, failed=1)
    rows = [line for line in (pytester.path / "table.md").read_text().splitlines() if "test_many" in line]
    assert rows == ["| `test_it.py::test_many` | 3 | 1 failed | 0 | found: 7 of 7 |"]


def test_suite_when_tests_draw_then_order_does_not_matter(pytester: pytest.Pytester) -> None:
    test = "import random\ndef test_{}():\n    print('number', random.random())\n"
    result = run(pytester, "-s", test_it=test.format("a") + test.format("b"))
    numbers = [line[line.index("number ") :] for line in result.outlines if "number " in line]
    assert len(numbers) == 2
    assert numbers[0] == numbers[1]
