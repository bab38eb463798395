"""What to say about members that users of Accelerate know and that `drivetrain.Accelerator` does not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType

from drivetrain.registry import strategy_specs

_CHECKPOINTS = (
    "checkpoints of the whole training are not there yet; `accelerator.save_model` writes the weights, and prepared "
    "optimizers and schedulers have `state_dict`"
)
_COMPILE = "compile the model with `torch.compile` in the script"
_CONFIG = "it is a setting: read `accelerator.config.{name}`"
_DEEPSPEED = "DeepSpeed is not there yet"
_FP8 = "fp8 is not there yet"
_PARALLELISM = "parallelism other than over data is not there yet; all ranks read different data"
_RESUME = "skipping batches is not there yet; start the epoch again"
_STATE = (
    "its values are members of the accelerator: `device`, `num_processes`, `process_index`, `is_main_process`, "
    "`mixed_precision`, `sync_gradients`"
)
_WHOLE_MODEL = "models are not spread over devices by hand; see `accelerator.unwrap_model` and `get_state_dict`"

_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "clear": "use `accelerator.free_memory()`",
        "context_parallel_rank": _PARALLELISM,
        "data_parallel_rank": "with data parallelism it is `accelerator.process_index`",
        "data_parallel_shard_rank": "it is `accelerator.process_index`",
        "deepspeed_plugin": _DEEPSPEED,
        "deepspeed_ulysses_dl_adapter": _DEEPSPEED,
        "dispatch_batches": "every rank reads its own share of the data",
        "distributed_type": "ask `accelerator.num_processes` and `accelerator.device`",
        "even_batches": _CONFIG,
        "fp8_backend": _FP8,
        "fp8_enabled": _FP8,
        "fp8_recipe_handler": _FP8,
        "gradient_state": _STATE,
        "is_composable_parallelism_enabled": _PARALLELISM,
        "load_state": _CHECKPOINTS,
        "lomo_backward": "optimizers that step inside of `backward` are not there yet",
        "maybe_context_parallel": _PARALLELISM,
        "multi_device": "ask `accelerator.num_processes` and `accelerator.device`",
        "native_amp": "ask `accelerator.mixed_precision`",
        "non_blocking": "this choice of the data loader is not there yet",
        "parallelism_config": _PARALLELISM,
        "pipeline_parallel_rank": _PARALLELISM,
        "profile": "use `torch.profiler.profile` in the script",
        "project_configuration": "ask `accelerator.project_dir`",
        "register_for_checkpointing": _CHECKPOINTS,
        "register_load_state_pre_hook": _CHECKPOINTS,
        "register_save_state_pre_hook": _CHECKPOINTS,
        "rng_types": "generators are not copied between ranks; `accelerator.set_seed` sets them all",
        "save": (
            "use `accelerator.save_model`, or `torch.save(...)` under `if accelerator.is_main_process:` of what "
            "`accelerator.get_state_dict` returned on all ranks"
        ),
        "save_iteration": _CHECKPOINTS,
        "save_state": _CHECKPOINTS,
        "should_save_model": "ask `accelerator.is_main_process`",
        "skip_first_batches": _RESUME,
        "split_batches": "the batch size of a loader is always that of one rank",
        "state": _STATE,
        "step_scheduler_with_optimizer": "a prepared scheduler steps once per update of its optimizer",
        "tensor_parallel_rank": _PARALLELISM,
        "torch_device_mesh": _PARALLELISM,
        "trigger_sync_in_backward": "it is not there yet; leave `no_sync` before the last `backward` of the window",
        "use_seedable_sampler": "the order of the data always follows `seed`",
        "use_stateful_dataloader": _RESUME,
        "verify_device_map": _WHOLE_MODEL,
    }
)

_FAMILIES: Mapping[str, str] = MappingProxyType({"deepspeed_": _DEEPSPEED, "dynamo_": _COMPILE, "fp8_": _FP8})
"""Sentences for all names that begin so."""


def explain(name: str, *, members: Iterable[str] = ()) -> str:
    """Return the text of an AttributeError for a member that the accelerator does not have.

    Args:
        members: names that it has, among which a misspelled one is looked for.
    """
    head = f"Accelerator has no `{name}`"
    public = [member for member in members if not member.startswith("_")]
    if instead := _INSTEAD.get(name):
        return f"{head}: {instead.format(name=name)}"
    if near := get_close_matches(name, public, n=1):
        return f"{head}\n  hint: did you mean `{near[0]}`?"
    for spec in strategy_specs():
        if spec.section is not None and name.startswith(spec.flag_prefix):
            return f"{head}: its settings are in the configuration; read `accelerator.config.{spec.section}`"
    family = next((sentence for prefix, sentence in _FAMILIES.items() if name.startswith(prefix)), None)
    return head if family is None else f"{head}: {family}"
