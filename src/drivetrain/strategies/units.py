"""Which parts of a model are gathered and freed one at a time: its units, as a rule the repeated blocks.

A block is a module with parameters and a forward that is more than a single layer of torch. Blocks are repeated where
a list (`Sequential`, `ModuleList` or `ModuleDict`) holds several of one class; a module without a forward counts as
what it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from drivetrain.config import nearest
from drivetrain.errors import PrepareError
from drivetrain.strategies.common import class_name

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


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
    repeated block is one unit. Unless it was named, a block that shares a weight with the rest of the model is left
    to the rest, as Bert's embeddings are with a head that is tied to them: a unit would hold a copy of its own.

    Args:
        names: of classes, without their modules.

    Raises:
        PrepareError: no block is of a class that was asked for.
    """
    if names:
        return Units(modules=_of_named_classes(model, names), reason="named in the settings")
    if declared := _of_classes(model, _declared(model)):
        return _apart(model, declared, reason="declared by the model")
    if repeated := _repeated(model):
        return _apart(model, repeated, reason="repeated blocks")
    return Units(modules=(), reason="no block is repeated: the whole model is gathered at once")


def repeated_blocks(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the classes of blocks that stand several times in one list of the model: how many, and parameters of one.

    Lists within a block that is repeated itself are not looked into.
    """
    blocks = _repeated(model)
    counts = Counter(type(block).__name__ for block in blocks)
    return {type(block).__name__: (counts[type(block).__name__], _size(block)) for block in reversed(blocks)}


def _repeated(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the repeated blocks, and single ones of their classes; the last one first, none within another."""
    repeated = {block for holder in model.modules() if isinstance(holder, _LISTS) for block in _alike(holder)}
    kinds = {type(block) for block in _outermost(model, repeated.__contains__)} - {nn.Sequential}
    return _outermost(model, lambda module: module in repeated or (type(module) in kinds and _can_be_unit(module)))


def _outermost(model: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> tuple[nn.Module, ...]:
    """Return the modules in a model that are wanted, the last one first, without those within another."""
    found: list[nn.Module] = []
    seen: set[nn.Module] = set()
    open_modules = [model]
    while open_modules:
        module = open_modules.pop()
        if module in seen:
            continue
        seen.add(module)
        if module is not model and is_wanted(module):
            found.append(module)
        else:
            open_modules.extend(reversed(list(module.children())))
    return tuple(reversed(found))


def _alike(holder: nn.Module) -> Iterator[nn.Module]:
    """Return each block in a list that is not the only one of its class."""
    blocks = dict.fromkeys(member for member in _members(holder) if _is_block(member))
    counts = Counter(type(block) for block in blocks)
    return (block for block in blocks if counts[type(block)] > 1)


def _members(holder: nn.Module) -> Iterator[nn.Module]:
    """Yield what lies in a list, and in modules within it that only hold others."""
    for child in holder.children():
        if _has_forward(child):
            yield child
        else:
            yield from _members(child)


def _is_block(module: nn.Module) -> bool:
    """Return whether it can be a unit, and is not a single layer of torch."""
    is_layer = type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None
    return _can_be_unit(module) and not is_layer


def _can_be_unit(module: nn.Module) -> bool:
    return _has_forward(module) and next(module.parameters(), None) is not None


def _has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _of_named_classes(model: nn.Module, names: Sequence[str]) -> tuple[nn.Module, ...]:
    modules = _of_classes(model, names)
    found = {type(module).__name__ for module in modules}
    if missing := [name for name in names if name not in found]:
        raise PrepareError(
            f"{class_name(model)} has no module of class {', '.join(missing)} to shard by{_listed(model)}",
            hint=_advice(model, missing[0]),
        )
    return modules


def _of_classes(model: nn.Module, names: Collection[str]) -> tuple[nn.Module, ...]:
    """Return what can be a unit and is of these classes, inner ones first; never the model itself."""
    return tuple(
        module
        for module in reversed(list(model.modules()))
        if module is not model and type(module).__name__ in names and _can_be_unit(module)
    )


def _declared(model: nn.Module) -> set[str]:
    """Return the classes that the model, or a model within it, says are not to be split."""
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return names


def _apart(model: nn.Module, modules: Iterable[nn.Module], *, reason: str) -> Units:
    """Return the units without those that share a weight with the rest of the model."""
    kept = list(modules)
    left: list[nn.Module] = []
    while sharing := _sharing(model, kept):
        left += [module for module in kept if module in sharing]
        kept = [module for module in kept if module not in sharing]
    names = ", ".join(dict.fromkeys(class_name(module) for module in left))
    return Units(modules=tuple(kept), reason=f"{reason}; not {names}, which shares weights" if left else reason)


def _sharing(model: nn.Module, modules: Sequence[nn.Module]) -> set[nn.Module]:
    """Return those of the modules, inner ones first, that hold a parameter which the rest of the model holds, too."""
    homes: dict[nn.Module, nn.Module] = {}
    for unit in modules:
        for part in unit.modules():
            homes.setdefault(part, unit)
    owners: dict[int, nn.Module] = {}
    sharing: set[nn.Module] = set()
    for part in model.modules():
        home = homes.get(part, model)
        for parameter in part.parameters(recurse=False):
            owner = owners.setdefault(id(parameter), home)
            if owner is not home and model in (owner, home):
                sharing |= {owner, home}
    return sharing - {model}


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _listed(model: nn.Module) -> str:
    lines = [
        f"\n  {count} x {name}, {size:,} parameters each" for name, (count, size) in repeated_blocks(model).items()
    ]
    return f"; repeated in it:{''.join(lines)}" if lines else "; nothing is repeated in it"


def _advice(model: nn.Module, missing: str) -> str:
    known = {type(module).__name__ for module in model.modules() if module is not model and _can_be_unit(module)}
    repeated = repeated_blocks(model)
    otherwise = "leave the class out, and " + ("the repeated blocks are taken" if repeated else "the model is one unit")
    if near := nearest(missing, [*repeated, *sorted(known)]):
        return f"did you mean {near}? Or {otherwise}"
    return f"name one of these, or {otherwise}" if repeated else otherwise
