"""CPUs and accelerators, counted in a file system made for the test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drivetrain.launch.machine import cgroup_cpus, count_visible, find_devices, usable_cpus


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/step/cpu.max": "400000 100000"}, 4.0),
        # The tightest quota on the way up holds.
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/step/cpu.max": "max 100000",
                "sys/fs/cgroup/job/cpu.max": "200000 100000",
            },
            2.0,
        ),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 3.0),
    ],
)
def test_cgroup_when_read_then_gives_the_quota_in_cpus(
    tmp_path: Path, files: dict[str, str], expected: float | None
) -> None:
    assert cgroup_cpus(root=_write(tmp_path, files)) == expected


def test_usable_cpus_when_the_quota_is_below_one_then_is_one(tmp_path: Path) -> None:
    assert usable_cpus(root=_write(tmp_path, {"sys/fs/cgroup/cpu.max": "50000 100000"})) == 1


def test_usable_cpus_when_there_is_no_quota_then_is_the_affinity(tmp_path: Path) -> None:
    assert usable_cpus(root=tmp_path) == len(os.sched_getaffinity(0))


NVIDIA = {"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": "", "dev/nvidia-uvm": ""}
AMD = {
    f"sys/class/kfd/kfd/topology/nodes/{node}/properties": f"cpu_cores_count 1\nsimd_count {count}\n"
    for node, count in enumerate((0, 304, 304, 304))
}


@pytest.mark.parametrize(
    ("build", "files", "variables", "present", "visible"),
    [
        ("cuda", NVIDIA, {}, 2, 2),
        ("cuda", NVIDIA, {"CUDA_VISIBLE_DEVICES": "1"}, 2, 1),
        ("cuda", NVIDIA, {"CUDA_VISIBLE_DEVICES": ""}, 2, 0),
        ("cuda", NVIDIA, {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 2, 1),
        ("cuda", {}, {}, 0, 0),
        ("cuda", {}, {"CUDA_VISIBLE_DEVICES": "0"}, 0, 0),
        ("hip", AMD, {}, 3, 3),
        ("hip", AMD, {"HIP_VISIBLE_DEVICES": "0,2"}, 3, 2),
        ("cpu", NVIDIA, {}, 0, 0),
        ("mps", {}, {}, 1, 1),
        (None, NVIDIA, {}, 0, 0),
    ],
)
def test_devices_when_looked_for_then_only_those_that_torch_can_use_count(
    tmp_path: Path, build: str | None, files: dict[str, str], variables: dict[str, str], present: int, visible: int
) -> None:
    devices = find_devices(variables, root=_write(tmp_path, files), build=build)
    assert (devices.present, devices.visible) == (present, visible)


@pytest.mark.parametrize(
    ("names", "count"), [("0", 1), ("0,1,3", 3), ("", 0), ("-1", 0), ("GPU-aa, GPU-bb", 2), ("0,,1", 1)]
)
def test_visible_when_a_list_is_given_then_ends_at_the_first_invalid_name(names: str, count: int) -> None:
    assert count_visible(names) == count
