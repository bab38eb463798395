"""Counts reads of tensors by the host: on an accelerator each of them waits for the device."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.optim
from torch import Tensor

import drivetrain

READS = ("item", "tolist", "numpy", "cpu", "__float__", "__bool__", "__int__", "__index__")

LIBRARY = str(Path(drivetrain.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)
# What ranks tell each other lies on the host whatever the device is: looking at it waits for nothing.
_ON_HOST = str(Path(LIBRARY) / "cluster" / "control.py")


@contextmanager
def counted_reads() -> Iterator[Counter[str]]:
    """Count the reads that the library makes in this block, by method and place.

    A read deep in torch is its caller's. One that an optimizer or a schedule of torch makes for itself is nobody's:
    a loop by hand has it too.
    """
    reads: Counter[str] = Counter()

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def read(*args: Any, **kwargs: Any) -> Any:
            if (place := _place_of_ours(sys._getframe(1))) is not None:
                reads[f"{name} at {place}"] += 1
            return method(*args, **kwargs)

        return read

    replaced: dict[str, Any] = {name: counting(name, getattr(Tensor, name)) for name in READS}
    with mock.patch.multiple(Tensor, **replaced):
        yield reads


def _place_of_ours(frame: FrameType | None) -> str | None:
    """Return file and line of the code of ours that a read is made for; None for other code."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_code.co_filename.startswith(_OPTIMIZERS):
            return None
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(LIBRARY) or frame.f_code.co_filename == _ON_HOST:
        return None
    return f"{Path(frame.f_code.co_filename).relative_to(LIBRARY)}:{frame.f_lineno}"
