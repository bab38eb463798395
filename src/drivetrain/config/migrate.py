"""What Accelerate's and torchrun's users write that drivetrain spells otherwise or lacks; nothing else knows it.

In files such a key is *translated* with a note (`RENAMED`). Everything else that is known has a rule that says in one
sentence what to do instead (`rule_for`); files and code may hold it as long as its value means "not used". A name that
the schema has is never looked up here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from drivetrain.config.section import EMPTY, Dropped
from drivetrain.registry import strategy_specs

_COMPILE = "compile the model with `torch.compile` in the script instead"
_DEEPSPEED = "DeepSpeed is not there yet"
_FP8 = "fp8 is not there yet"
_IPEX = "Intel's extension for PyTorch is not supported"
_LOADER = "this choice of the data loader is not there yet"
_MEGATRON = "Megatron-LM is not there yet"
_MPI = "start `mpirun` yourself: its variables are understood"
_PARALLELISM = "parallelism other than over data is not there yet"
_TPU = "TPU pods are not supported"


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


def _here(what: str) -> Dropped:
    return Dropped(reason=f"here this is {what}", neutral=(None,), hint=None)


def _instead(reason: str, *neutral: object) -> Dropped:
    return Dropped(reason=reason, neutral=neutral or EMPTY)


RENAMED: Mapping[str, Renamed] = MappingProxyType(
    {
        "fp16": Renamed(path="mixed_precision", translate=_when_true("fp16")),
        "debug": Renamed(path="check_collectives", translate=_when_true("always")),
    }
)

DROPPED: Mapping[str, Dropped] = MappingProxyType(
    {
        "bf16": _here("`mixed_precision`, with the value `bf16`"),
        "command_file": _instead(_TPU),
        "commands": _instead(_TPU),
        "dataloader_config": _instead("`even_batches` is a setting of its own, other choices of loaders are not there"),
        "device_placement": _instead("`prepare` always moves what it gets to `accelerator.device`", None, True),
        "dispatch_batches": _instead("every rank reads its own share of the data"),
        "downcast_bf16": _instead(_TPU),
        "dynamo_backend": _instead(_COMPILE),
        "dynamo_config": _instead(_COMPILE),
        "dynamo_plugin": _instead(_COMPILE),
        "enable_cpu_affinity": _instead("processes are not bound to CPUs by this version"),
        "gradient_accumulation_plugin": _here("`gradient_accumulation_steps`"),
        "ipex": _instead(_IPEX),
        "ipex_config": _instead(_IPEX),
        "kwargs_handlers": Dropped(
            reason="there are no handlers: their values are settings",
            hint="give `ddp_config`, such as `ddp_config={'find_unused_parameters': True}`",
        ),
        "main_training_function": _instead("the script runs as a whole", *EMPTY, "main"),
        "master_addr": _here("`main_process_ip`"),
        "master_port": _here("`main_process_port`"),
        "module": _here("`-m`, before the name of the module"),
        "multi_gpu": Dropped(
            reason="here this is `distributed_type`, with the value `MULTI_GPU`",
            hint="leave it out: without a number of processes every device gets one",
        ),
        "nnodes": _here("`num_machines`"),
        "node_rank": _here("`machine_rank`"),
        "non_blocking": _instead(_LOADER),
        "nproc_per_node": _here("`num_processes`, which counts the processes of all machines together"),
        "offload_optimizer_device": _instead(_DEEPSPEED, None, "none"),
        "offload_param_device": _instead(_DEEPSPEED, None, "none"),
        "project_config": _here("`project_dir` and `logging_dir`"),
        "rdzv_endpoint": _here("`main_process_ip` and `main_process_port`"),
        "redirects": _here("`log_dir`"),
        "rng_types": _instead("generators are not copied between ranks: `seed` sets them all"),
        "split_batches": Dropped(
            reason="the batch size of a loader is always that of one rank",
            hint="give `global_batch_size` to fix the rows per update over all ranks",
        ),
        "step_scheduler_with_optimizer": _instead("a prepared scheduler steps with its optimizer", None, True),
        "tee": _here("`log_dir`"),
        "use_seedable_sampler": _instead("the order of the data follows `seed`", *EMPTY, True),
        "use_stateful_dataloader": _instead(_LOADER),
        "use_xpu": _instead(_IPEX),
        "vm": _instead(_TPU),
        "zero_stage": _instead(_DEEPSPEED, None),
    }
)

_FAMILIES: Mapping[str, Dropped] = MappingProxyType(
    {
        "deepspeed_": _instead(_DEEPSPEED),
        "dynamo_": _instead(_COMPILE),
        "fp8_": _instead(_FP8),
        "megatron_lm_": _instead(_MEGATRON),
        "mpirun_": _instead(_MPI),
        "parallelism_config": _instead(_PARALLELISM),
        "tpu_": _instead(_TPU),
        "use_deepspeed": _instead(_DEEPSPEED),
        "use_megatron_lm": _instead(_MEGATRON),
        "use_mpirun": _instead(_MPI),
        "use_parallelism_config": _instead(_PARALLELISM),
        "zero3_": _instead(_DEEPSPEED),
    }
)
"""Rules for all keys that begin so."""

_ABSENT_VALUES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("compute_environment", "AMAZON_SAGEMAKER"): "SageMaker is not supported",
        ("distributed_type", "DEEPSPEED"): _DEEPSPEED,
        ("distributed_type", "MEGATRON_LM"): _MEGATRON,
        **{
            ("distributed_type", f"MULTI_{kind}"): f"{kind} devices are not supported"
            for kind in ("HPU", "MLU", "MUSA", "NEURON", "NPU", "SDAA", "XPU")
        },
        ("distributed_type", "XLA"): "XLA devices are not supported",
        ("mixed_precision", "fp8"): _FP8,
    }
)


def rule_for(name: str) -> Dropped | None:
    """Return the rule for a name that Accelerate or torchrun has and drivetrain has not; None for any other.

    Args:
        name: as it stands at the top of a file, or behind the dashes of a flag.
    """
    if name in DROPPED:
        return DROPPED[name]
    if name in RENAMED:
        return _here(f"`{RENAMED[name].path}`")
    for spec in strategy_specs():
        if spec.section is not None and name.startswith(spec.flag_prefix):
            return absent_key(spec.section, name)
    return next((rule for prefix, rule in _FAMILIES.items() if name.startswith(prefix)), None)


def absent_value(path: str, value: object) -> str | None:
    """Return the sentence about a value of a setting that exists in Accelerate only; None for any other."""
    section, _, name = path.rpartition(".")
    for spec in strategy_specs():
        if section and spec.section == section:
            reason: str | None = spec.absent_values.get((name, str(value)))
            return reason
    return _ABSENT_VALUES.get((path, str(value).upper())) or _ABSENT_VALUES.get((path, str(value).lower()))


def absent_key(section: str, name: str) -> Dropped | None:
    """Return the rule for a key of a section that its strategy does not have; None for any other."""
    found: dict[str, Dropped] = {}
    for spec in strategy_specs():
        if spec.section == section:
            found = {**spec.absent, **{spec.flag_prefix + key: rule for key, rule in spec.absent.items()}}
    return found.get(name)
