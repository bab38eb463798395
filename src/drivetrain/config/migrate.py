"""Keys of Accelerate's files that drivetrain spells otherwise or has no use for; nothing else knows them.

Such a key is *translated* with a note, *dropped* when it holds the value that means "not used", and refused by name
otherwise. A key that a registered strategy has is never looked up here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

_TPU = "TPU pods are not supported"
_LATER = "this part of Accelerate's file is not supported by this version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """The key is without use here.

    Args:
        neutral: values that may stand in a file all the same, besides the empty ones.
        reason: why any other value is refused.
    """

    reason: str
    neutral: tuple[object, ...] = ()

    def accepts(self, value: object) -> bool:
        """Return whether the value says nothing."""
        return value in (None, False, "", "no", "NO", (), [], {}) or value in self.neutral


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """The key is another setting here.

    Args:
        path: the setting that takes its place.
        translate: its value for the old one, or None when the old one says nothing.
    """

    path: str
    translate: Callable[[object], object]


def _when_true(value: str) -> Callable[[object], object]:
    return lambda old: {True: value, False: None}.get(old, old) if isinstance(old, bool) else old


RENAMED: Mapping[str, Renamed] = MappingProxyType(
    {
        "fp16": Renamed(path="mixed_precision", translate=_when_true("fp16")),
        "debug": Renamed(path="check_collectives", translate=_when_true("always")),
    }
)

DROPPED: Mapping[str, Dropped] = MappingProxyType(
    {
        "command_file": Dropped(reason=_TPU),
        "commands": Dropped(reason=_TPU),
        "deepspeed_config": Dropped(reason=_LATER),
        "downcast_bf16": Dropped(reason=_TPU),
        "dynamo_backend": Dropped(reason="call `torch.compile` in the script instead"),
        "dynamo_config": Dropped(reason="call `torch.compile` in the script instead"),
        "enable_cpu_affinity": Dropped(reason="processes are not bound to CPUs by this version"),
        "fp8_config": Dropped(reason=_LATER),
        "fsdp_config": Dropped(reason=_LATER),
        "main_training_function": Dropped(reason="the script runs as a whole", neutral=("main",)),
        "megatron_lm_config": Dropped(reason=_LATER),
        "mpirun_config": Dropped(reason="start `mpirun` yourself: its variables are understood"),
        "parallelism_config": Dropped(reason=_LATER),
        "tpu_env": Dropped(reason=_TPU),
        "tpu_name": Dropped(reason=_TPU),
        "tpu_use_cluster": Dropped(reason=_TPU),
        "tpu_use_sudo": Dropped(reason=_TPU),
        "tpu_vm": Dropped(reason=_TPU),
        "tpu_zone": Dropped(reason=_TPU),
    }
)
