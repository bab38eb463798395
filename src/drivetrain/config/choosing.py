"""Which strategy is wanted: by `distributed_type`, by a chooser as `use_fsdp`, or by a section that says something.

A chooser is short for a `distributed_type`, with the strength of the place that says so; false takes back what weaker
places say. A section chooses its strategy only where nobody says anything about it otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from drivetrain.config.coerce import Unfit, coerce
from drivetrain.config.keys import Key, choosers
from drivetrain.config.sources import PRECEDENCE, Source, Value, show
from drivetrain.errors import Problem
from drivetrain.registry import strategy_specs

_PATH = "distributed_type"


@dataclass(slots=True, kw_only=True)
class Choice:
    """What was said about the strategy.

    Args:
        candidates: for `distributed_type`, the strongest first.
        declined: choosers that say false, with the place that says so.
        problems: values that are neither true nor false, and places that contradict themselves.
    """

    candidates: list[Value]
    declined: dict[str, Source] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def choose(merged: Mapping[str, list[Value]]) -> Choice:
    """Return what all places say together.

    Args:
        merged: the values of each path, the strongest first.
    """
    choice = Choice(candidates=list(merged.get(_PATH, ())))
    for name, key in choosers().items():
        if name in merged:
            _hear(choice, key, merged[name][0])
    if not choice.candidates:
        choice.candidates += _by_section(merged, declined=choice.declined)
    return choice


def _hear(choice: Choice, key: Key, said: Value) -> None:
    """Add what a chooser says to what was said before."""
    try:
        is_wanted = coerce(key, said)
    except Unfit as unfit:
        choice.problems.append(said.problem(unfit.message, hint=unfit.hint))
        return
    for other in choice.candidates:
        if other.source.kind == said.source.kind and (other.raw == key.stands_for) is not is_wanted:
            message = f"`{other.written} = {show(other.raw)}` ({other.source}) says otherwise"
            choice.problems.append(said.problem(message, hint="keep one of them"))
    if is_wanted:
        choice.candidates.append(Value(raw=key.stands_for, source=said.source, written=_PATH))
        choice.candidates.sort(key=_strength, reverse=True)
    else:
        choice.declined[key.path] = said.source
        choice.candidates = [
            other for other in choice.candidates if other.raw != key.stands_for or _strength(other) > _strength(said)
        ]


def _by_section(merged: Mapping[str, list[Value]], *, declined: Mapping[str, Source]) -> Iterator[Value]:
    """Yield the choice that a section makes, where its strategy has a chooser and that does not say false."""
    for spec in strategy_specs():
        if spec.flag is None or spec.flag in declined:
            continue
        if said := [values[0] for path, values in merged.items() if path.startswith(f"{spec.section}.")]:
            strongest = max(said, key=_strength)
            yield Value(raw=spec.distributed_types[0], source=strongest.source, written=_PATH)
            return


def _strength(value: Value) -> int:
    return PRECEDENCE.index(value.source.kind)
