"""The pages of `--help`, printed through rich. Nothing here is markup except what this file writes itself."""

from __future__ import annotations

from rich.box import ROUNDED
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from drivetrain.cli.commands import COMMANDS


def print_overview(console: Console) -> None:
    """Print the commands."""
    console.print(Text("drivetrain COMMAND ...", style="bold"))
    console.print(Text("Starts training scripts on one process or many, with settings from one place.\n"))
    print_panel(console, "Commands", [(name, "", title) for name, title in COMMANDS.items()])
    console.print(Text("drivetrain COMMAND --help tells more; drivetrain --version prints the version."))


def print_panel(console: Console, title: str, rows: list[tuple[str, str, str]]) -> None:
    """Print rows of name, value and text in a box with a title."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold", max_width=22)
    table.add_column()
    for names, metavar, text in rows:
        table.add_row(Text(names), Text(metavar), Text(text))
    console.print(Panel(table, title=Text(title), title_align="left", box=ROUNDED, border_style="dim"))
