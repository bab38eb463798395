"""Breaks: lines of the package made wrong on purpose, each with the tests that must notice.

`breaks.toml` is the list. A break finds its line by a regular expression, so that it outlives edits around that line,
and is refused where the expression finds none or several: a list that no longer fits the source proves nothing.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("breaks.toml")
PACKAGE = "src/drivetrain"


class BadBreak(ValueError):
    """A break that cannot be made in the source as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """One line made wrong.

    Args:
        loses: what no longer holds then, in words.
        file: below the package's folder.
        pattern: a regular expression that finds something in exactly one line of the file.
        replacement: what takes the place of what was found, in the form of `re.sub`.
        tests: node ids of pytest; at least one of them must fail.
        line: the number of the line, where the pattern alone leaves it open.
    """

    name: str
    loses: str
    file: str
    pattern: str
    replacement: str
    tests: tuple[str, ...]
    line: int | None = None

    @property
    def path(self) -> str:
        """The file, relative to the repository."""
        return f"{PACKAGE}/{self.file}"

    def apply(self, text: str) -> str:
        """Return the text of the file with its line broken.

        Raises:
            BadBreak: the pattern finds no line or several, nothing changes, or what comes out is no Python.
        """
        lines = text.splitlines(keepends=True)
        numbers = [self.line] if self.line is not None else lines_found(self.pattern, text)
        if len(numbers) != 1:
            found = f"lines {', '.join(map(str, numbers))}" if numbers else "no line"
            raise BadBreak(f"{self.name}: `{self.pattern}` finds {found} of {self.path}, and must find one")
        index = numbers[0] - 1
        whole = lines[index]
        lines[index] = re.sub(self.pattern, self.replacement, whole, count=1)
        if lines[index] == whole:
            raise BadBreak(f"{self.name}: line {numbers[0]} of {self.path} stays as it is")
        broken = "".join(lines)
        try:
            compile(broken, self.path, "exec")
        except SyntaxError as error:
            raise BadBreak(f"{self.name}: {self.path} is no Python any more: {error}") from error
        return broken


def lines_found(pattern: str, text: str) -> list[int]:
    """Return the numbers of the lines in which a regular expression finds something."""
    return [number for number, line in enumerate(text.splitlines(), start=1) if re.search(pattern, line)]


def listed(path: Path = LIST) -> list[Break]:
    """Return the breaks of the list; TOML itself refuses a name that repeats."""
    tables = tomllib.loads(path.read_text("utf-8"))
    return [Break(name=name, **{**table, "tests": tuple(table["tests"])}) for name, table in tables.items()]


def made_up(rule: str, *, tests: Sequence[str], root: Path = ROOT) -> Iterator[Break]:
    """Yield a break for each line that a rule `file:pattern=>replacement` finds.

    Raises:
        BadBreak: the rule has another form, or finds nothing.
    """
    parts = re.fullmatch(r"([^:]+):(.+)=>(.*)", rule)
    if parts is None:
        raise BadBreak(f"`{rule}` is not of the form `file:pattern=>replacement`")
    file = parts[1].removeprefix(f"{PACKAGE}/")
    numbers = lines_found(parts[2], (root / PACKAGE / file).read_text("utf-8"))
    if not numbers:
        raise BadBreak(f"`{parts[2]}` finds no line of {PACKAGE}/{file}")
    for number in numbers:
        yield Break(
            name=f"{file}:{number}",
            loses="made up for this run",
            file=file,
            pattern=parts[2],
            replacement=parts[3],
            tests=tuple(tests),
            line=number,
        )
