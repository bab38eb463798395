"""Nested containers of tensors: batches, model outputs, metrics."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

from torch import Tensor


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return `value` with `function` applied to each tensor in it; anything else passes as it is.

    Goes into mappings, lists, tuples, named tuples and dataclasses, and keeps their types.
    """
    if isinstance(value, Tensor):
        return function(value)
    kind = type(value)
    if kind is dict:
        return {key: map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = (map_tensors(item, function) for item in value)
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    if isinstance(value, Mapping):
        rebuilt: Any = copy.copy(value)
        for key, item in value.items():
            rebuilt[key] = map_tensors(item, function)
        return rebuilt
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {name: map_tensors(getattr(value, name), function) for name in _initialised(value)}
        return dataclasses.replace(value, **changes)
    return value


def leaves_in(value: Any) -> Iterator[Any]:
    """Yield what is no container in `value`, in the order in which `map_tensors` comes to it."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name in _initialised(value):
            yield from leaves_in(getattr(value, name))
    else:
        yield value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`, going into the same containers as `map_tensors`."""
    return (leaf for leaf in leaves_in(value) if isinstance(leaf, Tensor))


def _initialised(value: Any) -> list[str]:
    """Return the fields of a dataclass that its constructor takes; the others follow from them."""
    return [field.name for field in dataclasses.fields(value) if field.init]


def num_rows(value: Any) -> int:
    """Return the size of dim 0 of the largest tensor in `value`, or its length without any; 1 for what has neither."""
    sizes = [tensor.shape[0] if tensor.dim() else 1 for tensor in tensors_in(value)]
    if sizes:
        return max(sizes)
    return len(value) if isinstance(value, Sized) else 1
