"""Which parts of a model are gathered and freed one at a time: its units, as a rule the repeated blocks."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from drivetrain.errors import PrepareError
from drivetrain.strategies.common import class_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The units of a model.

    Args:
        modules: inner ones first.
        reason: how they were chosen, in words.
    """

    modules: tuple[nn.Module, ...]
    reason: str

    def __str__(self) -> str:
        counts = Counter(class_name(module) for module in self.modules)
        found = ", ".join(f"{count} x {name}" for name, count in counts.items())
        return f"{found} ({self.reason})" if found else f"none ({self.reason})"


def find_units(model: nn.Module, names: Sequence[str]) -> Units:
    """Return the units of a model: blocks of the classes named, else of those it declares, else its repeated blocks.

    A model declares classes by an attribute `_no_split_modules`, as those of Transformers do. A model without any
    repeated block is one unit.

    Args:
        names: of classes, without their modules.

    Raises:
        PrepareError: no block is of a class that was asked for.
    """
    if names:
        return Units(modules=_of_classes(model, names), reason="named in the settings")
    declared = _declared(model)
    if declared and (modules := _blocks(model, declared)):
        return Units(modules=modules, reason="declared by the model")
    repeated = set(repeated_blocks(model))
    if repeated:
        return Units(modules=_blocks(model, repeated), reason="repeated blocks")
    return Units(modules=(), reason="no block is repeated")


def repeated_blocks(model: nn.Module) -> dict[str, int]:
    """Return the classes of blocks that stand several times in one list of the model, with their sizes in parameters.

    Lists within a block that is repeated itself are not looked into.
    """
    found: dict[str, int] = {}
    open_modules = [model]
    while open_modules:
        module = open_modules.pop()
        children = list(module.children())
        kinds = Counter(type(child) for child in children if any(True for _ in child.children()))
        is_list = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        repeated = {kind for kind, count in kinds.items() if is_list and count > 1}
        for child in children:
            size = sum(parameter.numel() for parameter in child.parameters())
            if type(child) in repeated and size:
                found[type(child).__name__] = size
            else:
                open_modules.append(child)
    return found


def _of_classes(model: nn.Module, names: Sequence[str]) -> tuple[nn.Module, ...]:
    known = {type(module).__name__ for module in model.modules()}
    if missing := [name for name in names if name not in known]:
        raise PrepareError(
            f"{type(model).__name__} has no module of class {', '.join(missing)} to shard by{_listed(model)}",
            hint=_advice(model, missing[0], known),
        )
    return _blocks(model, names)


def _blocks(model: nn.Module, names: Iterable[str]) -> tuple[nn.Module, ...]:
    """Return the modules of these classes that hold parameters, inner ones first; never the model itself."""
    wanted = set(names)
    return tuple(
        module
        for module in reversed(list(model.modules()))
        if module is not model and type(module).__name__ in wanted and any(True for _ in module.parameters())
    )


def _declared(model: nn.Module) -> set[str]:
    """Return the classes that the model, or a model within it, says are not to be split."""
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return names


def _listed(model: nn.Module) -> str:
    counts = Counter(type(module).__name__ for module in model.modules())
    lines = [f"\n  {counts[name]} x {name}, {size:,} parameters each" for name, size in repeated_blocks(model).items()]
    return f"; repeated in it:{''.join(lines)}" if lines else "; nothing is repeated in it"


def _advice(model: nn.Module, missing: str, known: set[str]) -> str:
    near = difflib.get_close_matches(missing, sorted(known), n=1) or list(repeated_blocks(model))[:1]
    if near:
        return f"did you mean {near[0]}? Or leave the class out, and the repeated blocks are taken"
    return "leave the class out"
