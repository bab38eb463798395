"""Random number generators: seeding all of them alike, and deriving one seed from another."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_SEED_BYTES = 8


def set_seed(seed: int) -> None:
    """Seed python, numpy, and torch on every device of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def seeded(seed: int, *generators: torch.Generator) -> Iterator[None]:
    """Seed python, numpy, torch on the CPU, and `generators`; afterwards all go on as if nothing had been drawn."""
    own = (torch.default_generator, *generators)
    before = random.getstate(), np.random.get_state(), [generator.get_state() for generator in own]
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        for generator in own:
            generator.manual_seed(seed)
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        for generator, state in zip(own, before[2], strict=True):
            generator.set_state(state)


def derive(seed: int, *parts: int) -> int:
    """Return a seed that is a pure function of `seed` and `parts`, in [0, 2**63): the same on every machine."""
    text = ",".join(map(str, (seed, *parts)))
    digest = hashlib.blake2b(text.encode(), digest_size=_SEED_BYTES).digest()
    return int.from_bytes(digest) >> 1
