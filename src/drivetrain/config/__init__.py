"""Settings: one schema, and files, flags, variables, help and reference made from it. Never imports torch.

Ideas and how they relate: a `Section` describes settings; `RunConfig` is the section of all of them. A place that says
something (file, environment, command line, code) gives a `Layer` of `Value`s, each with its `Source`. `resolve` merges
layers, validates once, and returns `Resolved`, or raises one `ConfigError` with all problems of all layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.config.flags import Flag, flags
from drivetrain.config.handover import SETTINGS_VARIABLE, settings_from_text, settings_to_text
from drivetrain.config.keys import did_you_mean, nearest
from drivetrain.config.layers import (
    layer_from_code,
    layer_from_flags,
    layer_from_mapping,
    layer_from_variables,
    read_file,
)
from drivetrain.config.migrate import rule_for
from drivetrain.config.process import (
    accelerator_problems,
    check_accelerator,
    digest,
    resolve_for_process,
    shared_settings,
    strategy_for,
)
from drivetrain.config.resolve import Resolved, flatten, resolve, without_effect
from drivetrain.config.section import Section, Setting, StrategySpec, Topology
from drivetrain.config.sources import Layer, Source, Value

if TYPE_CHECKING:
    from drivetrain.config.schema import CoreConfig as RunConfig

__all__ = [
    "SETTINGS_VARIABLE",
    "Flag",
    "Layer",
    "Resolved",
    "RunConfig",
    "Section",
    "Setting",
    "Source",
    "StrategySpec",
    "Topology",
    "Value",
    "accelerator_problems",
    "check_accelerator",
    "did_you_mean",
    "digest",
    "flags",
    "flatten",
    "layer_from_code",
    "layer_from_flags",
    "layer_from_mapping",
    "layer_from_variables",
    "nearest",
    "read_file",
    "resolve",
    "resolve_for_process",
    "rule_for",
    "settings_from_text",
    "settings_to_text",
    "shared_settings",
    "strategy_for",
    "without_effect",
]


def __getattr__(name: str) -> object:
    # RunConfig is made from the strategies' sections, and these import from this package.
    if name == "RunConfig":
        from drivetrain.config.schema import run_config

        return run_config()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
