"""Merges layers, validates once, and reports every problem at once with its source.

Values are merged raw, with their provenance; the strongest source wins whatever the order of the layers. Then each
winner gets its type, the whole is validated, and rules look for contradictions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from drivetrain.config import rules
from drivetrain.config.choosing import choose
from drivetrain.config.coerce import Unfit, coerce
from drivetrain.config.keys import choosers, keys
from drivetrain.config.schema import CoreConfig, run_config
from drivetrain.config.section import Topology
from drivetrain.config.sources import DEFAULT, PRECEDENCE, Layer, Source, Value, show
from drivetrain.errors import ConfigError, Problem

_QUOTED = re.compile(r"`([a-z0-9_.]+)`")

_BOUNDS = {
    "greater_than": ("gt", "must be more than {:g}"),
    "greater_than_equal": ("ge", "must be at least {:g}"),
    "less_than": ("lt", "must be less than {:.15g}"),
    "less_than_equal": ("le", "must be at most {:.15g}"),
    "finite_number": ("", "must be finite"),
    "string_too_short": ("", "must not be empty"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Settings that are valid and agree with each other.

    Args:
        config: the values.
        sources: where each comes from, by dotted path.
        notes: what the user should be told once: translations, and flags or variables that lost to code.
        declined: what chooses a strategy and was said to be false, such as `use_fsdp`, with its source.
    """

    config: CoreConfig
    sources: Mapping[str, Source]
    notes: tuple[str, ...] = ()
    declined: Mapping[str, Source] = field(default_factory=dict)


def resolve(
    layers: Iterable[Mapping[str, Value]],
    *,
    world_size: int | None = None,
    world_source: str = "the environment of this process",
) -> Resolved:
    """Return the settings that all layers make together.

    Args:
        layers: in any order; code beats flags, flags beat variables, then files, then defaults. Among layers of one
            kind the later one wins.
        world_size: number of ranks when they run already.
        world_source: what says so.

    Raises:
        ConfigError: with the problems of all layers.
    """
    known = [layer if isinstance(layer, Layer) else Layer(by_path=layer) for layer in layers]
    merged = _merge(known)
    choice = choose(merged)
    said = {name: merged.pop(name) for name in choosers() if name in merged}
    merged["distributed_type"] = choice.candidates
    validation = _Validation({path: candidates[0] for path, candidates in merged.items() if candidates})
    problems = [*(problem for layer in known for problem in layer.problems), *choice.problems]
    problems += validation.run(rules.World(size=world_size, source=world_source))
    if problems or validation.config is None:
        raise ConfigError(problems)
    sources = {path: merged[path][0].source if merged.get(path) else DEFAULT for path in keys()}
    notes = [note for layer in known for note in layer.notes]
    notes += _overruled({**said, **merged})
    return Resolved(
        config=validation.config, sources=sources, notes=tuple(dict.fromkeys(notes)), declined=choice.declined
    )


def without_effect(resolved: Resolved, *, topology: Topology) -> Iterator[str]:
    """Yield a sentence for each setting in a file or a variable that changes nothing on this topology.

    Neutral values are passed over: what is written for everybody, whether it is used or not.

    Raises:
        ConfigError: flags change nothing; whoever types one expects something of it.
    """
    plain = flatten(resolved.config)
    typed: list[Problem] = []
    for path, source in resolved.sources.items():
        setting, value = keys()[path].setting, plain[path]
        reason = setting.idle(topology)
        if reason is None or source.kind == "default" or value in (keys()[path].default, *setting.neutral):
            continue
        message = f"has no effect: {reason}"
        if source.kind == "flag":
            typed.append(
                Problem(path=path, value=show(value), source=str(source), message=message, hint="leave it out")
            )
        else:
            yield f"`{path}: {show(value)}` ({source}) {message}"
    if typed:
        raise ConfigError(typed)


def flatten(config: CoreConfig) -> dict[str, object]:
    """Return every setting by its dotted path, as plain values in the order of the schema."""
    plain: dict[str, object] = {}
    for path, key in keys().items():
        holder = getattr(config, key.section) if key.section else config
        plain[path] = getattr(holder, key.name)
    return plain


