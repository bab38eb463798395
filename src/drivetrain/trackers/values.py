"""Turns what a script logs into plain values; the only place of logging that reads a device."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor

from drivetrain.errors import TrackerError

Scalar = bool | int | float | str | None


def plain_values(values: Mapping[str, object]) -> dict[str, Scalar]:
    """Return values as plain numbers and texts, in their order.

    Synchronises the host with each device that a tensor lies on, once: all of its tensors come in one transfer.

    Args:
        values: numbers, texts, None, and tensors and arrays with one element.

    Raises:
        TrackerError: a value is none of these, or a key is no text.
    """
    if not isinstance(values, Mapping):
        raise TrackerError(
            f"log() takes values by name, and got a {type(values).__name__}", hint="pass a dict such as {'loss': loss}"
        )
    plain: dict[str, Scalar] = {}
    tensors: dict[str, Tensor] = {}
    for key, value in values.items():
        if not isinstance(key, str):
            raise TrackerError(f"log() takes values by name, and got the key {key!r}, a {type(key).__name__}")
        if isinstance(value, Tensor):
            tensors[key] = _checked(key, value)
            plain[key] = None  # keeps the place
        else:
            plain[key] = _plain(key, value)
    plain.update(_read(tensors))
    return plain


def plain_configuration(values: object) -> object:
    """Return a configuration as nested dicts and lists of plain values; of what is neither, its text."""
    if isinstance(values, Mapping):
        return {str(key): plain_configuration(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [plain_configuration(value) for value in values]
    if values is None or isinstance(values, bool | int | float | str):
        return values
    return str(values)


def flat_configuration(values: Mapping[str, object], *, prefix: str = "") -> dict[str, bool | int | float | str]:
    """Return a plain configuration under dotted keys; lists and None as texts."""
    flat: dict[str, bool | int | float | str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flat_configuration(value, prefix=f"{prefix}{key}."))
        else:
            flat[prefix + key] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


def numbers_in(values: Mapping[str, Scalar]) -> dict[str, float]:
    """Return those values that are numbers or truth values."""
    return {key: value for key, value in values.items() if isinstance(value, int | float)}


def texts_in(values: Mapping[str, Scalar]) -> dict[str, str]:
    """Return those values that are texts."""
    return {key: value for key, value in values.items() if isinstance(value, str)}


def _plain(key: str, value: object) -> Scalar:
    if isinstance(value, np.generic | np.ndarray) and value.size == 1:
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise _refusal(key, f"a {type(value).__name__}", hint=_hint_for(key, value))


def _hint_for(key: str, value: object) -> str:
    if isinstance(value, Mapping):
        return f"give each value a name of its own, such as '{key}/{next(iter(value), 'loss')}'"
    return "log numbers and texts; for other things use the tracker itself: accelerator.get_tracker(name, unwrap=True)"


def _checked(key: str, value: Tensor) -> Tensor:
    spread = sys.modules.get("torch.distributed.tensor")  # slow to import, and without it there is no such tensor
    if spread is not None and isinstance(value, spread.DTensor):
        raise _refusal(key, "a DTensor", hint="call `full_tensor()` on all ranks first")
    if value.is_meta:
        raise _refusal(key, "a tensor on the meta device, which has no value")
    if value.numel() != 1:
        raise _refusal(key, f"a tensor of shape {list(value.shape)}", hint="log its mean, or each element")
    if value.is_complex() or value.is_quantized or value.layout is not torch.strided:
        raise _refusal(key, f"a tensor of {value.dtype} and {value.layout}", hint="log its real and imaginary parts")
    return value.detach().resolve_neg()


def _refusal(key: str, what: str, *, hint: str | None = None) -> TrackerError:
    return TrackerError(f"the value {key!r} cannot be logged: it is {what}", hint=hint)


def _read(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Scalar]]:
    """Yield the tensors' numbers by name."""
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for key, tensor in tensors.items():
        by_device.setdefault(tensor.device, []).append((key, tensor))
    for named in by_device.values():
        # The largest first, so that each type begins at a multiple of its size.
        yield from _read_together(sorted(named, key=lambda item: (-item[1].itemsize, str(item[1].dtype))))


def _read_together(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Scalar]]:
    """Yield the numbers of tensors on one device, sorted by type, with a single transfer: as bytes, one after another.

    A conversion to a common type would not be exact.
    """
    named = list(named)
    bytes_of_all = [tensor.as_strided((1,), (1,)).view(torch.uint8) for _, tensor in named]
    packed = torch.cat(bytes_of_all).cpu()
    start = 0
    for dtype, group in groupby(named, key=lambda item: item[1].dtype):
        keys = [key for key, _ in group]
        end = start + len(keys) * dtype.itemsize
        yield from zip(keys, packed[start:end].view(dtype).tolist(), strict=True)
        start = end
