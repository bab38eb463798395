"""How many scopes make an update on several ranks, which nothing but arithmetic decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from drivetrain.accelerator.window_size import WindowSize
from drivetrain.config import layer_from_code, resolve
from drivetrain.errors import ConfigError


@dataclass(frozen=True)
class Pass:
    """All that the arithmetic asks of a pass over a loader."""

    batch_size: int


def window_size(num_ranks: int, **settings: int) -> Any:
    return WindowSize(resolve([layer_from_code(settings)]), num_ranks=num_ranks, announce=None)


@pytest.mark.parametrize(("batch_size", "num_ranks"), [(1, 1), (2, 4), (6, 8), (48, 1)])
def test_steps_when_there_is_a_global_batch_then_all_ranks_share_it(batch_size: int, num_ranks: int) -> None:
    steps = window_size(num_ranks, global_batch_size=48)(Pass(batch_size))
    assert steps * batch_size * num_ranks == 48


def test_global_batch_when_ranks_do_not_divide_it_then_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match="is no multiple of 8 = 2 per micro-batch x 4 ranks"):
        window_size(4, global_batch_size=12)(Pass(2))


def test_steps_when_asked_for_then_ranks_and_batch_do_not_matter() -> None:
    assert window_size(4, gradient_accumulation_steps=3)(Pass(2)) == 3
