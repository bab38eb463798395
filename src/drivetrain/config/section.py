"""What every settings model is made of, and how a strategy announces itself.

A strategy's `settings.py` imports from here and from `drivetrain.errors` only: the full `RunConfig` is put together
from all strategies, so it cannot exist yet while one of them is being read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from drivetrain.config.sources import WORDS

if TYPE_CHECKING:
    from drivetrain.config.schema import CoreConfig
    from drivetrain.errors import Problem


EMPTY: tuple[object, ...] = (None, False, "", "no", "NO", (), [], {})
"""Values that say nothing."""


class Section(BaseModel):
    """A group of settings: immutable, unknown keys forbidden, the string under a field is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What a launch starts, as far as it decides which settings matter.

    Args:
        num_machines: that take part.
        is_on_cpu: whether no accelerator is used.
        keeps_launcher: whether the launcher stays, as the parent of the processes on its machine.
    """

    num_machines: int
    is_on_cpu: bool
    keeps_launcher: bool


def _never_idle(_topology: Topology) -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the schema says about a field beyond its type; stands in the field's `Annotated`.

    Args:
        panel: heading on the help page and in the reference.
        aliases: further names on the command line and in code, such as `cpu` for `use_cpu`.
        is_list: a text with commas that may be given as a list.
        shared: all ranks must hold the same value; False for what only the launcher of one machine reads.
        idle: why the setting changes nothing on a topology, None where it does; a launch says it to those who set it.
            What trains the same with one rank and with many, such as `ddp_*`, is never idle: it belongs to the run.
        neutral: values besides the default that may be given where the setting is idle, and nobody is told:
            what Accelerate writes for everybody.
    """

    panel: str = ""
    aliases: tuple[str, ...] = ()
    is_list: bool = False
    shared: bool = True
    idle: Callable[[Topology], str | None] = _never_idle
    neutral: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """The key is without use here.

    Args:
        reason: why a value that says something is refused, or what does the same here.
        neutral: values that say nothing; a mapping of empty values says nothing either.
        hint: the fix, where the reason does not hold it.
    """

    reason: str
    neutral: tuple[object, ...] = EMPTY
    hint: str | None = "leave it out"

    def accepts(self, value: object) -> bool:
        """Return whether the value says nothing."""
        if isinstance(value, dict):
            return all(inner in EMPTY for inner in value.values())
        meant = WORDS.get(value.strip().lower()) if isinstance(value, str) else None
        return value in self.neutral or (meant is not None and meant in self.neutral)


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
        flag: name of a flag without value that chooses it, such as `use_fsdp`; its section then chooses it, too, where
            nothing is said of `distributed_type`.
        absent: keys that Accelerate has in its section and this version has not, by their names without prefix.
        absent_values: the same for values of keys that are there: why not, by the key and the value as text.
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
    flag: str | None = None
    absent: Mapping[str, Dropped] = field(default_factory=dict)
    absent_values: Mapping[tuple[str, str], str] = field(default_factory=dict)
    needs_accelerator: tuple[str, ...] = ()
    check: Callable[[CoreConfig, int | None], Iterable[Problem]] = _no_problems
