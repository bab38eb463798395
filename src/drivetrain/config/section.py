"""What every settings model is made of, and how a strategy announces itself.

A strategy's `settings.py` imports from here and from `drivetrain.errors` only: the full `RunConfig` is put together
from all strategies, so it cannot exist yet while one of them is being read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from drivetrain.config.schema import CoreConfig
    from drivetrain.errors import Problem


class Section(BaseModel):
    """A group of settings: immutable, unknown keys forbidden, the string under a field is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the schema says about a field beyond its type; stands in the field's `Annotated`.

    Args:
        panel: heading on the help page and in the reference.
        aliases: further names on the command line and in code, such as `cpu` for `use_cpu`.
        shared: all ranks must hold the same value; False for what only the launcher of one machine reads.
    """

    panel: str = ""
    aliases: tuple[str, ...] = ()
    shared: bool = True


def _no_problems(_config: CoreConfig, _world_size: int | None) -> Iterable[Problem]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySpec:
    """What a strategy tells about itself before any of its code is imported.

    Args:
        name: the registry's name for it.
        title: heading of its settings.
        distributed_types: values of `distributed_type` that choose it.
        automatic: whether it serves this world size when `distributed_type` is unset.
        section: name of its section in the configuration, such as `ddp_config`; None when it has no settings.
        flag_prefix: in front of its keys on the command line, in variables and, if the user likes, in files.
        settings: the model of its section.
        implementation: `module:class` of the strategy.
        needs_accelerator: those of `distributed_types` that never run on the CPU.
        check: cross-field rules, called for every run with the world size when that is known. A problem's `path` is
            a dotted key; other keys that its message holds in backticks are shown with their value and source.
    """

    name: str
    title: str
    distributed_types: tuple[str, ...]
    automatic: Callable[[int], bool]
    section: str | None = None
    flag_prefix: str = ""
    settings: type[Section] | None = None
    implementation: str
    needs_accelerator: tuple[str, ...] = ()
    check: Callable[[CoreConfig, int | None], Iterable[Problem]] = _no_problems
