"""What `Accelerator(...)` asks of the settings: one process's sources, what ranks must agree on, and the strategy."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from drivetrain.config.handover import SETTINGS_VARIABLE, settings_from_text
from drivetrain.config.keys import keys
from drivetrain.config.layers import layer_from_code, layer_from_mapping, layer_from_variables, read_file
from drivetrain.config.resolve import Resolved, flatten, resolve
from drivetrain.config.schema import CoreConfig
from drivetrain.config.section import StrategySpec
from drivetrain.config.sources import Layer, Source
from drivetrain.errors import ConfigError, Problem
from drivetrain.registry import strategy_specs

_CONFIG_ARGUMENT = "Accelerator(config=...)"


def resolve_for_process(
    *,
    config_file: str | None,
    variables: Mapping[str, str],
    code: Mapping[str, object],
    config: str | os.PathLike[str] | Mapping[str, object] | CoreConfig | None = None,
    world_size: int | None = None,
    world_source: str = "the environment of this process",
) -> Resolved:
    """Return the settings of a process that runs already.

    Args:
        config_file: what `DRIVETRAIN_CONFIG_FILE` names.
        variables: `DRIVETRAIN_*` of this process. What `launch` handed over replaces the others and the file: it has
            read them.
        code: arguments of the call, None for those not given.
        config: takes the place of the file; flags and variables that `launch` has read stay.
        world_size: number of ranks.
        world_source: what says so.

    Raises:
        ConfigError: with all problems.
    """
    layers = [layer_from_code(code)]
    if config is not None:
        layers.append(_layer_from_config(config))
    if SETTINGS_VARIABLE in variables:
        launched = settings_from_text(variables[SETTINGS_VARIABLE])
        layers.append(launched if config is None else _without_files(launched))
        return resolve(layers, world_size=world_size, world_source=world_source)
    layers.append(layer_from_variables(variables))
    if config_file is not None and config is None:
        layers.append(read_file(config_file))
    resolved = resolve(layers, world_size=world_size, world_source=world_source)
    return replace(resolved, notes=(*resolved.notes, *_for_the_launcher(resolved)))


def shared_settings(config: CoreConfig) -> dict[str, object]:
    """Return the settings that must be the same on all ranks, by dotted path."""
    return {path: value for path, value in flatten(config).items() if keys()[path].setting.shared}


def digest(config: CoreConfig) -> str:
    """Return 32 hexadecimal digits that are equal when the shared settings are."""
    text = json.dumps(shared_settings(config), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def strategy_for(config: CoreConfig, *, world_size: int) -> StrategySpec:
    """Return the strategy that `distributed_type` names, or the one that serves this number of ranks by itself.

    Raises:
        ConfigError: the strategy cannot serve this number of ranks, or none does.
    """
    specs: Iterable[StrategySpec] = strategy_specs()
    wanted = config.distributed_type
    for spec in specs:
        if wanted in spec.distributed_types or (wanted is None and spec.automatic(world_size)):
            if problems := tuple(spec.check(config, world_size)):
                raise ConfigError(problems)
            return spec
    message = f"no strategy serves {world_size} ranks by itself"
    raise ConfigError([Problem(path="distributed_type", message=message, hint="choose one by `distributed_type`")])


def check_accelerator(config: CoreConfig, *, count: int, source: Source | None = None) -> None:
    """Check that a run whose `distributed_type` needs accelerators has some.

    Args:
        count: accelerators that this process may use.
        source: of `distributed_type`, for the message.

    Raises:
        ConfigError: there is none.
    """
    if problems := tuple(accelerator_problems(config, count=count)):
        raise ConfigError(replace(problem, source=None if source is None else str(source)) for problem in problems)


def accelerator_problems(
    config: CoreConfig, *, count: int, reason: str = "this process sees none"
) -> Iterator[Problem]:
    """Yield the problem of a `distributed_type` that needs accelerators where this many can be used.

    Args:
        reason: why there is none, for the message.
    """
    wanted = config.distributed_type
    if count == 0 and any(wanted in spec.needs_accelerator for spec in strategy_specs()):
        yield Problem(
            path="distributed_type",
            value=wanted,
            message=f"`{wanted}` needs accelerators: {reason}",
            hint="use MULTI_CPU to train on the CPU, or leave `distributed_type` out",
        )


def _layer_from_config(config: str | os.PathLike[str] | Mapping[str, object] | CoreConfig) -> Layer:
    if isinstance(config, CoreConfig):
        return layer_from_mapping(
            {name: getattr(config, name) for name in sorted(config.model_fields_set)}, place=_CONFIG_ARGUMENT
        )
    if isinstance(config, Mapping):
        return layer_from_mapping(config, place=_CONFIG_ARGUMENT)
    given: object = config  # whatever the annotation says
    if not isinstance(given, str | os.PathLike):
        message = f"expected a path, a mapping or a RunConfig, not a {type(given).__name__}"
        raise ConfigError([Problem(path="", source=_CONFIG_ARGUMENT, message=message)])
    return read_file(given)


def _for_the_launcher(resolved: Resolved) -> Iterator[str]:
    for path, source in resolved.sources.items():
        if source.kind == "environment" and not keys()[path].setting.shared:
            yield f"{source} has no effect: only `drivetrain launch` reads it, and it did not start this process"


def _without_files(layer: Layer) -> Layer:
    return Layer(by_path={path: value for path, value in layer.items() if value.source.kind != "file"})
