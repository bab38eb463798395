"""Which rank is named, and what is printed about it."""

from __future__ import annotations

import signal

import pytest

from drivetrain.launch.failures import (
    Ending,
    Record,
    first_failure,
    record_of,
    report,
    script_stack,
)

GLOO = "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7043"


def record(rank: int, ns: int, *, lost_peer: bool = False, text: str = "no data", kind: str = "ValueError") -> Record:
    """Return what a rank wrote."""
    return Record(
        rank=rank,
        monotonic_ns=ns,
        type=kind,
        text=text,
        place="/x/train.py:8",
        traceback=f"Traceback (most recent call last):\n  File ...\n{kind}: {text}\n",
        lost_peer=lost_peer,
    )


def ending(rank: int, ns: int, code: int | None, *, wrote: Record | None = None, crash: str = "") -> Ending:
    """Return how a rank ended."""
    return Ending(rank=rank, exit_code=code, ended_ns=ns, record=wrote, crash=crash)


def echo(rank: int, ns: int) -> Ending:
    """Return the end of a rank that lost its peer."""
    return ending(rank, ns + 5, 1, wrote=record(rank, ns, lost_peer=True, text=GLOO, kind="RuntimeError"))


@pytest.mark.parametrize(
    ("endings", "cause"),
    [
        ([ending(0, 10, 0), ending(1, 20, 0)], None),
        # Its own word counts, not when its process was gone: rank 1 raised first and took longer to end.
        ([ending(0, 50, 1, wrote=record(0, 40)), ending(1, 90, 1, wrote=record(1, 30))], 1),
        # Echoes are earlier on the clock than the launcher's look at the rank that was killed.
        ([echo(0, 10), ending(1, 20, -9), echo(2, 11)], 1),
        ([ending(0, 20, -6), ending(1, 10, -11)], 1),
        # Recorded its failure and hangs in an exit handler.
        ([ending(0, 99, None), ending(1, 99, None, wrote=record(1, 10))], 1),
        # Left early with exit code 0.
        ([echo(0, 20), ending(1, 10, 0), echo(2, 21)], 1),
        # Ended well after the others had failed: not to blame; the earliest echo is all there is.
        ([echo(0, 20), ending(1, 9_000_000_000, 0), echo(2, 15)], 2),
        # Closed its connections, and was seen to end a moment after the echoes.
        ([echo(0, 20), ending(1, 90, 0), echo(2, 15)], 1),
        ([echo(0, 20), ending(1, 30, None)], 0),
    ],
)
def test_first_failure_when_ranks_end_then_is_the_cause_and_not_an_echo(
    endings: list[Ending], cause: int | None
) -> None:
    found = first_failure(endings)
    assert (None if found is None else found.rank) == cause


def test_report_when_a_rank_raised_then_ends_with_its_traceback_and_place() -> None:
    wrote = record(1, 10, text="cause-7f3\nsecond line")
    text = report([echo(0, 11), ending(1, 30, 1, wrote=wrote), ending(2, 99, None)], program="train.py")
    assert text.splitlines() == [
        "rank 0 lost a peer: RuntimeError: Connection closed by peer [127.0.0.1]:7043 (/x/train.py:8)",
        "rank 2 stopped by the launcher",
        "rank 1 of `train.py`:",
        "Traceback (most recent call last):",
        "  File ...",
        "ValueError: cause-7f3",
        "second line",
        "error: rank 1 failed: ValueError: cause-7f3 (/x/train.py:8)",
    ]


@pytest.mark.parametrize(
    ("cause", "last"),
    [
        (
            ending(0, 1, -signal.SIGKILL),
            [
                "error: rank 0 was killed by signal 9 (SIGKILL)",
                "  hint: maybe out of memory: the kernel kills a process so, and its log (`dmesg`) says so",
            ],
        ),
        (ending(0, 1, -signal.SIGBUS, crash="Bus error\n"), ["error: rank 0 was killed by signal 7 (SIGBUS)"]),
        (ending(0, 1, 3), ["error: rank 0 ended with exit code 3"]),
        (
            ending(0, 1, 5, wrote=record(0, 1, kind="SystemExit", text="5")),
            ["error: rank 0 ended by sys.exit(5) (/x/train.py:8)"],
        ),
    ],
)
def test_report_when_there_is_no_traceback_then_says_how_the_rank_ended(cause: Ending, last: list[str]) -> None:
    assert report([cause], program="train.py").splitlines()[-len(last) :] == last


def test_report_when_all_ranks_ended_well_then_is_empty() -> None:
    assert report([ending(0, 1, 0)], program="train.py") == ""


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - any exception is what is asked for
        return caught


class Silent(Exception):
    """Cannot be printed."""

    def __str__(self) -> str:
        raise KeyError("broken")


def test_record_when_an_exception_is_caught_then_holds_its_place_and_text() -> None:
    error = _raised(ValueError("cause-7f3"))
    found = record_of(error, rank=3)
    assert error.__traceback__ is not None
    assert (found.rank, found.type, found.text) == (3, "ValueError", "cause-7f3")
    assert found.place == f"{__file__}:{error.__traceback__.tb_lineno}"
    assert found.traceback.endswith("ValueError: cause-7f3\n")
    assert not found.lost_peer


def test_record_when_the_exception_cannot_be_printed_then_is_still_made() -> None:
    assert record_of(_raised(Silent()), rank=0).text == "<str() of it raised KeyError>"


def _chained(cause: BaseException) -> BaseException:
    try:
        try:
            raise cause
        except RuntimeError as inner:
            raise KeyError("step") from inner
    except KeyError as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "is_echo"),
    [
        (RuntimeError(GLOO), True),
        (_chained(RuntimeError(GLOO)), True),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), True),
        (RuntimeError("Connection reset by peer while loading https://example.org"), False),
        (ConnectionResetError("Connection reset by peer"), False),
        (ValueError(GLOO), False),
        (RuntimeError("gloo: mismatched sizes"), False),
    ],
)
def test_record_when_a_peer_is_gone_then_says_so(error: BaseException, is_echo: bool) -> None:
    assert record_of(_raised(error), rank=0).lost_peer is is_echo


def test_stack_when_the_interpreter_crashed_then_has_no_frame_of_the_launcher() -> None:
    from drivetrain.launch import script

    crash = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x7f (most recent call first):\n"
        '  File "/x/train.py", line 8 in fail\n  File "/x/train.py", line 19 in <module>\n'
        f'  File "{script.__file__}", line 97 in run_as_main\n  File "/usr/bin/drivetrain", line 6 in <module>\n\n'
        "Extension modules: numpy (total: 1)\n"
    )
    assert script_stack(crash) == (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x7f (most recent call first):\n"
        '  File "/x/train.py", line 8 in fail\n  File "/x/train.py", line 19 in <module>'
    )
