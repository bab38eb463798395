"""Several tuples of models, with optimizers that step in turn, against sums of exact fractions over all rows.

Ranks are threads: each has its own ledger, models and loader, and what travels between them meets in one place. The
reference knows nothing of ranks, scopes or phases: an update is every row's gradient, over the number of items.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain.accelerator.ledger import Ledger
from drivetrain.accelerator.optimizer import PreparedOptimizer
from drivetrain.accelerator.updates import Run, Update
from drivetrain.cluster.control import Agreement, Call, Control
from drivetrain.cluster.process_group import Ranks
from drivetrain.config import RunConfig
from drivetrain.data import Drivers, LoaderContext, PreparedLoader
from drivetrain.precision import Precision
from drivetrain.protocols import Engine
from drivetrain.strategies.common import LocalEngine, ReplicatedStrategy, StrategyContext, run_backward

EPOCHS = 2
SECONDS = 5.0
ELSEWHERE = 1000  # what a loss adds through a model of another tuple


# The plan


@dataclass(frozen=True, kw_only=True)
class Tuple:
    """Models that one scope is for.

    Args:
        turns: how many models each optimizer steps; the optimizers take turns within a scope.
        sums: whether losses are sums over the tokens of the rows, and not means over the rows.
        num_losses: backwards per turn; they add up.
        clears_first: whether gradients are cleared before a turn, and not after it.
        strays: whether its losses also depend on the models of the tuple after it.
    """

    turns: tuple[int, ...]
    sums: bool
    num_losses: int
    clears_first: bool
    strays: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A training.

    Args:
        averages: whether the engines divide what they reduce by the number of ranks.
        scoped: whether the script uses `accumulate`.
    """

    tuples: tuple[Tuple, ...]
    ranks: int
    length: int
    batch_size: int
    window: int
    averages: bool
    scoped: bool


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    scoped = draw(st.booleans())
    one = st.builds(
        Tuple,
        turns=st.lists(st.integers(1, 2), min_size=1, max_size=2).map(tuple),
        sums=st.booleans(),
        num_losses=st.integers(1, 2),
        clears_first=st.booleans(),
        strays=st.booleans() if scoped else st.just(False),
    )
    return Plan(
        tuples=tuple(draw(st.lists(one, min_size=1, max_size=3))),
        ranks=draw(st.integers(1, 3)),
        length=draw(st.integers(1, 14)),
        batch_size=draw(st.integers(1, 3)),
        window=draw(st.integers(1, 3)) if scoped else 1,
        averages=draw(st.booleans()),
        scoped=scoped,
    )


def drawn(*key: object) -> int:
    """Return a number from -50 to 50 that depends on the key alone."""
    return zlib.crc32(repr(key).encode()) % 101 - 50


def tokens(row: int) -> int:
    """Return how many items a row has where losses are sums: 0 to 3, often 0."""
    return max(0, drawn("tokens", row) % 6 - 2)


def counts(row: int, *, sums: bool) -> int:
    """Return how many items a row is."""
    return tokens(row) if sums else 1


def slope(model: str, row: int, number: int, *, sums: bool) -> int:
    """Return what a row gives to the gradient of a model, in one of the losses of a turn."""
    return drawn("slope", model, row, number) if counts(row, sums=sums) else 0


def height(model: str, row: int, number: int, *, sums: bool) -> int:
    """Return what a row and a model give to one of the losses of a turn."""
    return drawn("height", model, row, number) if counts(row, sums=sums) else 0


