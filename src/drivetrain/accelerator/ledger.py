"""Which parameters belong to which model, and which models are updated together."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor, nn

from drivetrain.accelerator.updates import Run, Updates
from drivetrain.errors import PrepareError, TrainingStepError
from drivetrain.protocols import Engine
from drivetrain.strategies.common import class_name

_NAMES_SHOWN = 4


class SteppedModels(Protocol):
    """A prepared optimizer, as far as the ledger knows it."""

    @property
    def engines(self) -> list[Engine]:
        """Of the models whose parameters it steps."""


class Ledger:
    """The prepared models of an accelerator, and the windows that they are in.

    A model that `accumulate` has named stands in one tuple of models for good. All others share the implicit one, in
    which everything between two steps is one scope.

    Attributes:
        version: changes when models change their tuple, or a model or an optimizer is added.
        scaler: the loss scaler of the first tuple of models; None where losses are not scaled.
        latest: the updates whose scope was opened, or whose backward ran, last.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.version = 0
        self.scaler = run.make_scaler()
        self._by_model: dict[int, Engine] = {}
        self._by_parameter: dict[int, Engine] = {}
        self._replaced: dict[int, weakref.ref[nn.Parameter]] = {}
        self._implicit = Updates((), run, scaler=self.scaler, is_implicit=True)
        self._updates: dict[Engine, Updates] = {}
        self._scopes: dict[tuple[int, ...], Scope] = {}
        self._tuples: list[Updates] = []
        self._open: list[Updates] = []
        self._optimizers: list[SteppedModels] = []
        self.latest: Updates = self._implicit

    @property
    def engines(self) -> list[Engine]:
        """All prepared models' engines, in the order of preparation."""
        return list(self._updates)

    def check_new(self, models: Sequence[nn.Module]) -> None:
        """Refuse models that share a parameter with each other or with one that is prepared.

        Raises:
            PrepareError: they do; two engines would both reduce and scale it.
        """
        seen = set(self._by_parameter)
        for model in models:
            own = {id(parameter): name for name, parameter in model.named_parameters()}
            shared = seen.intersection(own)
            shared.update(id(parameter) for parameter in model.parameters() if self._is_replaced(parameter))
            if shared:
                names = ", ".join(sorted(own[key] for key in shared)[:_NAMES_SHOWN])
                raise PrepareError(
                    f"{class_name(model)} shares parameters with another prepared model: {names}",
                    hint="put models that share parameters into one nn.Module, and prepare that",
                )
            seen.update(own)

    def add(self, engine: Engine) -> None:
        """Enter a prepared model."""
        self.version += 1
        self._by_model[id(engine.module)] = engine
        self._by_model[id(engine.prepared)] = engine
        for parameter in engine.module.parameters():
            self._by_parameter[id(parameter)] = engine
        engine.begin(sync=False)
        self._updates[engine] = self._implicit
        self._scopes.pop((), None)  # it was of all models, and of fewer
        self._implicit.engines.append(engine)

    def note_replaced(self, former: Iterable[nn.Parameter]) -> None:
        """Remember parameters that models had before they were prepared and do not have any more."""
        for parameter in former:
            if id(parameter) not in self._by_parameter:
                self._replaced[id(parameter)] = weakref.ref(parameter)

    def check_current(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuse parameters that models had before they were prepared and do not have any more.

        Raises:
            PrepareError: they are such; nothing that happens to them reaches the model.
        """
        if count := sum(map(self._is_replaced, parameters)):
            raise PrepareError(
                f"{count} of the parameters are those that a model had before prepare() put others in their place",
                hint="take model.parameters() again, after prepare()",
            )

    def _is_replaced(self, parameter: nn.Parameter) -> bool:
        reference = self._replaced.get(id(parameter))
        return reference is not None and reference() is parameter

    def add_optimizer(self, optimizer: SteppedModels) -> None:
        """Enter a prepared optimizer; its models may be prepared later."""
        self.version += 1
        self._optimizers.append(optimizer)

    def num_optimizers(self, updates: Updates) -> int:
        """Return how many optimizers step models of one tuple."""
        if len(self._optimizers) == 1:
            return 1
        return sum(not set(optimizer.engines).isdisjoint(updates.engines) for optimizer in self._optimizers)

    def find(self, model: object) -> Engine | None:
        """Return the engine of a model as given to `prepare`, as returned by it, or compiled since; None for others."""
        return self._by_model.get(id(model)) or self._by_model.get(id(getattr(model, "_orig_mod", None)))

    def engine_of(self, model: object) -> Engine:
        """Return the engine of a model.

        Raises:
            PrepareError: this accelerator has not prepared it.
        """
        engine = self.find(model)
        if engine is None:
            raise PrepareError(
                f"{_named(model)} is not a model that this accelerator has prepared",
                hint="pass what accelerator.prepare() returned",
            )
        return engine

    def owners(self, parameters: Iterable[nn.Parameter]) -> list[Engine]:
        """Return the engines that parameters belong to; what belongs to none is passed over."""
        found = (self._by_parameter.get(id(parameter)) for parameter in parameters)
        return list(dict.fromkeys(engine for engine in found if engine is not None))

    def strangers(self, parameters: Sequence[nn.Parameter]) -> int:
        """Return how many of the parameters belong to no prepared model."""
        return sum(id(parameter) not in self._by_parameter for parameter in parameters)

    def updates_of(self, engines: Sequence[Engine]) -> Updates:
        """Return the updates that these models are in.

        Raises:
            TrainingStepError: they are in several.
        """
        found = dict.fromkeys(self._updates[engine] for engine in engines)
        if len(found) != 1:
            raise TrainingStepError(
                f"one call spans {len(found)} tuples of models that accumulate() names apart",
                hint="name all models that one optimizer steps in one accumulate(), or use an optimizer for each",
            )
        return next(iter(found))

    def scope_of(self, models: Sequence[object]) -> Scope:
        """Return the scope of the models that `accumulate` names; of all models when it names none."""
        scope = self._scopes.get(tuple(map(id, models)))
        return scope if scope is not None else self._new_scope(models)

    def enter(self, updates: Updates) -> None:
        """Open a scope."""
        updates.enter()
        self._open.append(updates)
        self.latest = updates

    def leave(self, updates: Updates) -> None:
        """Close a scope."""
        self._open.remove(updates)
        updates.leave()

    def backward(self, loss: Tensor, *, num_items: float | None, retain_graph: bool) -> None:
        """Run a backward pass for the models that it belongs to; those of other scopes keep the gradients they have."""
        updates = self._open[-1] if self._open else self._outside_scopes()
        if len(self._tuples) < 2:
            updates.backward(loss, num_items=num_items, retain_graph=retain_graph)
            return
        with contextlib.ExitStack() as stack:
            for other in self._tuples:
                if other is not updates and not other.is_open:
                    for engine in other.engines:
                        stack.enter_context(engine.keep_gradients())
            updates.backward(loss, num_items=num_items, retain_graph=retain_graph)

    def _outside_scopes(self) -> Updates:
        """Return the implicit updates, which a backward outside all scopes belongs to.

        Raises:
            TrainingStepError: every model is one that `accumulate` names.
        """
        if not self._implicit.engines and self._updates:
            raise TrainingStepError(
                "backward() outside accumulate(), for models that are trained inside it",
                hint="move forward and backward into `with accelerator.accumulate(model):`",
            )
        self.latest = self._implicit
        return self._implicit

    def close(self) -> None:
        """Take off what was hooked on the models."""
        for engine in self._updates:
            engine.close()

    def _new_scope(self, models: Sequence[object]) -> Scope:
        engines = list(dict.fromkeys(map(self.engine_of, models))) or self.engines
        scope = self._scopes[tuple(map(id, models))] = Scope(self, self._updates_named(engines))
        return scope

    def _updates_named(self, engines: list[Engine]) -> Updates:
        """Return the updates of the models that one scope is for, which leave the implicit ones with it."""
        known = {self._updates[engine] for engine in engines} - {self._implicit}
        for updates in known:
            if set(updates.engines) != set(engines):
                raise TrainingStepError(
                    "accumulate() names a model that it named before together with others",
                    hint="name the same models together each time; a model stands in one tuple only",
                )
            return updates
        if self._tuples and not self._implicit.holds(engines):
            # Losses of other scopes have come through these models, and these are not theirs.
            for engine in engines:
                engine.drop_gradients()
        self.version += 1
        # The first tuple takes the scaler that the accelerator shows; what is left outside gets another one.
        scaler, self._implicit.scaler = self._implicit.scaler, self._run.make_scaler()
        updates = Updates(engines, self._run, scaler=scaler, is_implicit=False)
        self._tuples.append(updates)
        for engine in engines:
            self._implicit.engines.remove(engine)
            self._updates[engine] = updates
            engine.begin(sync=False)
        return updates


def _named(model: object) -> str:
    return class_name(model) if isinstance(model, nn.Module) else type(model).__name__


class Scope:
    """The context that `accumulate` returns."""

    __slots__ = ("_ledger", "_updates")

    def __init__(self, ledger: Ledger, updates: Updates) -> None:
        self._ledger = ledger
        self._updates = updates

    def __enter__(self) -> None:
        self._ledger.enter(self._updates)

    def __exit__(self, *_: object) -> None:
        self._ledger.leave(self._updates)
