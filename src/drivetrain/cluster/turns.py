"""Ranks that take turns: some go first, and the others wait for them, or for the news that they failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from drivetrain.cluster.control import Call, Control
from drivetrain.errors import TopologyError

_NEWS_SECONDS = 5.0  # how long a rank that is being ended waits for the others, to tell them


@contextlib.contextmanager
def turn(control: Control, *, goes_first: bool, name: str) -> Iterator[None]:
    """Let the ranks that go first do what is in this context before the others, and wait for all at its end.

    Collective. The others wait as long as for any call, so the time-out of the process group bounds what goes first.

    Args:
        name: of the call, for the message.

    Raises:
        TopologyError: another rank failed in the context.
    """
    if control.world_size == 1:
        yield
        return
    if not goes_first:
        _meet(control, name=name)
    try:
        yield
    except (TopologyError, GeneratorExit):
        raise  # the other ranks are gone or raise the same; or this context was dropped, not left
    except BaseException as error:
        _tell(control, error)
        raise
    if goes_first:
        _meet(control, name=name)
    _meet(control, name=name)


def _meet(control: Control, *, name: str) -> None:
    if any(row[0] for row in control.agree(Call.TURN, (0.0,))):
        news = [f"rank {rank}: {text}" for rank, text in enumerate(control.exchange(None)) if text]
        raise TopologyError(
            f"another rank failed in {name}()\n  " + "\n  ".join(news),
            hint="look at its own traceback; this rank only waited for it",
        )


def _tell(control: Control, error: BaseException) -> None:
    seconds = None if isinstance(error, Exception) else _NEWS_SECONDS
    with contextlib.suppress(TopologyError, RuntimeError):  # nobody left to tell: this error is the one to raise
        control.start(Call.TURN, (1.0,)).wait(seconds=seconds)
        control.exchange(f"{type(error).__name__}: {error}")
