"""Where a rank leaves what ended it, for the launcher to read: files without a name, which go when the processes go."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass

from drivetrain.launch.failures import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    """The descriptors of two files that the launcher opens and the rank inherits, under the same numbers.

    Args:
        record_fd: for the record of an exception.
        crash_fd: for the stack of the interpreter at a fatal signal.
    """

    record_fd: int
    crash_fd: int

    @classmethod
    def open(cls) -> LastWords:
        """Make room for one rank."""
        return cls(record_fd=_nameless_file(), crash_fd=_nameless_file())

    @property
    def descriptors(self) -> tuple[int, int]:
        """Both, for a process that closes or passes on what it holds."""
        return self.record_fd, self.crash_fd

    def close(self) -> None:
        """Give the room back."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def write(self, record: Record) -> None:
        """Leave a record; its last character tells a reader that it is complete."""
        with open(self.record_fd, "wb", closefd=False) as stream:
            stream.write(json.dumps(asdict(record)).encode() + b"\n")

    def record(self) -> Record | None:
        """Return the record, or None as long as the rank has left none."""
        text = _read(self.record_fd)
        return Record(**json.loads(text)) if text.endswith(b"\n") else None

    def crash(self) -> str:
        """Return the stack of the interpreter as it was written, empty when there is none."""
        return _read(self.crash_fd).decode("utf-8", "replace")


def _nameless_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
