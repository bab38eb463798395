"""`drivetrain launch`: settings of file, variables and flags make a plan, which is shown or carried out."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from drivetrain.cli.arguments import LaunchArguments, UsageError, split
from drivetrain.config import (
    Layer,
    flags,
    layer_from_flags,
    layer_from_variables,
    read_file,
    resolve,
    strategy_for,
)
from drivetrain.errors import LaunchError
from drivetrain.launch import LaunchPlan, Machine, Script, inspect_machine, plan, start
from drivetrain.launch.script import check

_FILE_VARIABLE = "DRIVETRAIN_CONFIG_FILE"
_HINT = "`drivetrain launch --help` lists all flags"


def run(words: Sequence[str]) -> int:
    """Run the command with the words after `launch`; return the exit code."""
    arguments = split(words, flags=flags())
    if arguments.help:
        _print_help()
        return 0
    launch_plan = prepare(arguments, machine=inspect_machine())
    for note in launch_plan.resolved.notes:
        print(f"note: {note}", file=sys.stderr)
    for warning in launch_plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if arguments.dry_run:
        from drivetrain.cli.dry_run import describe

        print(describe(launch_plan), end="")
        return 0
    return start(launch_plan)


def prepare(arguments: LaunchArguments, *, machine: Machine) -> LaunchPlan:
    """Return the plan that the command line, the variables and the file make on a machine.

    Raises:
        DrivetrainError: something in them is wrong, or the script does not exist.
    """
    script = _script(arguments)
    files = _file_layers(arguments.config_file, variables=machine.variables)
    resolved = resolve([*files, layer_from_variables(machine.variables), layer_from_flags(arguments.typed)])
    check(script, folder=os.getcwd(), search_path=sys.path)
    launch_plan = plan(resolved, script=script, machine=machine)
    strategy_for(resolved.config, world_size=launch_plan.world_size)
    return launch_plan


def default_file(variables: Mapping[str, str]) -> Path:
    """Return where the file lies that is read when none is named."""
    home = variables.get("DRIVETRAIN_HOME")
    if home:
        return Path(home) / "default_config.yaml"
    cache = variables.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "drivetrain" / "default_config.yaml"


def _script(arguments: LaunchArguments) -> Script:
    if arguments.target is None:
        raise UsageError([f"no script is given: drivetrain launch [flags] script.py [script's flags]\n  hint: {_HINT}"])
    return Script(target=arguments.target, is_module=arguments.is_module, arguments=arguments.arguments)


def _file_layers(flag: str | None, *, variables: Mapping[str, str]) -> list[Layer]:
    named, by = (flag, "--config_file") if flag is not None else (variables.get(_FILE_VARIABLE), _FILE_VARIABLE)
    if named:
        if not os.path.exists(named):
            raise LaunchError(f"there is no file `{named}` in {os.getcwd()}", hint=f"it was named by {by}")
        return [read_file(named)]
    path = default_file(variables)
    return [read_file(path)] if path.exists() else []


def _print_help() -> None:
    from rich.console import Console

    from drivetrain.cli.launch_help import print_launch

    print_launch(Console())
