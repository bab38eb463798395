"""Autocast around a model's forward, by hooks: the model stays the object that the user built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from drivetrain.cluster.tree import map_tensors

_HALF = (torch.float16, torch.bfloat16)


class AutocastHooks:
    """Enters autocast before a model's forward, leaves it afterwards, and returns half-precision outputs as float32.

    A loss that is computed outside the model is so computed in float32. Recursive forwards nest.
    """

    def __init__(self, module: nn.Module, *, device_type: str, dtype: torch.dtype) -> None:
        self._device_type = device_type
        self._dtype = dtype
        self._open: list[torch.autocast] = []
        self._handles = [
            module.register_forward_pre_hook(_Untraced(self._enter), prepend=True),
            module.register_forward_hook(_Untraced(self._leave), always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off the model, and leave the autocast of a forward that an interrupt has ended."""
        for handle in self._handles:
            handle.remove()
        while self._open:
            self._exit_innermost()

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        del module, inputs
        context = torch.autocast(self._device_type, dtype=self._dtype)
        context.__enter__()
        self._open.append(context)

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        del module, inputs
        if self._open:  # not so where another hook has raised before ours was called
            self._exit_innermost()
        return as_float32(output)

    def _exit_innermost(self) -> None:
        self._open.pop().__exit__(None, None, None)


class _Untraced:
    """A hook that torch.compile leaves alone, and that is copied and pickled with its model.

    Traced, a context that one function enters and another leaves would never be entered.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook
        self._call = torch.compiler.disable(hook)

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Untraced, (self._hook,)


def as_float32(output: Any) -> Any:
    """Return `output` with its half-precision tensors as float32, containers keeping their types."""
    return map_tensors(output, lambda tensor: tensor.float() if tensor.dtype in _HALF else tensor)
