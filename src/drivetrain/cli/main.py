"""Entry point of the `drivetrain` command: finds the command, turns its errors into text and an exit code.

Exit codes: 0 it worked, 1 the run failed, 2 the request was wrong.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from drivetrain.cli.commands import ABSENT, COMMANDS
from drivetrain.errors import DrivetrainError

_FAILED = 1
_WRONG_REQUEST = 2


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; Ctrl-C ends the process as a signal does, without a traceback.

    Args:
        words: of the command line after the program's name; by default this process's own.
    """
    try:
        code = _dispatch(sys.argv[1:] if words is None else words)
        sys.stdout.flush()
    except DrivetrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return _WRONG_REQUEST
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        raise
    except BrokenPipeError:  # the reader of our output is gone, as in `drivetrain launch --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _FAILED
    return code


def _dispatch(words: Sequence[str]) -> int:
    command, *rest = words or ["--help"]
    if command in ("--help", "-h"):
        _print_overview()
        return 0
    if command == "--version":
        from importlib.metadata import version

        print(f"drivetrain {version('drivetrain')}")
        return 0
    if command not in COMMANDS:
        return _refuse(command)
    return int(import_module(f"drivetrain.cli.{command}").run(rest))


def _print_overview() -> None:
    from rich.console import Console

    from drivetrain.cli.help import print_overview

    print_overview(Console())


def _refuse(command: str) -> int:
    from difflib import get_close_matches

    if command in ABSENT:
        print(f"error: the command `{command}` is not there yet\n  hint: {ABSENT[command]}", file=sys.stderr)
        return _WRONG_REQUEST
    near = get_close_matches(command, COMMANDS, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"the commands are: {', '.join(COMMANDS)}"
    print(f"error: there is no command `{command}`\n  hint: {hint}", file=sys.stderr)
    return _WRONG_REQUEST


if __name__ == "__main__":
    sys.exit(main())
