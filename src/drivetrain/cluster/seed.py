"""Random number generators: seeding all of them alike, and deriving one seed from another."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

_SEED_BYTES = 8


def set_seed(seed: int) -> None:
    """Seed python, numpy, and torch on every device of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def derive(seed: int, *parts: int) -> int:
    """Return a seed that is a pure function of `seed` and `parts`, in [0, 2**63): the same on every machine."""
    text = ",".join(map(str, (seed, *parts)))
    digest = hashlib.blake2b(text.encode(), digest_size=_SEED_BYTES).digest()
    return int.from_bytes(digest) >> 1
