"""Seeding all generators, deriving seeds, and drawing on the side."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.cluster.seed import derive, seeded, set_seed


def draws() -> tuple[float, float, float]:
    """Return a number of each generator of the process."""
    return random.random(), float(np.random.random()), torch.rand(()).item()


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**63 - 1])
def test_set_seed_makes_all_generators_repeat_themselves(seed: int) -> None:
    set_seed(seed)
    first = draws()
    assert draws() != first
    set_seed(seed)
    assert draws() == first


def test_set_seed_when_seeds_differ_makes_every_generator_differ() -> None:
    set_seed(1)
    first = draws()
    set_seed(2)
    assert all(one != other for one, other in zip(first, draws(), strict=True))


def test_seeded_inside_repeats_itself_and_outside_changes_nothing() -> None:
    own = torch.Generator().manual_seed(5)
    set_seed(3)
    expected = draws(), torch.rand((), generator=torch.Generator().manual_seed(5)).item()
    set_seed(3)
    inside = []
    for _ in range(2):
        with seeded(11, own):
            inside.append((draws(), torch.rand((), generator=own).item()))
    assert inside[0] == inside[1]
    assert (draws(), torch.rand((), generator=own).item()) == expected


def test_seeded_when_the_block_fails_still_changes_nothing() -> None:
    set_seed(3)
    expected = draws()
    set_seed(3)
    with pytest.raises(ValueError, match="inside"), seeded(11):
        raise ValueError(f"inside, after {draws()}")
    assert draws() == expected


@given(seed=st.integers(0, 2**63 - 1), parts=st.lists(st.integers(-(2**70), 2**70), max_size=4))
def test_derive_gives_what_every_generator_takes(seed: int, parts: list[int]) -> None:
    derived = derive(seed, *parts)
    assert 0 <= derived < 2**63
    torch.Generator().manual_seed(derived)


def test_derive_when_any_part_differs_gives_another_seed() -> None:
    arguments = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 12), (0, 1, 2), (1, 2), (12,), (-1,), (0, -1)]
    assert len({derive(*each) for each in arguments}) == len(arguments)


def test_derive_in_another_process_gives_the_same_seed() -> None:
    # Text hashes of Python differ from process to process, this one must not.
    command = "from drivetrain.cluster.seed import derive; print(derive(3, 1, 4))"
    text = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True, timeout=50
    ).stdout
    assert int(text) == derive(3, 1, 4)
