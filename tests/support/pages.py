"""Finds the code in Markdown pages and runs it as a reader would.

    ```python                 runs; all such blocks of a page share one namespace, in order
    ```python file=train.py   becomes a file, for the commands of the page
    ```bash                   `drivetrain ...` runs; `make`, `python` and `torchrun` must name what exists

Every page has a folder of its own, in which `examples` is there. Other languages are not looked at.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND_SECONDS = 200
FREE_COMMANDS = frozenset({"cd", "git", "pip", "source"})  # need a network, or have no effect that could be checked
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+)(?P<info>[^`]*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: `line` is that of its first line of code; `words` follow the language."""

    line: int
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that this block is, if any."""
        return next((word.removeprefix("file=") for word in self.words if word.startswith("file=")), None)


def pages() -> list[Path]:
    """Return every page of the documentation."""
    readme = ROOT / "README.md"
    return [*([readme] if readme.exists() else []), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page; ValueError for one that is never closed."""
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        opening = _FENCE.match(line)
        if opening is None:
            continue
        indent, fence = len(opening["indent"]), opening["fence"]
        inside: list[str] = []
        for _, each in lines:
            if each.strip() == fence:
                break
            inside.append(each[indent:])
        else:
            raise ValueError(f"the block in line {number} is never closed")
        language, *words = opening["info"].split() or [""]
        yield Block(line=number + 1, language=language, words=tuple(words), text="\n".join(inside) + "\n")


def commands(block: Block) -> Iterator[tuple[int, str]]:
    """Yield the commands of a `bash` block with their lines; continued lines are one, comments none."""
    joined = block.text.replace("\\\n", "\0\n")
    command, start = "", block.line
    for number, line in enumerate(joined.splitlines(), start=block.line):
        start = start if command else number
        command += line.removesuffix("\0")
        if not line.endswith("\0"):
            if shlex.split(command, comments=True):
                yield start, command
            command = ""


def problems(page: Path, *, folder: Path) -> list[str]:
    """Run the page's code in `folder`; return what failed, as `page:line: what happened`."""
    found = list(blocks(page.read_text("utf-8")))
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    for block in found:
        if block.file is not None:
            (folder / block.file).write_text(block.text)
    programs = [block for block in found if block.language == "python" and block.file is None]
    failures = [_run_python(page, programs, folder=folder)] if programs else []
    for block in found:
        if block.language == "bash":
            failures += [
                _check(command, place=f"{page.name}:{line}", folder=folder) for line, command in commands(block)
            ]
    return [failure for failure in failures if failure]


def _run_python(page: Path, programs: list[Block], *, folder: Path) -> str:
    # Blank lines in front make the numbers in a traceback those of the page.
    parts = [(program.line, "\n" * (program.line - 1) + program.text) for program in programs]
    code = f"namespace = {{'__name__': '__main__'}}\nfor line, part in {parts!r}:\n"
    code += f"    exec(compile(part, {str(page)!r}, 'exec'), namespace)\n"
    return _run([sys.executable, "-c", code], place=f"{page.name}:{programs[0].line}", folder=folder)


def _check(command: str, *, place: str, folder: Path) -> str:
    name, *arguments = shlex.split(command, comments=True)
    if name == "drivetrain":
        return _run(["bash", "-euo", "pipefail", "-c", command], place=place, folder=folder)
    if name == "make":
        missing = sorted({word for word in arguments if "=" not in word and not word.startswith("-")} - make_targets())
        return f"{place}: the Makefile has no target `{missing[0]}`" if missing else ""
    if name in ("python", "python3", "torchrun"):
        scripts = [word for word in arguments if word.endswith(".py")]
        missing = [script for script in scripts if not (folder / script).exists()]
        return f"{place}: there is no file `{missing[0]}`" if missing else ""
    return "" if name in FREE_COMMANDS else f"{place}: `{name}` is neither run nor checked: mark the block as `text`"


def make_targets() -> set[str]:
    """Return the names of the Makefile's targets that people call."""
    text = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][a-z0-9_-]*):", text, re.MULTILINE))


def _run(command: list[str], *, place: str, folder: Path) -> str:
    programs = str(Path(sys.executable).parent)
    environ = {**os.environ, "PATH": os.pathsep.join([programs, os.environ["PATH"]]), "CUDA_VISIBLE_DEVICES": ""}
    environ["DRIVETRAIN_HOME"] = str(folder / "home")  # the reader's own default settings must not take part
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"{place}: not done after {COMMAND_SECONDS} s"
    return "" if done.returncode == 0 else f"{place}: exit code {done.returncode}\n{done.stdout[-4000:]}"
