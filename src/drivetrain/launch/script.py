"""The program that is launched: a file or a module, and its own arguments.

`check` is for the launcher: it says that there is such a program and imports nothing of it. `run_as_main` is for a
rank: it runs the program the way `python script.py` or `python -m module` does, in a `__main__` module of its own
that stays in place afterwards, so that classes of the script can still be pickled in threads and exit handlers.
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

from drivetrain.errors import LaunchError


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What to run.

    Args:
        target: path of a Python file, or the name of a module.
        is_module: whether `target` is the name of a module, as after `python -m`.
        arguments: the program's own, `sys.argv[1:]` there.
    """

    target: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """What follows `python` on a command line that runs the same program."""
        return (*(("-m",) if self.is_module else ()), self.target, *self.arguments)


def check(script: Script, *, folder: str, search_path: Sequence[str]) -> None:
    """Raise LaunchError when there is no such program.

    Args:
        folder: the working directory, first in the search for a module.
        search_path: where Python looks for modules after that.
    """
    if script.is_module:
        if _find_module(script.target, path=[folder, *search_path]) is None:
            raise LaunchError(
                f"no module named `{script.target}` is found from {folder}",
                hint="give the name as after `python -m`; a file is launched by its path, without `-m`",
            )
        return
    path = os.path.join(folder, script.target)
    if os.path.isdir(path):
        raise LaunchError(f"`{script.target}` is a folder, and a Python file is expected")
    if not os.path.exists(path):
        hint = None
        if _find_module(script.target, path=[folder]) is not None:
            hint = f"a module is launched with `-m {script.target}`"
        raise LaunchError(f"there is no file `{script.target}` in {folder}", hint=hint)


def _find_module(name: str, *, path: Sequence[str]) -> ModuleSpec | None:
    """Return where a dotted module is, or None, without importing the packages above it."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    where: Sequence[str] = path
    spec = None
    for depth in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: depth + 1]), where)
        if spec is None:
            return None
        where = list(spec.submodule_search_locations or ())
    if spec is not None and spec.submodule_search_locations is not None:
        return PathFinder.find_spec(f"{name}.__main__", where)
    return spec


def run_as_main(script: Script) -> None:
    """Run the program to its end in a new `__main__`, with its own `sys.argv` and first entry of `sys.path`.

    Whatever the program raises passes through, SystemExit too.
    """
    if script.is_module:
        _put_first_on_path(os.getcwd())
        code, module = _load_module(script.target)
    else:
        _put_first_on_path(os.path.dirname(os.path.realpath(script.target)))
        code, module = _load_file(os.path.abspath(script.target))
    sys.argv = [str(module.__file__) if script.is_module else script.target, *script.arguments]
    # Loader workers that are spawned find the script's classes under the second name.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    exec(code, module.__dict__)


def _put_first_on_path(folder: str) -> None:
    if sys.flags.safe_path:
        return
    sys.path[:1] = [folder]


def _load_file(path: str) -> tuple[CodeType, ModuleType]:
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    vars(module)["__cached__"] = None
    with io.open_code(path) as stream:
        return compile(stream.read(), path, "exec", dont_inherit=True), module


def _load_module(name: str) -> tuple[CodeType, ModuleType]:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = None if spec is None or spec.loader is None else spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    if spec is None or code is None:
        raise ImportError(f"No code object available for {name}")
    module = ModuleType("__main__")
    module.__spec__ = spec
    module.__file__ = spec.origin
    module.__loader__ = spec.loader
    module.__package__ = spec.parent
    vars(module)["__cached__"] = spec.cached
    return code, module
