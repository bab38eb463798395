"""Compares a process before and after a test, to find what the test left behind.

A `Snapshot` is taken before; `leaks_since` takes another and says in words what is new. Nothing is imported for it:
torch's defaults are looked at only where torch is loaded already.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from drivetrain.cluster import environ

# Set by pytest for each test, and by torch when it first loads its compiler.
_IGNORED_VARIABLES = frozenset({"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a test must leave as it was.

    Args:
        children: process id -> command, of direct children, ended ones that nobody waited for included.
        descriptors: number -> what it leads to.
        torch_defaults: empty while torch is not loaded.
    """

    variables: Mapping[str, str]
    threads: frozenset[threading.Thread]
    children: Mapping[int, str]
    descriptors: Mapping[int, str]
    torch_defaults: Mapping[str, object]


def take_snapshot() -> Snapshot:
    """Return the present state of this process."""
    return Snapshot(
        variables={name: text for name, text in environ.variables().items() if name not in _IGNORED_VARIABLES},
        threads=frozenset(threading.enumerate()),
        children=_children(),
        descriptors=_descriptors(),
        torch_defaults=_torch_defaults(),
    )


def leaks_since(before: Snapshot, *, patience_seconds: float = 1.0) -> list[str]:
    """Return a sentence for each thing that differs from `before`; empty when all is clean.

    Threads, processes and files that are about to end get `patience_seconds` to do so.
    """
    deadline = time.monotonic() + patience_seconds
    found = _differences(before, take_snapshot())
    if found:
        gc.collect()  # files and pools that only a cycle keeps alive are garbage, not leaks
    while found and time.monotonic() < deadline:
        time.sleep(0.02)
        found = _differences(before, take_snapshot())
    return found


def _differences(before: Snapshot, after: Snapshot) -> list[str]:
    return [
        *_changed_variables(before.variables, after.variables),
        *(f"thread `{thread.name}` still runs" for thread in after.threads - before.threads),
        # A child is known by its number: one that was just started changes its command when it runs its program.
        *(
            f"child process {number} is left: {after.children[number]}"
            for number in sorted(after.children.keys() - before.children.keys())
        ),
        *(
            f"descriptor {number} is open: {target}"
            for number, target in sorted(after.descriptors.items())
            if before.descriptors.get(number) != target
        ),
        *_changed_defaults(before.torch_defaults, after.torch_defaults),
    ]


def _changed_variables(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        if name not in before:
            yield f"variable {name} was added: {after[name]!r}"
        elif name not in after:
            yield f"variable {name} was removed"
        elif before[name] != after[name]:
            yield f"variable {name} was changed from {before[name]!r} to {after[name]!r}"


def _changed_defaults(before: Mapping[str, object], after: Mapping[str, object]) -> Iterator[str]:
    for name, value in after.items():
        expected = before.get(name, _fresh_torch_defaults().get(name, value))
        if value != expected:
            yield f"{name} was changed from {expected} to {value}"


def _children() -> dict[int, str]:
    """Return the direct children; from the kernel's own list where it has one, which costs microseconds."""
    numbers: list[int] = []
    try:
        for task in Path("/proc/self/task").iterdir():
            numbers += map(int, (task / "children").read_text().split())
    except FileNotFoundError:
        numbers = [child.pid for child in psutil.Process().children()]
    return {number: _command(number) for number in numbers}


def _command(process_id: int) -> str:
    try:
        process = psutil.Process(process_id)
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return "(ended)"


def _descriptors() -> dict[int, str]:
    folder = Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")
    found = {}
    for entry in os.listdir(folder):
        try:
            # The listing's own descriptor is in the list and gone by now.
            found[int(entry)] = os.readlink(folder / entry) if sys.platform == "linux" else _kind(int(entry))
        except OSError:
            continue
    return found


def _kind(descriptor: int) -> str:
    status = os.fstat(descriptor)
    return f"device {status.st_dev}, inode {status.st_ino}"


def _torch_defaults() -> dict[str, object]:
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_device"):
        return {}
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "an open process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
    }


def _fresh_torch_defaults() -> dict[str, object]:
    """Return the defaults of a process that has just imported torch; the number of threads depends on the machine."""
    torch: Any = sys.modules["torch"]
    return {
        "torch's default dtype": torch.float32,
        "torch's default device": torch.device("cpu"),
        "torch's gradient mode": True,
        "torch's deterministic mode": False,
        "an open process group": False,
    }