# The reference


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a training has come to.

    Args:
        moves: how far each model has moved, at a learning rate of 1.
        losses: of each update, in order; None where it had no items and was left out.
    """

    moves: list[Any]
    losses: list[Any]


def expected(plan: Plan) -> Outcome:
    """Return what rows, items and windows make of a plan."""
    rows_per_step = plan.batch_size * plan.ranks
    rows_per_window = rows_per_step * plan.window
    moves = dict.fromkeys((name for name, _ in models_of(plan)), Fraction(0))
    losses: list[Fraction | None] = []
    for first in range(0, plan.length, rows_per_window):
        rows = range(first, min(first + rows_per_window, plan.length))
        for at, one in enumerate(plan.tuples):
            items = sum(counts(row, sums=one.sums) for row in rows)
            for names in turns_of(plan, at):
                keys = [(name, row, number) for name in names for row in rows for number in range(one.num_losses)]
                losses.append(Fraction(sum(height(*key, sums=one.sums) for key in keys), items) if items else None)
                for key in keys if items else ():
                    moves[key[0]] += Fraction(slope(*key, sums=one.sums), items)
    return Outcome(
        moves=[pytest.approx(float(EPOCHS * move), rel=1e-12, abs=1e-9) for move in moves.values()],
        losses=EPOCHS * [None if loss is None else pytest.approx(float(loss), rel=1e-6, abs=1e-6) for loss in losses],
    )


def models_of(plan: Plan) -> list[tuple[str, int]]:
    """Return a name for each model, with the place of its tuple."""
    return [(f"{at}.{number}", at) for at, one in enumerate(plan.tuples) for number in range(sum(one.turns))]


def turns_of(plan: Plan, at: int) -> list[list[str]]:
    """Return the models of a tuple that are stepped together, by turns."""
    names = (name for name, place in models_of(plan) if place == at)
    return [[next(names) for _ in range(count)] for count in plan.tuples[at].turns]


# Ranks that are threads


class Meeting:
    """Where ranks meet: the first time of each, the second time of each, and so on."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._met = threading.Condition()
        self._given: dict[int, dict[int, Tensor]] = defaultdict(dict)
        self._times = [0] * ranks
        self._is_over = False

    def give(self, rank: int, value: Tensor) -> int:
        with self._met:
            self._times[rank] += 1
            self._given[self._times[rank]][rank] = value.clone()
            self._met.notify_all()
            return self._times[rank]

    def total(self, time: int) -> Tensor:
        with self._met:
            given = self._given[time]
            self._met.wait_for(lambda: self._is_over or len(given) == self._ranks, timeout=SECONDS)
            if len(given) < self._ranks:
                raise RuntimeError(f"only ranks {sorted(given)} came")
            return torch.stack([given[rank] for rank in range(self._ranks)]).sum(0)

    def break_off(self) -> None:
        with self._met:
            self._is_over = True
            self._met.notify_all()


@dataclass(frozen=True)
class Work:
    """A sum over ranks that is under way."""

    meeting: Meeting
    time: int
    matrix: Tensor

    def wait(self, *_: object) -> None:
        self.matrix.copy_(self.meeting.total(self.time))


class ThreadControl(Control):
    """Agreements between threads."""

    def __init__(self, *, rank: int, meeting: Meeting, world_size: int) -> None:
        super().__init__(rank=rank, world_size=world_size, group=None)
        self._meeting = meeting

    def start(self, call: Call, values: Sequence[float] = (), *, tensor: Tensor | None = None) -> Agreement:
        matrix = super().start(call, values, tensor=tensor)._matrix
        work: Any = Work(self._meeting, self._meeting.give(self.rank, matrix), matrix)
        return Agreement(self, matrix=matrix, work=work)


class ThreadEngine(LocalEngine):
    """A model whose gradients are added up, or averaged, when they are asked for."""

    def __init__(self, module: nn.Module, context: StrategyContext, *, meeting: Meeting, divisor: int) -> None:
        super().__init__(module, context)
        self._rank = context.ranks.rank
        self._meeting = meeting
        self._divisor = divisor

    def synchronize(self) -> None:
        [parameter] = self.module.parameters()
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = self._meeting.total(self._meeting.give(self._rank, own)) / self._divisor


class ThreadStrategy(ReplicatedStrategy):
    """What `ThreadEngine`s are trained by."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> Sequence[Engine]:
        raise NotImplementedError

    def backward(
        self, loss: Tensor, engines: Sequence[Engine], *, contributes: bool, retain_graph: bool
    ) -> Sequence[Engine]:
        with contextlib.ExitStack() as stack:
            for engine in () if contributes else engines:
                stack.enter_context(engine.keep_gradients())
            return run_backward(loss, engines, retain_graph=retain_graph)


class Weight(nn.Module):
    """A model of one number, whose output is 0 and has the gradient that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, slope: int) -> Tensor:
        return (self.weight - self.weight.detach()) * slope


# The training


