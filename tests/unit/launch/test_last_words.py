"""What a rank leaves for its launcher arrives whole or not at all, and leaves no file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.launch.failures import Record
from drivetrain.launch.last_words import LastWords

RECORD = Record(
    rank=2,
    monotonic_ns=123,
    type="ValueError",
    text="caf\u00e9 \udce9 " + "x" * 100_000,
    place="/x/train.py:8",
    traceback="Traceback ...\n",
    lost_peer=False,
)


@pytest.fixture
def last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LastWords]:
    """Room for one rank, in an empty folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    opened = LastWords.open()
    yield opened
    opened.close()


def test_record_when_written_by_another_process_then_is_the_same(last_words: LastWords, tmp_path: Path) -> None:
    assert last_words.record() is None
    pid = os.fork()
    if pid == 0:
        last_words.write(RECORD)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert last_words.record() == RECORD
    assert list(tmp_path.iterdir()) == []


def test_record_when_written_in_part_then_is_not_there_yet(last_words: LastWords) -> None:
    last_words.write(RECORD)
    size = os.fstat(last_words.record_fd).st_size
    for length in (1, size // 2, size - 1):
        os.ftruncate(last_words.record_fd, length)
        last_words.write(RECORD)
        os.ftruncate(last_words.record_fd, length)
        assert last_words.record() is None


def test_crash_when_a_stack_was_written_then_is_read(last_words: LastWords) -> None:
    assert last_words.crash() == ""
    os.write(last_words.crash_fd, b"Fatal \xff")
    assert last_words.crash() == "Fatal \ufffd"


def test_descriptors_when_a_program_is_started_then_do_not_go_with_it(last_words: LastWords) -> None:
    assert not any(map(os.get_inheritable, last_words.descriptors))
