from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from drivetrain.testing.leaks import leaks_since, take_snapshot

PATIENCE_SECONDS = 0.05


def leaks(before: object) -> list[str]:
    return leaks_since(before, patience_seconds=PATIENCE_SECONDS)  # type: ignore[arg-type]


def test_leaks_since_when_nothing_happened_then_empty() -> None:
    assert leaks_since(take_snapshot(), patience_seconds=0) == []


def test_leaks_since_when_a_variable_changes_then_it_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAK_CHANGED", "old")
    monkeypatch.setenv("LEAK_REMOVED", "x")
    before = take_snapshot()
    monkeypatch.setenv("LEAK_ADDED", "1")
    monkeypatch.setenv("LEAK_CHANGED", "new")
    monkeypatch.delenv("LEAK_REMOVED")
    assert leaks(before) == [
        "variable LEAK_ADDED was added: '1'",
        "variable LEAK_CHANGED was changed from 'old' to 'new'",
        "variable LEAK_REMOVED was removed",
    ]


def test_leaks_since_when_a_thread_runs_then_it_is_named() -> None:
    before = take_snapshot()
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="forgotten")
    thread.start()
    try:
        assert leaks(before) == ["thread `forgotten` still runs"]
    finally:
        release.set()
        thread.join()


def test_leaks_since_when_a_thread_is_about_to_end_then_it_waits() -> None:
    before = take_snapshot()
    thread = threading.Timer(0.1, lambda: None)
    thread.start()
    assert leaks_since(before, patience_seconds=10) == []


def test_leaks_since_when_a_child_runs_then_its_command_is_shown() -> None:
    before = take_snapshot()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = leaks(before)
        assert child.stdin is not None
        child.stdin.write(b"\n")
    assert any(f"child process {child.pid} is left" in leak and "input()" in leak for leak in found)


def test_leaks_since_when_nobody_waits_for_an_ended_child_then_it_is_a_leak() -> None:
    before = take_snapshot()
    process_id = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 0"], {})
    try:
        assert [leak for leak in leaks(before) if f"child process {process_id}" in leak]
    finally:
        os.waitpid(process_id, 0)


def test_leaks_since_when_a_file_stays_open_then_its_path_is_shown(tmp_path: Path) -> None:
    before = take_snapshot()
    descriptor = os.open(tmp_path / "kept", os.O_CREAT)
    try:
        (leak,) = leaks(before)
        assert leak.startswith(f"descriptor {descriptor} is open")
        assert sys.platform != "linux" or leak.endswith("kept")
    finally:
        os.close(descriptor)


@pytest.fixture
def torch_defaults() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("torch_defaults")
def test_leaks_since_when_defaults_of_torch_change_then_each_is_named() -> None:
    before = take_snapshot()
    threads = torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(threads + 1)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    assert leaks(before) == [
        "torch's default dtype was changed from torch.float32 to torch.float64",
        "torch's default device was changed from cpu to meta",
        f"torch's number of threads was changed from {threads} to {threads + 1}",
        "torch's gradient mode was changed from True to False",
        "torch's deterministic mode was changed from False to True",
    ]


def test_leaks_since_when_a_process_group_stays_open_then_it_is_a_leak(tmp_path: Path) -> None:
    before = take_snapshot()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert "an open process group was changed from False to True" in leaks(before)
    finally:
        torch.distributed.destroy_process_group()


def test_take_snapshot_when_torch_is_not_loaded_then_it_stays_so() -> None:
    code = "import sys; from drivetrain.testing import leaks; leaks.take_snapshot(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
