"""What ranks bring to a collective call, compared before anything travels.

An *offer* has a signature, which must be the same on every rank, and sizes, which may differ and are shown to all. A
rank that cannot take part says why in its offer, so that every rank raises, and none waits for it.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drivetrain.cluster.control import NUM_VALUES, Call, Control
from drivetrain.cluster.tree import described, named_leaves
from drivetrain.errors import DataError, RankMismatchError

_FREE_VALUES = NUM_VALUES - 2

Sizes = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What this rank brings to a call.

    Args:
        signature: makes the text that must agree.
        rule: what must agree, in words, for the hint.
        sizes: numbers that may differ; as many of them as the signature says.
        problem: why this rank cannot take part.
    """

    call: Call
    signature: Callable[[], str]
    rule: str
    sizes: Sizes
    problem: DataError | None = None


def compare(offer: Offer, control: Control, *, checks: bool) -> list[Sizes]:
    """Return the sizes that each rank brings; collective.

    Args:
        checks: whether signatures are compared, and problems told to the other ranks.

    Raises:
        DataError: this rank or another one cannot take part; with `checks`, raised on every rank.
        RankMismatchError: signatures differ, or ranks are in different calls; raised on every rank.
    """
    if offer.problem is not None and (control.world_size == 1 or not checks):
        raise offer.problem
    if control.world_size == 1:
        return [offer.sizes]
    signature = offer.signature() if checks and offer.problem is None else ""
    head = (_digest(signature), offer.problem is not None)
    rows = control.agree(offer.call, (*head, *offer.sizes[:_FREE_VALUES]))
    if any(row[1] for row in rows):
        _refuse_problems(control.exchange(offer.problem and (offer.problem.message, offer.problem.hint)))
    if any(row[0] != rows[0][0] for row in rows):
        _refuse_difference(offer, control.exchange(signature))
    if len(offer.sizes) > _FREE_VALUES:
        return control.exchange(offer.sizes)
    return [[int(size) for size in row[2 : 2 + len(offer.sizes)]] for row in rows]


def signature_of(value: Any, sizes_of: Callable[[Tensor], Sequence[object]]) -> str:
    """Return containers by kind and key, tensors by dtype and sizes, and other values by kind.

    Args:
        sizes_of: what to show as the sizes of a tensor.
    """

    def describe(leaf: object) -> str:
        if not isinstance(leaf, Tensor):
            return "None" if leaf is None else type(leaf).__name__
        return f"{str(leaf.dtype).removeprefix('torch.')}[{', '.join(map(str, sizes_of(leaf)))}]"

    return described(value, describe)


def problem_in(value: Any, call: Call) -> DataError | None:
    """Return why ranks cannot exchange what is in `value`; None if they can.

    Numbers and other objects are refused: passed on as they are, they would look like a result.
    """
    name = call.name.lower()
    for path, leaf in named_leaves(value):
        place = f" at {path}" if path else ""
        if isinstance(leaf, Tensor):
            if hasattr(leaf, "device_mesh"):
                return DataError(
                    f"{name}() takes each rank's own tensors, and found a DTensor{place}, which is spread over ranks",
                    hint="use its `full_tensor()`, which every rank must call",
                )
            if leaf.layout is not torch.strided or leaf.device.type == "meta":
                kind = "meta" if leaf.device.type == "meta" else str(leaf.layout).removeprefix("torch.")
                return DataError(
                    f"{name}() takes dense tensors with values, and found one of kind {kind}{place}",
                    hint="use `to_dense()` for a sparse tensor",
                )
        elif leaf is not None:
            return DataError(
                f"{name}() takes tensors in nested containers, and found a {type(leaf).__name__}{place}",
                hint="make a tensor of a number; gather other objects apart, as a list, with gather_object()",
            )
    return None


def unpicklable(values: Any, call: Call) -> DataError | None:
    """Return why objects cannot travel; None if they can."""
    try:
        pickle.dumps(values)
    except Exception as error:  # noqa: BLE001 - an object's own code decides what it raises
        return DataError(
            f"{call.name.lower()}() was given an object that cannot be sent to other ranks: "
            f"{type(error).__name__}: {error}",
            hint="give plain data: numbers, texts, lists and dicts of them",
        )
    return None


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())


def _refuse_problems(problems: list[tuple[str, str | None] | None]) -> None:
    hint = next(problem[1] for problem in problems if problem)
    messages = [problem[0] if problem else "nothing is wrong" for problem in problems]
    if len(set(messages)) == 1:
        raise DataError(messages[0], hint=hint)
    lines = [f"\n  rank {rank}: {message}" for rank, message in enumerate(messages)]
    raise DataError(f"not every rank can take part:{''.join(lines)}", hint=hint)


def _refuse_difference(offer: Offer, signatures: list[str]) -> None:
    lines = [f"\n  rank {rank}: {signature}" for rank, signature in enumerate(signatures)]
    raise RankMismatchError(
        f"ranks gave unlike values to {offer.call.name.lower()}():{''.join(lines)}", hint=offer.rule
    )
