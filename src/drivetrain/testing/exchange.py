"""What the caller of `ranks.run`, the fork server and the ranks tell each other.

Travels between processes of one user on one machine that start each other, which is why pickles are good enough
here. Tensors travel by value, never as handles to shared memory: nothing is left to close when a rank is killed.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any


class Order(StrEnum):
    """What the caller can ask of the fork server about the ranks that still run."""

    SHOW_STACKS = "show_stacks"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionReference:
    """Where another process finds a function: the module by name, or by file when its name leads elsewhere."""

    module: str
    qualname: str
    file: str | None

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionReference:
        """Return the reference to `function`; TypeError when it does not live at the top of a module."""
        qualname = getattr(function, "__qualname__", "")
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        if module is None or _find(module, qualname=qualname) is not function:
            raise TypeError(
                f"`{qualname or function!r}` cannot run on ranks: other processes find a function by its name\n"
                "  hint: define it with `def` at the top level of a module and hand over values as arguments"
            )
        # The alias under which multiprocessing, too, shows a script to other processes: it keeps the block below
        # `if __name__ == "__main__"` from running again, and pickled classes resolve on both sides.
        name = "__mp_main__" if module.__name__ == "__main__" else module.__name__
        return cls(module=name, qualname=qualname, file=getattr(module, "__file__", None))

    def load(self) -> Callable[..., Any]:
        """Return the function, importing its module."""
        function: Callable[..., Any] = _find(_load_module(self.module, file=self.file), qualname=self.qualname)
        return function


def _find(module: ModuleType, *, qualname: str) -> Any:
    target: Any = module
    for part in qualname.split("."):
        target = getattr(target, part, None)
    return target


def _load_module(name: str, *, file: str | None) -> ModuleType:
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if file is None or not f"{name}.".startswith(f"{error.name}."):
            raise
    else:
        if file is None or _is_same_file(module, file=file):
            return module
    # Test modules: pytest names them after their place below the root folder, which need not be importable.
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"`{file}` is not a Python file", name=name)
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _is_same_file(module: ModuleType, *, file: str) -> bool:
    found = getattr(module, "__file__", None)
    return found is not None and os.path.realpath(found) == os.path.realpath(file)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call on `ranks` ranks.

    Args:
        arguments: pickled (args, kwargs); unpickled only after the function's module is loaded.
        environ: the caller's variables, without those that differ by rank.
        folder: where the ranks write what they have to say; also holds the rendezvous file.
        group_timeout_seconds: for the process group that the ranks open around the function; None opens none.
    """

    function: FunctionReference
    arguments: bytes
    ranks: int
    environ: dict[str, str]
    sys_path: list[str]
    working_directory: str
    folder: str
    group_timeout_seconds: float | None

    @property
    def rendezvous(self) -> str:
        """The `init_method` of this call's process group."""
        return (Path(self.folder) / "rendezvous").as_uri()

    def path(self, rank: int, kind: str) -> Path:
        """Return the file of one rank: its `outcome`, `stdout`, `stderr` or `stack`."""
        return Path(self.folder) / f"rank{rank}.{kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A rank's process is gone.

    Args:
        exit_code: as `os.waitstatus_to_exitcode` has it; minus the signal's number for a killed one.
        monotonic_ns: when the fork server saw it.
    """

    rank: int
    exit_code: int
    monotonic_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """The function came back; `value` is pickled."""

    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """The function raised.

    Args:
        monotonic_ns: when, on the clock that all processes of a machine share.
        lost_peer: whether it says only that another rank is gone.
        traceback: complete text, without the frames of the harness.
    """

    monotonic_ns: int
    type_name: str
    message: str
    lost_peer: bool
    traceback: str


Outcome = Returned | Raised


def write_outcome(outcome: Outcome, path: Path) -> None:
    """Write `outcome` so that a reader sees all of it or no file."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(outcome))
    unfinished.replace(path)


def read_outcome(path: Path) -> Outcome | None:
    """Return what the rank wrote; None when it ended before it could."""
    if not path.exists():
        return None
    outcome: Outcome = pickle.loads(path.read_bytes())
    return outcome
