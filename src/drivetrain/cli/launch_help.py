"""The page of `drivetrain launch --help`, made from the settings."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.text import Text

from drivetrain.cli.help import print_panel
from drivetrain.config import Flag, flags

_OWN = (
    ("--config_file", "PATH", "File of settings, YAML or JSON. Unset: the default file in the cache, when it exists."),
    ("--dry-run", "", "Print what would be started, with all settings and where they come from, and start nothing."),
    ("--help, -h", "", "Print this page."),
)


def print_launch(console: Console) -> None:
    """Print the flags of `launch`, one panel for each group of settings."""
    console.print(Text("drivetrain launch [flags] script.py [script's flags]", style="bold"))
    console.print(Text("drivetrain launch [flags] -m module [module's flags]", style="bold"))
    console.print(
        Text(
            "Starts the script on every process. Flags go before the script; everything after it is the script's. "
            "A flag may be written with `_` or `-`, as `--flag value` or `--flag=value`. A flag beats the variable "
            "DRIVETRAIN_<NAME>, and that beats the file.\n"
        )
    )
    print_panel(console, "Command", list(_OWN))
    for panel, group in groupby(flags(), key=lambda flag: flag.panel):
        print_panel(console, panel[:1].upper() + panel[1:], [_row(flag) for flag in group])


def _row(flag: Flag) -> tuple[str, str, str]:
    names = ", ".join((flag.names[0], *flag.aliases[:1]))
    metavar = "|".join(flag.choices) if flag.choices else flag.metavar
    default = f" [default: {flag.default_text}]" if flag.default_text else ""
    return names, metavar, flag.help + default
