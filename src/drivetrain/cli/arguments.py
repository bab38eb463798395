"""Splits the command line of `launch`: flags up to the script, everything after it is the script's.

A loop of our own, because that line is what parsers of the usual kind get wrong: they take flags out of the script's
part, take `true` after a boolean flag for the script, or swallow an unknown flag. Nothing is converted here; what was
typed stays text with the spelling it was typed in, and the settings are validated in one place with all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from drivetrain.config import Flag, nearest, rule_for
from drivetrain.errors import DrivetrainError

_TRUTH = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0"})
_ALMOST_SURE = 0.8
"""Likeness, from 0 to 1, above which a word is a misspelled flag and not another one."""
_SCRIPTS_FLAGS = "flags of the script go after the script"
_OWN_FLAGS = {
    "--config_file": "config_file",
    "--config-file": "config_file",
    "--dry-run": "dry_run",
    "--dry_run": "dry_run",
    "--help": "help",
    "-h": "help",
}


class UsageError(DrivetrainError):
    """The command line cannot be read as it stands; holds all faults of it."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        count = len(self.faults)
        head = [] if count == 1 else [f"{count} problems on the command line"]
        indent = "" if count == 1 else "  "
        super().__init__("\n".join(head + [indent + fault.replace("\n", f"\n{indent}") for fault in self.faults]))


@dataclass(slots=True, kw_only=True)
class LaunchArguments:
    """What was typed after `launch`.

    Args:
        typed: settings: the flag, its spelling and the text after it.
        target: path or module; None when nothing was given.
        arguments: of the script.
    """

    typed: list[tuple[Flag, str, str]] = field(default_factory=list)
    config_file: str | None = None
    dry_run: bool = False
    help: bool = False
    target: str | None = None
    is_module: bool = False
    arguments: tuple[str, ...] = ()


def split(words: Sequence[str], *, flags: Iterable[Flag]) -> LaunchArguments:
    """Return what the words after `launch` mean.

    Raises:
        UsageError: with all unknown flags and all flags without a value at once.
    """
    table = {name: flag for flag in flags for name in (*flag.names, *flag.aliases)}
    reader = _Reader(words, table)
    reader.read()
    if reader.faults and not reader.result.help:
        raise UsageError(reader.faults)
    return reader.result


class _Reader:
    """One pass over the words."""

    def __init__(self, words: Sequence[str], table: dict[str, Flag]) -> None:
        self._words = list(words)
        self._table = table
        self.result = LaunchArguments()
        self.faults: list[str] = []

    def read(self) -> None:
        while self._words and self.result.target is None:
            word = self._words.pop(0)
            if word == "-m":
                self._take_script(self._words.pop(0) if self._words else None, is_module=True)
                return
            if not word.startswith("-") or word in ("-", "--"):
                self._take_script(word, is_module=False)
                return
            self._read_flag(word)

    def _take_script(self, target: str | None, *, is_module: bool) -> None:
        if target == "--" and not is_module:
            target = self._words.pop(0) if self._words else None
        if target is None:
            if is_module:
                self.faults.append("`-m` needs the name of a module")
            return
        self.result.target = target
        self.result.is_module = is_module
        self.result.arguments = tuple(self._words)

    def _read_flag(self, word: str) -> None:
        name, equals, text = word.partition("=")
        value = text if equals else None
        if name in _OWN_FLAGS:
            self._read_own(name, value)
        elif (flag := self._table.get(name)) is None:
            self._refuse(name, has_value=value is not None)
        elif flag.kind == "bool":
            self._read_bool(flag, name, value)
        elif value is None and not self._has_value():
            choices = f", one of: {', '.join(flag.choices)}" if flag.choices else ""
            self.faults.append(f"`{name}` needs a value{choices}")
        else:
            self.result.typed.append((flag, name, self._words.pop(0) if value is None else value))

    def _read_own(self, name: str, value: str | None) -> None:
        what = _OWN_FLAGS[name]
        if what == "config_file":
            self._read_config_file(name, value)
        elif value is not None:
            self.faults.append(f"`{name}` takes no value, got `{value}`")
        elif what == "help":
            self.result.help = True
        else:
            self.result.dry_run = True

    def _read_config_file(self, name: str, value: str | None) -> None:
        if value is None and not self._has_value():
            self.faults.append(f"`{name}` needs the path of a file")
            return
        path = self._words.pop(0) if value is None else value
        if self.result.config_file not in (None, path):
            self.faults.append(f"`{name}` names two files, `{self.result.config_file}` and `{path}`: keep one of them")
        self.result.config_file = path

    def _read_bool(self, flag: Flag, name: str, value: str | None) -> None:
        if value is None:
            value = self._words.pop(0) if self._words and self._words[0].lower() in _TRUTH else "true"
        self.result.typed.append((flag, name, value))

    def _refuse(self, name: str, *, has_value: bool) -> None:
        """Note an unknown flag, and step over what looks like its value, so that the rest is still checked."""
        if rule := rule_for(name.lstrip("-").replace("-", "_")):
            self.faults.append(f"there is no flag `{name}`: {rule.reason}")
        else:
            self.faults.append(f"there is no flag `{name}`\n  hint: {self._hint(name)}")
        if not has_value and len(self._words) > 1 and self._looks_like_value(self._words[0]):
            self._words.pop(0)

    def _hint(self, name: str) -> str:
        """Return what an unknown flag was meant to be: almost surely a misspelling, or perhaps one of the script's."""
        words = [flag.removeprefix("--") for flag in (*self._table, *_OWN_FLAGS) if flag.startswith("--")]
        near = nearest(name.lstrip("-"), words)
        if near is None:
            return _SCRIPTS_FLAGS
        is_misspelled = SequenceMatcher(None, name.lstrip("-").lower(), near).ratio() > _ALMOST_SURE
        return f"did you mean `--{near}`?" + ("" if is_misspelled else f" {_SCRIPTS_FLAGS}")

    def _has_value(self) -> bool:
        """Whether the next word can be a value; a negative number can, another flag cannot."""
        if not self._words:
            return False
        word = self._words[0]
        return not word.startswith("--") and (not word.startswith("-") or word[1:2].isdigit())

    @staticmethod
    def _looks_like_value(word: str) -> bool:
        return not word.startswith("-") and not word.endswith(".py")
