"""What holds for every test: it ends in time, leaves nothing behind and does not depend on the tests before it."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Generator, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

import deadlines
from drivetrain.testing import ranks
from drivetrain.testing.leaks import leaks_since, take_snapshot
from soak_results import SoakResults

MARKED_FOLDERS = ("ranks", "e2e", "gpu")
STDERR = pytest.StashKey[int]()
NO_GPU = pytest.StashKey[int]()
SOAK = pytest.StashKey[SoakResults]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch that `make soak` uses."""
    parser.addoption("--soak-results", metavar="FILE", help="write a table of the results there")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real stderr; collect a table when one is asked for."""
    config.stash[STDERR] = deadlines.uncaptured_stderr()
    if config.getoption("--soak-results"):
        config.stash[SOAK] = SoakResults()
        config.pluginmanager.register(config.stash[SOAK])


def pytest_unconfigure(config: pytest.Config) -> None:
    """Give back what `pytest_configure` took, and write the table."""
    os.close(config.stash[STDERR])
    if SOAK in config.stash:
        Path(config.getoption("--soak-results")).write_text(config.stash[SOAK].render())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their folder, and put those that need an accelerator aside where there is none."""
    for item in items:
        for name in set(item.path.relative_to(config.rootpath).parts) & set(MARKED_FOLDERS):
            item.add_marker(name)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    wanted = "gpu" in (config.getoption("markexpr") or "").replace("not gpu", "")
    if on_gpu and wanted and not has_accelerator():
        config.stash[NO_GPU] = len(on_gpu)
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if item not in on_gpu]


def has_accelerator() -> bool:
    """Return whether torch can use a device other than the CPU."""
    import torch

    return torch.accelerator.is_available()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which tests were put aside, and why."""
    if NO_GPU in config.stash:
        terminalreporter.write_line(f"{config.stash[NO_GPU]} gpu tests not run: torch finds no accelerator here")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Bound the set-up."""
    with deadlines.deadline(deadlines.seconds_for(item), stderr=item.config.stash[STDERR]):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Bound the test."""
    with deadlines.deadline(deadlines.seconds_for(item), stderr=item.config.stash[STDERR]):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Bound the clean-up."""
    with deadlines.deadline(deadlines.seconds_for(item), stderr=item.config.stash[STDERR]):
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _helpers_run(request: pytest.FixtureRequest) -> None:
    """Start the processes that outlive a test on purpose before the first one is watched."""
    resource_tracker.ensure_running()
    if any(item.get_closest_marker("ranks") for item in request.session.items):
        ranks.start()


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    """Fail a test that leaves variables, threads, processes, files, torch's defaults or a process group changed."""
    before = take_snapshot()
    yield
    leaks = leaks_since(before)
    if leaks:
        pytest.fail("the test left something behind:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Start each test from the same generators, in whatever order tests run."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
