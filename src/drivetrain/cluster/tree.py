"""Nested containers of tensors: batches, model outputs, metrics."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sized
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
        return with_items(value, {key: map_tensors(item, function) for key, item in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {name: map_tensors(getattr(value, name), function) for name in _initialised(value)}
        return dataclasses.replace(value, **changes)
    return value


def with_items(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the kind of `value`, and with its other attributes, that has these items."""
    if not isinstance(value, MutableMapping):
        kind: Any = type(value)
        return kind(items)
    rebuilt = copy.copy(value)
    for key, item in items.items():
        rebuilt[key] = item
    return rebuilt


def named_leaves(value: Any, *, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is no container in `value`, with the way to it, in the order in which `map_tensors` comes to it."""
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from named_leaves(item, path=f"{path}[{index}]")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_leaves(item, path=f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name in _initialised(value):
            yield from named_leaves(getattr(value, name), path=f"{path}.{name}")
    else:
        yield path, value


def leaves_in(value: Any) -> Iterator[Any]:
    """Yield what is no container in `value`, in the order in which `map_tensors` comes to it."""
    return (leaf for _, leaf in named_leaves(value))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`, going into the same containers as `map_tensors`."""
    return (leaf for leaf in leaves_in(value) if isinstance(leaf, Tensor))


def described(value: Any, describe: Callable[[Any], str]) -> str:
    """Return `value` as text: containers by kind and key, and each other thing as `describe` has it."""
    name = type(value).__name__
    if isinstance(value, list | tuple):
        items = [described(item, describe) for item in value]
        if fields := getattr(value, "_fields", None):
            return f"{name}({', '.join(f'{field}={item}' for field, item in zip(fields, items, strict=True))})"
        if isinstance(value, list):
            return f"[{', '.join(items)}]"
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    if isinstance(value, Mapping):
        items = [f"{key!r}: {described(item, describe)}" for key, item in value.items()]
        return f"{'' if name == 'dict' else name}{{{', '.join(items)}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [f"{field}={described(getattr(value, field), describe)}" for field in _initialised(value)]
        return f"{name}({', '.join(items)})"
    return describe(value)


def _initialised(value: Any) -> list[str]:
    """Return the fields of a dataclass that its constructor takes; the others follow from them."""
    return [field.name for field in dataclasses.fields(value) if field.init]


def num_rows(value: Any) -> int:
    """Return the size of dim 0 of the largest tensor in `value`, or its length without any; 1 for what has neither."""
    sizes = [tensor.shape[0] if tensor.dim() else 1 for tensor in tensors_in(value)]
    if sizes:
        return max(sizes)
    return len(value) if isinstance(value, Sized) else 1