def _merge(layers: Iterable[Layer]) -> dict[str, list[Value]]:
    """Return all values of each path, the strongest first."""
    merged: dict[str, list[Value]] = {}
    for layer in layers:
        for path, value in layer.items():
            if value.raw is not None and value.source.kind != "default":
                merged.setdefault(path, []).insert(0, value)
    for candidates in merged.values():
        candidates.sort(key=lambda value: PRECEDENCE.index(value.source.kind), reverse=True)
    return merged


def _overruled(merged: Mapping[str, list[Value]]) -> Iterator[str]:
    for path, candidates in merged.items():
        if not candidates or candidates[0].source.kind != "code":
            continue
        winner, *losers = candidates
        for loser in losers:
            if loser.source.kind in ("flag", "environment") and not _same(path, winner, loser):
                yield (
                    f"`{path}` is {show(winner.raw)} ({winner.source}); "
                    f"{show(loser.raw)} ({loser.source}) has no effect, as code comes first"
                )


def _same(path: str, one: Value, other: Value) -> bool:
    key = choosers().get(path) or keys()[path]
    try:
        return coerce(key, one) == coerce(key, other)
    except Unfit:
        return False


class _Validation:
    """One validation of merged values; faulty ones are set aside so that the rules can still see the others."""

    def __init__(self, winners: Mapping[str, Value]) -> None:
        self.config: CoreConfig | None = None
        self._winners = winners
        self._plain: dict[str, object] = {}
        self._faulty: set[str] = set()

    def run(self, world: rules.World) -> list[Problem]:
        """Return all problems; `config` is set if the values alone allow one."""
        problems = [*self._types(), *self._bounds()]
        if self.config is not None:
            problems += [
                self._with_sources(problem)
                for problem in rules.check(self.config, world=world)
                if not self._faulty.intersection((problem.path, *_QUOTED.findall(problem.message)))
            ]
        return problems

    def _types(self) -> Iterator[Problem]:
        for path, value in self._winners.items():
            try:
                self._plain[path] = coerce(keys()[path], value)
            except Unfit as unfit:
                self._faulty.add(path)
                yield self._with_sources(Problem(path=path, message=unfit.message, hint=unfit.hint))

    def _bounds(self) -> list[Problem]:
        try:
            self.config = run_config().model_validate(_nest(self._plain))
        except ValidationError as error:
            problems = [self._from_pydantic(dict(item)) for item in error.errors(include_url=False)]
            faulty = {path for path in self._plain if any(_within(path, problem.path) for problem in problems)}
            problems = [self._with_sources(problem) for problem in problems]
            self._faulty |= faulty
            self._plain = {path: value for path, value in self._plain.items() if path not in faulty}
            return problems + (self._bounds() if faulty else [])
        return []

    def _from_pydantic(self, item: Mapping[str, object]) -> Problem:
        loc, context = item["loc"], item.get("ctx")
        path = ".".join(part for part in loc if isinstance(part, str)) if isinstance(loc, tuple) else ""
        bound, wording = _BOUNDS.get(str(item["type"]), ("", str(item["msg"])))
        value = context.get(bound) if isinstance(context, dict) else None
        return Problem(path=path, message=wording.format(value) if bound else wording)

    def _with_sources(self, problem: Problem) -> Problem:
        winner = self._winners.get(problem.path)
        message = _QUOTED.sub(lambda match: self._named(match, problem.path), problem.message)
        if winner is None:
            default = keys()[problem.path].default if problem.path in keys() else None
            source = str(DEFAULT) if default is not None else None
            return replace(problem, message=message, value=show(default) if source else None, source=source)
        return replace(problem, path=winner.written, message=message, value=show(winner.raw), source=str(winner.source))

    def _named(self, match: re.Match[str], own: str) -> str:
        path = match[1]
        if path == own or path not in self._winners:
            return match[0]
        winner = self._winners[path]
        return f"`{winner.written} = {show(winner.raw)}` ({winner.source})"


def _within(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.") or outer.startswith(f"{path}.")


def _nest(plain: Mapping[str, object]) -> dict[str, object]:
    nested: dict[str, object] = {}
    for path, value in plain.items():
        key = keys()[path]
        if key.section:
            section = nested.setdefault(key.section, {})
            assert isinstance(section, dict)
            section[key.name] = value
        else:
            nested[path] = value
    return nested
