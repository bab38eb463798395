"""Settings of fully sharded data parallelism (FSDP2), and what of Accelerate's is not there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal

from drivetrain.config.section import EMPTY, Dropped, Section, Setting, StrategySpec
from drivetrain.errors import Problem

if TYPE_CHECKING:
    from drivetrain.config.schema import CoreConfig


class FSDPSettings(Section):
    """Arguments of torch's `fully_shard`, and how a model is cut into units; names are Accelerate's."""

    version: Literal[2] = 2
    """Version of torch's implementation; `fully_shard` is the second."""

    auto_wrap_policy: Literal["TRANSFORMER_BASED_WRAP", "NO_WRAP"] = "TRANSFORMER_BASED_WRAP"
    """What is gathered at once: one block after the other, or the whole model."""

    transformer_layer_cls_to_wrap: Annotated[str | None, Setting(is_list=True)] = None
    """Classes of the blocks, with commas. Unset: those that the model declares, else its repeated blocks."""

    reshard_after_forward: bool = True
    """Free a block's parameters after its forward, and gather them again for its backward."""

    @property
    def unit_names(self) -> tuple[str, ...]:
        """The classes of the blocks that were asked for."""
        names = (self.transformer_layer_cls_to_wrap or "").split(",")
        return tuple(name.strip() for name in names if name.strip())


def _not_there(what: str, *neutral: object) -> Dropped:
    return Dropped(reason=f"{what} is not there yet", neutral=(*EMPTY, *neutral))


def _first_version(*neutral: object) -> Dropped:
    return Dropped(reason="this belongs to the first version of FSDP", neutral=(*EMPTY, *neutral))


_ABSENT: Mapping[str, Dropped] = MappingProxyType(
    {
        "activation_checkpointing": _not_there("activation checkpointing by a setting"),
        "activation_checkpointing_offload": _not_there("activation checkpointing by a setting"),
        "backward_prefetch": _first_version("BACKWARD_PRE", "NO_PREFETCH"),
        "cpu_offload": _not_there("keeping parameters on the CPU"),
        "cpu_ram_efficient_loading": _not_there("loading without a whole model on each rank", True),
        "forward_prefetch": _first_version(),
        "ignored_modules": _not_there("leaving modules unsharded"),
        "min_num_params": _not_there("cutting a model by size"),
        "offload_params": _not_there("keeping parameters on the CPU"),
        "plugin": Dropped(
            reason="there are no plug-ins: their values are settings",
            neutral=EMPTY,
            hint="give `fsdp_config`, such as `fsdp_config={'reshard_after_forward': False}`",
        ),
        "sharding_strategy": Dropped(
            reason="parameters, gradients and states are all sharded, over all ranks",
            neutral=(*EMPTY, "FULL_SHARD", 1, "1"),
            hint="for SHARD_GRAD_OP use `reshard_after_forward: false`; hybrid sharding is not there yet",
        ),
        "state_dict_type": Dropped(
            reason="weights are saved whole, under the names of the model",
            neutral=(*EMPTY, "FULL_STATE_DICT", "SHARDED_STATE_DICT"),
        ),
        "sync_module_states": _first_version(True),
        "use_orig_params": _first_version(True),
    }
)

_ABSENT_VALUES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("auto_wrap_policy", "SIZE_BASED_WRAP"): "cutting a model by size is not there yet",
        ("version", "1"): "the first version of FSDP is not supported",
    }
)


def _check(config: CoreConfig, _world_size: int | None) -> Iterator[Problem]:
    settings = config.section(FSDPSettings)
    if settings.auto_wrap_policy == "NO_WRAP" and settings.unit_names:
        yield Problem(
            path="fsdp_config.transformer_layer_cls_to_wrap",
            message="this names blocks, and `fsdp_config.auto_wrap_policy` asks for none",
            hint="leave one of the two out",
        )


SPEC = StrategySpec(
    name="fsdp",
    title="fully sharded data parallelism (FSDP2)",
    distributed_types=("FSDP",),
    automatic=lambda _world_size: False,
    section="fsdp_config",
    flag_prefix="fsdp_",
    settings=FSDPSettings,
    implementation="drivetrain.strategies.fsdp.strategy:FSDPStrategy",
    flag="use_fsdp",
    absent=_ABSENT,
    check=_check,
    absent_values=_ABSENT_VALUES,
)
