"""The object that a training script talks to."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from drivetrain.accelerator.export import write_weights
from drivetrain.accelerator.kinds import (
    Kind,
    check_limit,
    check_model,
    check_norm_type,
    check_owner,
    compare_models,
    kind_of,
    loss_from,
)
from drivetrain.accelerator.ledger import Ledger, Scope
from drivetrain.accelerator.missing import explain
from drivetrain.accelerator.optimizer import PreparedOptimizer, PreparedScheduler
from drivetrain.accelerator.over_ranks import OverRanks
from drivetrain.accelerator.start import say_batch, start
from drivetrain.accelerator.tracking import LogWith, Tracking, split_log_with, trackers_of
from drivetrain.accelerator.updates import Run, Update, Updates
from drivetrain.accelerator.window_size import WindowSize
from drivetrain.cluster.process_group import Ranks
from drivetrain.cluster.seed import derive, set_seed
from drivetrain.config import RunConfig
from drivetrain.data import LoaderContext, PreparedLoader
from drivetrain.errors import PrepareError
from drivetrain.protocols import Engine
from drivetrain.strategies.common import class_name


class Accelerator(OverRanks, Tracking):
    """Runs a training script on the topology that it was launched on.

    Collective: every rank makes one. Usable as a context manager, which ends the training.

    Args:
        config: a file, a mapping or a `RunConfig`, in place of the file that the launch gives.
        mixed_precision: type of forward and backward; parameters stay as they are.
        gradient_accumulation_steps: micro-batches per update.
        global_batch_size: rows per update over all ranks; accumulation is derived from it.
        cpu: stay on the CPU.
        seed: of python, numpy and torch, and of the order of the data.
        project_dir: folder of this run.
        logging_dir: folder of its logs; `project_dir` if not given.
        log_with: trackers that get the logged values: names, classes or instances of `Tracker`, or a list of them.
        non_finite: what happens to an update whose gradient is inf or NaN.
        settings: any other key of the configuration; a section as a mapping or as its settings model.

    Raises:
        ConfigError: the settings are wrong, all problems at once.
        TopologyError: the settings do not fit the machine, or ranks differ in them.
    """

    def __init__(
        self,
        *,
        config: str | os.PathLike[str] | Mapping[str, object] | RunConfig | None = None,
        mixed_precision: Literal["no", "bf16", "fp16"] | None = None,
        gradient_accumulation_steps: int | None = None,
        global_batch_size: int | None = None,
        cpu: bool | None = None,
        seed: int | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        log_with: LogWith | None = None,
        non_finite: Literal["raise", "skip", "ignore"] | None = None,
        **settings: object,
    ) -> None:
        tracker_names, own_trackers = split_log_with(log_with)
        code = {
            "mixed_precision": mixed_precision,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "global_batch_size": global_batch_size,
            "cpu": cpu,
            "seed": seed,
            "project_dir": os.fspath(project_dir) if isinstance(project_dir, os.PathLike) else project_dir,
            "logging_dir": os.fspath(logging_dir) if isinstance(logging_dir, os.PathLike) else logging_dir,
            "log_with": tracker_names,
            "non_finite": non_finite,
            **settings,
        }
        setup = start(config=config, code=code)
        super().__init__(setup)
        self._trackers = trackers_of(self.config, own_trackers, setup.ranks)
        self._strategy = setup.strategy
        self._window_size = WindowSize(
            setup.resolved, num_ranks=self.num_processes, announce=say_batch if self.is_main_process else None
        )
        self._run = Run(
            strategy=setup.strategy,
            control=setup.ranks.control,
            drivers=self._drivers,
            device=setup.device,
            non_finite=self.config.non_finite,
            window_size=self._window_size,
            make_scaler=lambda: setup.precision.make_scaler(setup.device),
        )
        self._ledger = Ledger(self._run)
        self._optimizers: list[PreparedOptimizer] = []
        self._schedulers: list[PreparedScheduler] = []
        self._loaders: list[PreparedLoader] = []
        # The process ends in its own way: what was opened here is closed before the interpreter takes torch apart.
        self._close_at_exit = partial(_close_at_exit, setup.ranks)
        atexit.register(self._close_at_exit)

    # Preparing

    def prepare(self, *objects: Any) -> Any:
        """Prepare models, optimizers, loaders and schedulers for this topology, in any order. Collective.

        What is prepared already comes back as it is.

        Returns:
            One object, or a tuple in the order of the arguments. A model comes back as itself or in a wrapper with
            its attributes; the model itself is changed in place.

        Raises:
            PrepareError: an object that cannot be prepared.
            DataError: a loader that cannot be shared out.
        """
        kinds = [kind_of(value, position=position) for position, value in enumerate(objects, 1)]
        models = [value for value, kind in zip(objects, kinds, strict=True) if kind is Kind.MODEL]
        optimizers = [value for value, kind in zip(objects, kinds, strict=True) if kind is Kind.OPTIMIZER]
        self._prepare_models(models, optimizers)
        prepared: dict[int, Any] = {}
        for index, (value, kind) in enumerate(zip(objects, kinds, strict=True)):
            if kind is Kind.MODEL:
                prepared[index] = self._ledger.engine_of(value).prepared
            elif kind is Kind.OPTIMIZER:
                prepared[index] = self.prepare_optimizer(value)
            elif kind is Kind.LOADER:
                prepared[index] = self.prepare_data_loader(value)
        if models:
            for value in prepared.values():
                if isinstance(value, PreparedOptimizer):
                    value.check_models()
        # A schedule follows its optimizer, so that one comes first.
        for index, kind in enumerate(kinds):
            if kind is Kind.SCHEDULER:
                prepared[index] = self.prepare_scheduler(objects[index])
        in_order = tuple(prepared[index] for index in range(len(objects)))
        return in_order[0] if len(in_order) == 1 else in_order

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Prepare one model. Collective."""
        self._prepare_models([model], [])
        return self._ledger.engine_of(model).prepared

    def prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Prepare one optimizer; the models that it steps are prepared before or after."""
        if isinstance(optimizer, PreparedOptimizer):
            check_owner(optimizer, self)
            return optimizer
        for known in self._optimizers:
            if known.optimizer is optimizer:
                return known
        prepared = PreparedOptimizer(self._strategy.attach(optimizer), self._ledger, owner=self)
        self._optimizers.append(prepared)
        self._ledger.add_optimizer(prepared)
        return prepared

    def prepare_data_loader(self, loader: DataLoader[Any] | PreparedLoader) -> PreparedLoader:
        """Prepare one loader: this rank then reads its share. Collective."""
        if isinstance(loader, PreparedLoader):
            check_owner(loader, self)
            return loader
        for known in self._loaders:
            if known.loader is loader:
                return known
        context = LoaderContext(
            device=self.device,
            control=self._ranks.control,
            drivers=self._drivers,
            seed=self.config.seed,
            even_batches=self.config.even_batches,
        )
        prepared = PreparedLoader(loader, context, owner=self)
        self._loaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler | PreparedScheduler) -> PreparedScheduler:
        """Prepare one learning rate schedule, after the optimizer that it was built for."""
        if isinstance(scheduler, PreparedScheduler):
            check_owner(scheduler, self)
            return scheduler
        for known in self._schedulers:
            if known.scheduler is scheduler:
                return known
        for optimizer in self._optimizers:
            if scheduler.optimizer is optimizer or scheduler.optimizer is optimizer.optimizer:
                prepared = PreparedScheduler(scheduler, optimizer, owner=self)
                self._schedulers.append(prepared)
                return prepared
        raise PrepareError(
            f"{type(scheduler).__name__} was built for an optimizer that is not prepared",
            hint="prepare that optimizer in the same call, or before",
        )

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model that was given to `prepare`."""
        engine = self._ledger.find(model)
        return model if engine is None else engine.module

    def free_memory(self) -> None:
        """Let go of everything that was prepared, and of the device memory that nobody uses."""
        self._ledger.close()
        self._ledger = Ledger(self._run)
        self._optimizers.clear()
        self._schedulers.clear()
        self._loaders.clear()
        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    # Training

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update; as asked for, until a loader tells what `global_batch_size` makes of it."""
        return self._window_size.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._window_size.set_steps(steps)

    def accumulate(self, *models: nn.Module) -> Scope:
        """Return a scope: what an update of these models is accumulated in; of all models when none are named.

        Losses of the scope leave no gradient in models that other scopes are for.

        A window of `gradient_accumulation_steps` scopes makes one update; the last batch of an epoch ends it before.
        """
        return self._ledger.scope_of(models)

    def backward(self, loss: Tensor, *, num_items: float | None = None, retain_graph: bool = False) -> None:
        """Run the backward pass of a loss, weighted such that the update is the mean over all its items.

        Collective where it reduces gradients.

        Args:
            loss: of this rank; a mean over the batch, or with `num_items` a sum over that many items.
            num_items: how many items of this rank the loss is a sum over, 0 or more; in all losses of a window or in
                none, and the same in all losses of one scope.
            retain_graph: keep the graph, for another loss of the same forward.

        Raises:
            TrainingStepError: sums and means in one window, or a call outside the scope that it belongs to.
        """
        if not (isinstance(loss, Tensor) and loss.requires_grad) or loss.dim():
            loss = loss_from(loss)
        self._ledger.backward(loss, num_items=num_items, retain_graph=retain_graph)

    def forward_method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        """Make another method of a prepared model go through what its forward goes through, and return it.

        From then on `model.<name>(...)` does so, too: it computes in the model's precision, gathers parameters that
        are spread over ranks, and its backward reduces gradients. Collective where the forward is.

        Args:
            model: as `prepare` returned it.

        Raises:
            PrepareError: the model has no such method, or is not prepared.
        """
        engine = self._ledger.engine_of(model)
        if not callable(getattr(engine.module, name, None)):
            names = [method for method in dir(type(engine.module)) if not method.startswith("_")]
            near = get_close_matches(name, names, n=1)
            raise PrepareError(
                f"{class_name(engine.module)} has no method `{name}`",
                hint=f"did you mean `{near[0]}`?" if near else None,
            )
        return engine.forward_method(name)

    @contextlib.contextmanager
    def no_sync(self, *models: nn.Module) -> Iterator[None]:
        """Keep backwards in this context from reducing gradients over ranks; one after it reduces them all."""
        engines = [self._ledger.engine_of(model) for model in models] or self._ledger.engines
        groups = list(dict.fromkeys(self._ledger.updates_of([engine]) for engine in engines))
        for updates in groups:
            updates.hold_sync()
        try:
            yield
        finally:
            for updates in groups:
                updates.release_sync()

    @property
    def sync_gradients(self) -> bool:
        """Whether the scope that was opened last ends a window: the place to log, or to count an update."""
        return not self._ledger.latest.is_between_steps

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip the global norm of the gradients of a window; nothing inside one. Collective.

        Gradients are final afterwards. Does not synchronise the host.

        Args:
            max_norm: in the units of the unscaled gradient of the update.

        Returns:
            The norm before clipping, 0-d, the same on every rank; None inside a window.
        """
        chosen: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        check_limit(max_norm)
        check_norm_type(norm_type)
        finished = self._finish(chosen)
        if finished is None:
            return None
        updates, engines = finished
        return updates.clip_grad_norm(chosen, engines, max_norm=float(max_norm), norm_type=float(norm_type))

    def clip_grad_value_(self, parameters: Iterable[nn.Parameter] | Tensor, clip_value: float) -> None:
        """Clamp every element of the gradients of a window to [-clip_value, clip_value]; nothing inside one.

        Gradients are final afterwards. Collective.
        """
        chosen: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        check_limit(clip_value)
        finished = self._finish(chosen)
        if finished is not None:
            updates, engines = finished
            updates.clip_grad_value(engines)
            self._strategy.clip_grad_value(chosen, clip_value=float(clip_value))

    def unscale_gradients(self, optimizer: PreparedOptimizer | Iterable[PreparedOptimizer] | None = None) -> None:
        """Make `p.grad` the gradient of the update, in its own units; nothing inside a window. Collective.

        Args:
            optimizer: whose gradients; all prepared ones' if not given.
        """
        chosen: Iterable[PreparedOptimizer] = self._optimizers
        if optimizer is not None:
            chosen = [optimizer] if isinstance(optimizer, PreparedOptimizer) else optimizer
        for one in chosen:
            if one.updates.finish(one.engines):
                one.updates.unscale(one.stepper)
                one.updates.scale(one.engines)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which computations outside a prepared model run in its precision."""
        dtype = self._setup.precision.compute_dtype
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler; None unless `mixed_precision` is `fp16`."""
        return self._ledger.scaler

    @property
    def step(self) -> int:
        """Updates so far, skipped ones included."""
        return self._ranks.control.updates

    @property
    def last_update(self) -> Update | None:
        """The update that was made last; None before the first."""
        return None if self._run.last is None else Update(*self._run.last)

    @property
    def num_skipped_steps(self) -> int | Tensor:
        """Optimizer steps that left the weights as they were; a tensor where only the device knows."""
        return self._run.num_skipped

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer's last step left the weights as they were; reads the device where only that knows."""
        return any(bool(optimizer.step_was_skipped) for optimizer in self._optimizers)

    def set_seed(self, seed: int, *, device_specific: bool = False) -> None:
        """Seed python, numpy and torch, alike on all ranks or, if `device_specific`, differently on each."""
        set_seed(derive(seed, self.process_index) if device_specific else seed)

    # Saving and ending

    def get_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return a model's parameters and persistent buffers, whole, under its own names. Collective."""
        return self._ledger.engine_of(model).state_dict()

    def save_model(self, model: nn.Module, save_directory: str | os.PathLike[str]) -> None:
        """Write a model's weights to `model.safetensors` in a folder; rank 0 writes, completely or not at all.

        Collective.
        """
        state = self.get_state_dict(model)
        if self.is_main_process:
            write_weights(state, save_directory)

    def end_training(self) -> None:
        """Leave the run: wait a moment for the other ranks and close the process group, if this opened it."""
        self._close(is_failing=False)

    def __enter__(self) -> Self:
        return self

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # raises what the property raised
        raise AttributeError(explain(name, members=dir(type(self))))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(is_failing=kind is not None)

    def _close(self, *, is_failing: bool) -> None:
        if is_failing:
            # While the others still wait: whoever sees this rank gone fails, too, and would be the first to have ended.
            self._trackers.finish(is_failing=True)
        try:
            self._ranks.close(is_failing=is_failing)
        except BaseException:
            self._trackers.finish(is_failing=True)
            raise
        finally:
            atexit.unregister(self._close_at_exit)
        self._trackers.finish(is_failing=False)

    def _prepare_models(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        new = list({id(model): model for model in models if self._ledger.find(model) is None}.values())
        for model in new:
            check_model(model)
        self._ledger.check_new(new)
        if new:
            compare_models(new, self._ranks.control)
            former = [parameter for model in new for parameter in model.parameters()]
            for engine in self._strategy.setup(new, optimizers):
                self._ledger.add(engine)
            self._ledger.note_replaced(former)

    def _finish(self, parameters: list[Any]) -> tuple[Updates, list[Engine]] | None:
        """Make these parameters' gradients final but for a factor; None inside a window."""
        self._ledger.check_current(parameters)
        if count := self._ledger.strangers(parameters):
            raise PrepareError(
                f"{count} of the {len(parameters)} parameters belong to no model that this accelerator has prepared",
                hint="take model.parameters() of a prepared model, and not between its forward and its backward",
            )
        engines = self._ledger.owners(parameters)
        if not engines:
            raise PrepareError("there are no parameters to clip", hint="pass those of a prepared model")
        updates = self._ledger.updates_of(engines)
        if not updates.finish(engines):
            return None
        for optimizer in self._optimizers:
            if not set(optimizer.engines).isdisjoint(engines):
                updates.unscale(optimizer.stepper)
        return updates, engines


def _close_at_exit(ranks: Ranks) -> None:
    ranks.close(is_failing=getattr(sys, "last_value", None) is not None)
