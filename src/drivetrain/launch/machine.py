"""What this machine offers to a launch: CPUs that may be used, accelerators that can be seen. Never imports torch.

`inspect_machine` reads it off the machine; everything else in this package takes the result as an argument.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from drivetrain.cluster import environ

_NO_DEVICE = ("", "-1", "none", "void", "nodevfiles")


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The accelerators of this machine.

    Args:
        present: that are there, hidden ones too.
        visible: that ranks would see.
        variable: the environment variable that hides some of them; empty when nothing is there.
        reason: how this was found, for the user.
    """

    present: int
    visible: int
    variable: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The facts a plan is made from.

    Args:
        cpus: that this process may use, after affinity and the cgroup's quota.
        variables: the launcher's environment.
        platform: as `sys.platform`.
        python: the interpreter that runs the script.
    """

    cpus: int
    devices: Devices
    variables: Mapping[str, str]
    platform: str
    python: str


def inspect_machine() -> Machine:
    """Return the facts about this machine and this process; takes about a millisecond."""
    variables = environ.variables()
    return Machine(
        cpus=usable_cpus(root=Path("/")),
        devices=find_devices(variables, root=Path("/"), build=torch_build()),
        variables=variables,
        platform=sys.platform,
        python=sys.executable,
    )


def usable_cpus(*, root: Path) -> int:
    """Return how many CPUs this process may keep busy: its affinity, or the cgroup's quota where that is less."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = cgroup_cpus(root=root)
    return count if quota is None else max(1, min(count, int(quota)))


def cgroup_cpus(*, root: Path) -> float | None:
    """Return the CPUs that the cgroup's quota is worth, or None where there is no quota.

    Sources: cgroup v2, `cpu.max` holds quota and period in microseconds; v1, two files, quota -1 for none.
    """
    base = root / "sys/fs/cgroup"
    own = base / _own_cgroup(root)
    folders = [own, *(folder for folder in own.parents if folder.is_relative_to(base))]
    pairs = [_read(folder / "cpu.max").split() for folder in folders]
    pairs.append([_read(base / "cpu/cpu.cfs_quota_us").strip(), _read(base / "cpu/cpu.cfs_period_us").strip()])
    quotas = [float(pair[0]) / float(pair[1]) for pair in pairs if len(pair) == 2 and all(map(_is_number, pair))]
    return min(quotas, default=None)


def find_devices(variables: Mapping[str, str], *, root: Path, build: str | None) -> Devices:
    """Return the accelerators, without asking a driver: a rank that is forked later could not use it any more.

    Args:
        variables: `CUDA_VISIBLE_DEVICES` and its kin hide devices.
        root: of the file system that is asked.
        build: what torch is built for, as `torch_build` says.
    """
    if build == "mps":
        return Devices(present=1, visible=1, variable="", reason="Apple GPU")
    if build is None or build not in _COUNTERS:
        reason = "torch is not installed" if build is None else "this torch is built for the CPU only"
        return Devices(present=0, visible=0, variable="", reason=reason)
    count, variable = _COUNTERS[build]
    present = count(root)
    value = variables.get(variable)
    if present == 0:
        return Devices(present=0, visible=0, variable="", reason="no accelerator found")
    if value is None:
        return Devices(present=present, visible=present, variable=variable, reason=f"{present} found")
    visible = min(present, count_visible(value))
    return Devices(present=present, visible=visible, variable=variable, reason=f"{variable}={value}")


def count_visible(names: str) -> int:
    """Return how many devices a list such as `0,1` names; everything after an invalid name is ignored, as CUDA does."""
    listed = [name.strip().lower() for name in names.split(",")]
    return next((index for index, name in enumerate(listed) if name in _NO_DEVICE), len(listed))


def torch_build() -> str | None:
    """Return `cuda`, `hip`, `xpu`, `mps` or `cpu`: what the installed torch is for; None when there is none.

    Read from the text of its `version.py`, because importing torch takes a second.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = _read(Path(spec.origin).parent / "version.py")
    for name in ("hip", "cuda", "xpu"):
        if re.search(rf"^{name}\b[^=\n]*=\s*['\"]", text, re.MULTILINE):
            return name
    return "mps" if sys.platform == "darwin" and os.uname().machine == "arm64" else "cpu"


def _nvidia_devices(root: Path) -> int:
    return len([path for path in (root / "dev").glob("nvidia*") if path.name[len("nvidia") :].isdigit()])


def _amd_devices(root: Path) -> int:
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    return len([path for path in nodes if re.search(r"^simd_count [1-9]", _read(path), re.MULTILINE)])


def _intel_devices(root: Path) -> int:
    cards = (root / "sys/class/drm").glob("renderD*/device/vendor")
    return len([path for path in cards if _read(path).strip() == "0x8086"])


def _own_cgroup(root: Path) -> str:
    """Return the folder of this process's cgroup (v2) below the mount, empty at the top."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            return line.removeprefix("0::").strip("/ ")
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _is_number(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


_COUNTERS: Mapping[str, tuple[Callable[[Path], int], str]] = {
    "cuda": (_nvidia_devices, "CUDA_VISIBLE_DEVICES"),
    "hip": (_amd_devices, "HIP_VISIBLE_DEVICES"),
    "xpu": (_intel_devices, "ZE_AFFINITY_MASK"),
}