class Training:
    """One rank's part of a plan."""

    def __init__(self, plan: Plan, *, rank: int, agreements: Meeting, gradients: Meeting) -> None:
        self.plan = plan
        divisor = plan.ranks if plan.averages else 1
        control = ThreadControl(rank=rank, meeting=agreements, world_size=plan.ranks)
        device, drivers = torch.device("cpu"), Drivers()
        self.run = Run(
            strategy=ThreadStrategy(divisor),
            control=control,
            drivers=drivers,
            device=device,
            non_finite="ignore",
            window_size=lambda _: plan.window,
            make_scaler=lambda: None,
        )
        self.ledger = Ledger(self.run)
        context = StrategyContext(
            device=device,
            ranks=cast(Ranks, control),
            precision=Precision.of("no"),
            config=RunConfig(),
        )
        self.models = {name: Weight() for name, _ in models_of(plan)}
        for model in self.models.values():
            self.ledger.add(ThreadEngine(model, context, meeting=gradients, divisor=divisor))
        rows: Any = torch.arange(plan.length)
        self.loader = PreparedLoader(
            DataLoader(rows, batch_size=plan.batch_size),
            LoaderContext(device=device, control=control, drivers=drivers, seed=0, even_batches=True),
            owner=None,
        )
        self.turns = [
            [(names, self._optimizer(names)) for names in turns_of(plan, at)] for at in range(len(plan.tuples))
        ]
        self.losses: list[float | None] = []
        if plan.scoped:
            for at in range(len(plan.tuples)):
                self.ledger.scope_of(self._models(at))

    def __call__(self) -> Outcome:
        for _ in range(EPOCHS):
            for rows in self.loader:
                for at in range(len(self.plan.tuples)):
                    self._scope(at, rows.tolist())
        return Outcome(moves=[-model.weight.item() for model in self.models.values()], losses=self.losses)

    def _models(self, at: int) -> list[Weight]:
        return [self.models[name] for name, place in models_of(self.plan) if place == at]

    def _optimizer(self, names: list[str]) -> PreparedOptimizer:
        parameters = [self.models[name].weight for name in names]
        stepper = self.run.strategy.attach(torch.optim.SGD(parameters, lr=1.0))
        optimizer = PreparedOptimizer(stepper, self.ledger, owner=None)
        self.ledger.add_optimizer(optimizer)
        return optimizer

    def _scope(self, at: int, rows: list[int]) -> None:
        one = self.plan.tuples[at]
        with self.ledger.scope_of(self._models(at)) if self.plan.scoped else contextlib.nullcontext():
            for names, optimizer in self.turns[at]:
                if one.clears_first:
                    optimizer.zero_grad()
                for number in range(one.num_losses):
                    loss = self._loss(at, names, rows, number)
                    num_items = sum(map(tokens, rows)) if one.sums else None
                    self.ledger.backward(loss, num_items=num_items, retain_graph=False)
                optimizer.step()
                self._log(optimizer)
                if not one.clears_first:
                    optimizer.zero_grad()

    def _log(self, optimizer: PreparedOptimizer) -> None:
        if optimizer.updates.is_between_steps:
            return
        assert self.run.last is not None
        update = Update(*self.run.last)
        assert (update.loss is None) is update.skipped
        self.losses.append(None if update.loss is None else update.loss.item())

    def _loss(self, at: int, names: list[str], rows: list[int], number: int) -> Tensor:
        one = self.plan.tuples[at]
        loss = torch.zeros((), dtype=torch.float64)
        for name in names:
            keys = [(name, row, number) for row in rows]
            loss = loss + self.models[name](sum(slope(*key, sums=one.sums) for key in keys))
            loss = loss + sum(height(*key, sums=one.sums) for key in keys)
        if not one.sums:
            loss = loss / len(rows)
        if one.strays:
            for model in self._models(at + 1):
                loss = loss + model(ELSEWHERE)
        return loss


def train(plan: Plan) -> list[Outcome]:
    """Return the outcome on each rank; raise what a rank has raised first."""
    agreements, gradients = Meeting(plan.ranks), Meeting(plan.ranks)
    errors: list[BaseException] = []

    def note(done: Future[Outcome]) -> None:
        if (error := done.exception()) is not None:
            errors.append(error)
            agreements.break_off()
            gradients.break_off()

    def run(rank: int) -> Outcome:
        return Training(plan, rank=rank, agreements=agreements, gradients=gradients)()

    with ThreadPoolExecutor(plan.ranks) as pool:
        ranks = [pool.submit(run, rank) for rank in range(plan.ranks)]
        for one in ranks:
            one.add_done_callback(note)
    if errors:
        raise errors[0]
    return [one.result() for one in ranks]


@settings(max_examples=100, deadline=None)
@given(plan=plans())
def test_several_models_when_stepped_in_turn_move_by_the_sum_over_all_rows(plan: Plan) -> None:
    assert train(plan) == [expected(plan)] * plan.ranks
