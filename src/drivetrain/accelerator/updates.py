"""From backward to step: what accumulates for one tuple of models, and how it becomes one update.

`Updates` holds the window of one tuple of models and walks it through its phases: scopes are entered and left,
backwards weigh their losses, and at the window's end, once, ranks agree on the totals, gradients become final and
optimizers step. It calls the engines in the order that `protocols.py` gives and knows nothing else of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn

from drivetrain.accelerator.phase import Phase
from drivetrain.accelerator.totals import Totals
from drivetrain.cluster.control import Control
from drivetrain.data import Drivers
from drivetrain.data.drivers import Iteration
from drivetrain.errors import NonFiniteError, RankMismatchError, TopologyError, TrainingStepError
from drivetrain.protocols import Engine, Stepper, Strategy
from drivetrain.window import Window, reference_for


@dataclass(frozen=True, slots=True)
class Update:
    """One update, as it was applied. Tensors are 0-d, plain, reduced, and the same on every rank.

    Args:
        step: the number of this update, from 1.
        loss: the sum of all losses over the number of items that they are over; None without items.
        num_items: that number, over all ranks and scopes.
        grad_norm: before clipping; None when nothing was clipped.
        skipped: whether weights stayed as they were; a tensor where only the device knows.
        lr: of the first parameter group, as it was applied.
    """

    step: int
    loss: Tensor | None
    num_items: float
    grad_norm: Tensor | None
    skipped: bool | Tensor
    lr: float | Tensor


@dataclass(slots=True, kw_only=True)
class Run:
    """What all updates of an accelerator share.

    Args:
        window_size: how many scopes make an update, given the pass that drives; asked at the start of a window.
        make_scaler: a new loss scaler; None where losses are not scaled.
        num_skipped: optimizer steps that left the weights as they were.
        last: the fields of the update that was made last, for an `Update` when somebody asks; None before the first.
    """

    strategy: Strategy
    control: Control
    drivers: Drivers
    device: torch.device
    non_finite: Literal["raise", "skip", "ignore"]
    window_size: Callable[[Iteration | None], int]
    make_scaler: Callable[[], torch.amp.GradScaler | None]
    num_skipped: int | Tensor = 0
    last: tuple[int, Tensor | None, float, Tensor | None, bool | Tensor, float | Tensor] | None = None


class Updates:
    """The updates of one tuple of models, one after the other.

    Args:
        scaler: of the losses; None where they are not scaled. A window is scaled alike, so windows share none.
        is_implicit: whether all that happens between two steps is one scope, for want of `accumulate`.

    Attributes:
        is_open: whether a scope is open.
    """

    def __init__(
        self, engines: Iterable[Engine], run: Run, *, scaler: torch.amp.GradScaler | None, is_implicit: bool
    ) -> None:
        self.engines = list(engines)
        self.is_implicit = is_implicit
        self.scaler = scaler
        self.is_open = False
        self._held = 0
        self._run = run
        self._is_shared = run.control.world_size > 1
        self._window: Window | None = None
        self._phases = [self._new_phase()]
        self._phase = self._phases[0]
        self._is_phase_over = False
        self._is_counted = False
        self._is_broken = False
        self._num_clips = 0
        self._known: dict[Stepper, None] = {}
        self._stepped: set[Stepper] = set()
        self._holding: set[Engine] = set()
        self._unscaled: set[Stepper] = set()
        self._uncleared: set[Stepper] = set()
        self._left_over: set[Stepper] = set()
        self._backwards = 0
        self._usual_backwards = 0
        self._was_unsynced = False
        self._reference = 1.0

    @property
    def is_complete(self) -> bool:
        """Whether what has accumulated makes an update: the window's last scope is open, or was the last one."""
        return self._window is not None and self._window.is_complete

    @property
    def is_between_steps(self) -> bool:
        """Whether a window is open whose last scope has not come yet."""
        return self._window is not None and not self._window.is_complete

    def holds(self, engines: Iterable[Engine]) -> bool:
        """Whether gradients of these models are for a step that has not come yet."""
        return not self._stepped and not self._holding.isdisjoint(engines)

    def hold_sync(self) -> None:
        """Keep backwards from reducing gradients, until `release_sync`."""
        self._held += 1
        for engine in self.engines:
            engine.begin(sync=False)

    def release_sync(self) -> None:
        """Let backwards reduce gradients again, if nothing else holds them."""
        self._held -= 1
        if self.is_implicit or self.is_open:
            self._allow_sync()

    def enter(self) -> None:
        """Open a scope; the forwards in it come after this."""
        if self.is_open:
            raise TrainingStepError("accumulate() was entered again for the same models before it was left")
        self.is_open = True
        self._open_scope()
        self._allow_sync()

    def leave(self) -> None:
        """Close the scope."""
        self.is_open = False
        if self._backwards:
            self._learn()
        for engine in self.engines:
            engine.begin(sync=False)

    def backward(self, loss: Tensor, *, num_items: float | None, retain_graph: bool) -> None:
        """Run a backward pass of this rank's part of the scope; collective where it reduces gradients."""
        window, totals = self._begin_backward(), self._phase.totals
        divisor = window.weigh(num_items)
        is_filler = divisor is None
        totals.add(None if is_filler else loss.detach(), window.loss_weight)
        self._was_unsynced = self._held > 0
        self._backwards += not self._was_unsynced
        if self._is_shared and self._is_last_backward(window):
            totals.start(window, self._place())
        if divisor is not None and divisor != 1.0:
            loss = loss / divisor
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        self._is_broken = True
        try:
            reached = self._run.strategy.backward(
                loss, self.engines, contributes=not is_filler, retain_graph=retain_graph
            )
        except RankMismatchError:
            raise
        except (RuntimeError, TopologyError):
            # Here one only knows that a rank is gone; where ranks were has been agreed before.
            totals.check_places()
            raise
        self._is_broken = False
        self._holding.update(reached)
        if len(self.engines) > 1:
            totals.note_reached(sum(1 << self.engines.index(engine) for engine in reached))

    def _begin_backward(self) -> Window:
        """Return the window that a backward counts in, with the phase that it counts in as the current one."""
        window = self._window
        if self._is_broken:
            self._refuse_broken()
        if window is None or (self.is_implicit and self._stepped):
            window = self._open_scope()
        if self._is_phase_over:
            self._start_phase()
        elif self._phase.is_agreed:
            raise TrainingStepError(
                "backward() after the gradients of this update were clipped or unscaled, and before they were used",
                hint="before it, call optimizer.step(), or optimizer.zero_grad() to leave the update out",
            )
        if window.form is None and (self._uncleared or self._left_over):
            self._left_over = {stepper for stepper in self._uncleared if stepper.has_gradients()}
        return window

    def finish(self, engines: Iterable[Engine]) -> bool:
        """Make the gradients of these models final but for loss scale and factor; collective at the end of a window.

        Returns:
            False inside a window, where nothing is done.
        """
        window, phase = self._window, self._phase
        if window is None or window.form is None or not window.is_complete:
            return False
        if not phase.is_agreed:
            if self._is_broken:
                self._refuse_broken()
            if self.is_implicit:
                self._check_implicit()
            # Before anything of the engines': where ranks are at different places, this says so.
            phase.agree(window, self._place() if self._is_shared else ())
        phase.synchronize(engines)
        return True

    def _is_last_backward(self, window: Window) -> bool:
        """Whether this backward ends the update, as far as one can know: then the ranks agree while it runs."""
        return self._backwards == self._usual_backwards == 1 and not self._was_unsynced and window.is_complete

    def _place(self) -> tuple[float, ...]:
        """Return what must be alike on all ranks besides the window: learning rates that the host knows, clippings."""
        rates = [group["lr"] for stepper in self._known for group in stepper.optimizer.param_groups if "lr" in group]
        return sum(rate for rate in rates if not isinstance(rate, Tensor)), self._num_clips

    def _refuse_broken(self) -> NoReturn:
        raise TrainingStepError(
            "a backward() of this update was broken off by an exception, and its gradients are there in part",
            hint="call optimizer.zero_grad() after such an exception: the update is left out",
        )

    def _check_implicit(self) -> None:
        size = self._run.window_size(self._run.drivers.current())
        if size > 1:
            raise TrainingStepError(
                f"{size} micro-batches per step are asked for, and this script steps without accumulate()",
                hint="put forward, backward and step inside `with accelerator.accumulate(model):`",
            )
        if self._was_unsynced:
            raise TrainingStepError(
                "the gradients of this step were never reduced over ranks: its last backward() ran under no_sync()",
                hint="run the last backward() before a step outside no_sync(), or use accumulate()",
            )

    def unscale(self, stepper: Stepper) -> None:
        """Take the loss scale off the final gradients of an optimizer, once per update."""
        if self.scaler is not None and stepper not in self._unscaled:
            self._unscaled.add(stepper)
            stepper.unscale(self.scaler)

    def scale(self, engines: Iterable[Engine]) -> None:
        """Apply the factor that is left on the final gradients of these models, once."""
        self._phase.scale(engines)

    def clip_grad_norm(
        self, parameters: Sequence[nn.Parameter], engines: Sequence[Engine], *, max_norm: float, norm_type: float
    ) -> Tensor:
        """Clip final gradients; return the norm before."""
        self._num_clips += 1
        return self._phase.clip_grad_norm(
            self._run.strategy, parameters, engines, max_norm=max_norm, norm_type=norm_type
        )

    def clip_grad_value(self, engines: Iterable[Engine]) -> None:
        """Make the gradients of these models ready to be clamped."""
        self._phase.scale(engines)
        self._num_clips += 1

    def step(self, stepper: Stepper, engines: Sequence[Engine]) -> bool | Tensor | None:
        """Apply an optimizer's gradients; collective at the end of a window.

        Returns:
            Whether weights stayed as they were; None inside a window, where nothing is done.

        Raises:
            NonFiniteError: gradients are not finite and the policy says to stop; weights stay as they were.
        """
        if self._backwards:
            self._learn()
        self._is_phase_over = True
        phase = self._phase
        if stepper in phase.steppers or not self.finish(engines):
            self._check_source(stepper)
            return None
        self._known[stepper] = None
        if phase.factor != 1.0 and stepper in self._left_over:
            raise TrainingStepError(
                "the gradients of the update before were not cleared, and would be scaled like those of this one",
                hint="call optimizer.zero_grad() after optimizer.step()",
            )
        if not self._is_counted:
            self._is_counted = True
            self._run.control.updates += 1
        self._stepped.add(stepper)
        self._uncleared.add(stepper)
        phase.steppers.add(stepper)
        skipped: bool | Tensor = True
        try:
            if phase.items:
                skipped = self._apply(stepper, engines)
        finally:
            self._report(stepper, skipped=skipped)
        self._run.num_skipped += skipped
        if self.is_implicit:
            self._allow_sync()
        return skipped

    def zero_grad(self, stepper: Stepper, engines: Sequence[Engine], *, set_to_none: bool, is_alone: bool) -> None:
        """Clear gradients, unless a window holds them that is not stepped yet.

        Gradients that were looked at, by clipping or unscaling them, can be thrown away: the update is left out.

        Args:
            is_alone: whether no other optimizer steps these models.
        """
        if self._is_broken:
            stepper.zero_grad(set_to_none=set_to_none)
            self._leave_out()
            return
        is_held = stepper not in self._stepped and not self._holding.isdisjoint(engines)
        is_final = not self._phase.reduced.isdisjoint(engines)
        if is_held and not self.is_implicit and not is_final:
            return
        stepper.zero_grad(set_to_none=set_to_none)
        self._uncleared.discard(stepper)
        self._left_over.discard(stepper)
        if is_held and is_final:
            self._stepped.add(stepper)
            self._is_phase_over = True
        elif is_held and is_alone:
            self._leave_out()

    def _leave_out(self) -> None:
        """Forget a window whose gradients are thrown away."""
        for phase in self._phases:
            phase.totals.abandon()
        self._forget()

    def _open_scope(self) -> Window:
        run, window = self._run, self._window
        iteration = run.drivers.current()
        if window is None or self._stepped:
            self._forget()
            size = 1 if self.is_implicit else run.window_size(iteration)
            batch = None if iteration is None else iteration.facts(window_size=size)
            window = self._window = Window(
                size=size,
                ranks=run.control.world_size,
                divisor=run.strategy.divisor,
                rows_ahead=None if batch is None else batch.rows_ahead,
                reference=self._reference,
            )
        else:
            batch = None if iteration is None else iteration.facts(window_size=1)
        window.enter(batch)
        self._phase = self._phases[0]
        self._is_phase_over = False
        return window

    def _allow_sync(self) -> None:
        """Let the next backward reduce gradients where it is the last of an update, as far as one can know."""
        ends_window = self.is_implicit or self.is_complete
        sync = ends_window and self._usual_backwards == 1 and not self._held
        for engine in self.engines:
            engine.begin(sync=sync)

    def _forget(self) -> None:
        """Make room for a new window."""
        self._window = None
        self._stepped.clear()
        self._holding.clear()
        self._is_counted = False
        self._is_broken = False
        for phase in self._phases:
            phase.reset()
        if self.scaler is not None and self._unscaled:
            self.scaler.update()
            self._unscaled.clear()

    def _start_phase(self) -> None:
        """Go on after a step within a scope: what comes is for the next optimizer, as in the scopes before."""
        self._is_phase_over = False
        number = 1 + self._phases.index(self._phase)
        if number == len(self._phases):
            self._phases.append(self._new_phase())
        self._phase = self._phases[number]

    def _new_phase(self) -> Phase:
        return Phase(Totals(self._run.control, device=self._run.device))

    def _learn(self) -> None:
        """Remember how many backwards a scope has before it is left or stepped: the next ones can count on it."""
        self._usual_backwards = self._backwards
        self._backwards = 0

    def _check_source(self, stepper: Stepper) -> None:
        """Refuse gradients that no backward() of ours has made: nothing is known of their scale."""
        is_inside_window = self._window is not None and self._window.form is not None and not self._phase.is_agreed
        if not is_inside_window and stepper.has_gradients():
            raise TrainingStepError(
                "optimizer.step() found gradients, and accelerator.backward() was not called for them",
                hint="call accelerator.backward(loss) in place of loss.backward(), and step once after it",
            )

    def _apply(self, stepper: Stepper, engines: Sequence[Engine]) -> bool | Tensor:
        """Step, and return whether weights stayed as they were. Reads the device at most once."""
        run, phase = self._run, self._phase
        if self.scaler is not None:
            self.unscale(stepper)
        if phase.factor != 1.0:
            phase.scale(engines)
        if self.scaler is None and run.non_finite == "ignore":
            stepper.step()
            return False
        norm = phase.norm_of(stepper)
        if self.scaler is None and run.non_finite == "skip" and stepper.has_device_skip:
            found_inf = torch.isfinite(norm).logical_not().float()
            stepper.step(found_inf=found_inf)
            return found_inf
        is_finite = math.isfinite(norm.item())
        if is_finite:
            stepper.step()
        if self.scaler is not None:
            self._reference = reference_for(phase.items)
        if not is_finite and run.non_finite == "raise":
            self._raise_unless_overflow(norm)
        return not is_finite

    def _raise_unless_overflow(self, norm: Tensor) -> None:
        """Stop, unless only the loss scale was too large."""
        loss = self._phase.loss
        if self.scaler is not None and (loss is None or bool(torch.isfinite(loss))):
            return
        shown = "unknown" if loss is None else f"{loss.item():g}"
        raise NonFiniteError(
            f"update {self._run.control.updates}: the gradient is not finite (norm {norm.item():g}, loss {shown}); "
            "weights are those of the update before",
            hint="look for the cause in this batch, or leave such updates out with --non_finite skip",
        )

    def _report(self, stepper: Stepper, *, skipped: bool | Tensor) -> None:
        """Leave what `last_update` is made from; nobody asks for it in most steps."""
        step, phase, lr = self._run.control.updates, self._phase, stepper.optimizer.param_groups[0]["lr"]
        lr = lr.clone() if isinstance(lr, Tensor) else lr
        self._run.last = step, phase.loss, phase.items, phase.norm, skipped, lr
