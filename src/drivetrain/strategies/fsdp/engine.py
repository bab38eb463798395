"""One model under FSDP2: `fully_shard` on its units and on itself, and what the facade needs beyond that.

Torch gathers a unit's parameters before its forward and its backward, and spreads the sum of the ranks' gradients
right after the backward, adding to what was spread before. Where a backward may not do so the whole gradients stay on
the rank; `synchronize` then spreads them as the end of a backward would.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from drivetrain.cluster.control import Call
from drivetrain.cluster.meeting import Meeting
from drivetrain.cluster.tree import tensors_in
from drivetrain.errors import PrepareError, TrainingStepError
from drivetrain.precision.autocast import as_float32
from drivetrain.strategies.common import StrategyContext, class_name, forward_method
from drivetrain.strategies.fsdp.gradients import scale_gradients
from drivetrain.strategies.fsdp.watch import UnitWatch
from drivetrain.strategies.units import Units


class FSDPEngine:
    """A model of whose every parameter this rank holds a part.

    Attributes:
        module: the user's own model, whose units and itself are now modules of torch's FSDP.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Units,
        context: StrategyContext,
        *,
        mesh: DeviceMesh,
        reshards: bool,
        watch: UnitWatch | None,
    ) -> None:
        self.module = module.to(context.device)
        self.prepared: nn.Module = module
        self._control = context.ranks.control
        self._watch = watch
        self._meeting = None if watch else Meeting(context.ranks.control, device=context.device)
        self._precision = context.precision
        self._is_dirty = False
        self._syncs: bool | None = None
        self._depth = 0
        self._modes = contextlib.ExitStack()
        self._is_broken = False
        self._keeps_graph = False
        self._copy_from_rank_0()
        # Torch warns of that, at each start of most language models; here it is looked after.
        warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \(FSDP{class_name(module)}\) returned a view")
        self._shard(units, mesh=mesh, reshards=reshards)
        self._sharded_modules = [part for part in module.modules() if isinstance(part, FSDPModule)]
        names = {part: name for name, part in module.named_modules()}
        groups = {names[part]: cast(Any, part._get_fsdp_state())._fsdp_param_group for part in self._sharded_modules}
        groups = {name: group for name, group in groups.items() if group is not None}
        self._pieces: list[Any] = [piece for group in groups.values() for piece in group.fsdp_params]
        self._trained = [bool(piece.sharded_param.requires_grad) for piece in self._pieces]
        self._handles = self._hook(units)
        if watch is not None:
            for name, group in groups.items():
                watch.watch(group, name=name or class_name(module), keeps_graph=lambda: self._keeps_graph)

    # The engine protocol

    def begin(self, *, sync: bool) -> None:
        """Let the next backwards spread gradients, or not."""
        if self._depth:
            # No forward is on here: torch calls no hook at the end of one that an interrupt has ended.
            self._depth = 0
            self._is_broken = True
            self._modes.close()
        if sync is not self._syncs:
            self._syncs = sync
            self._root.set_requires_gradient_sync(sync)

    def after_backward(self) -> None:
        """Note whether a backward has left gradients that are not spread.

        Torch forgets to spread where the output was a view and was changed in place: whole gradients are left then.
        """
        self._is_dirty = not self._syncs or any(_gradients_of(piece)[1] is not None for piece in self._pieces)

    def break_off(self) -> None:
        """Note that an exception has ended a backward."""
        self._is_broken = True

    def synchronize(self) -> None:
        """Spread the gradients that backwards have left whole on this rank; collective if there are any."""
        if not self._is_dirty:
            return
        self._is_dirty = False
        self.begin(sync=True)
        # What torch runs at the end of every backward: it spreads what a unit has, and leaves the others alone.
        cast(Any, self._root._get_fsdp_state())._root_post_backward_final_callback()

    def has_whole_gradients(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether a backward, also one that nobody told of, has left gradients that are not spread."""
        found = (_gradients_of(piece)[1:] for piece in self._pieces_of(parameters))
        return any(gradient is not None for gradients in found for gradient in gradients)

    def drop_whole_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Forget gradients of these parameters that are not spread."""
        for piece in self._pieces_of(parameters):
            _set_gradients(piece, (piece.sharded_param.grad, None, None))

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients in place."""
        scale_gradients(self.module.parameters(), factor)

    def gradient_marks(self) -> list[tuple[int, int] | None]:
        """Return what tells whether a backward has come to this model: it changes some of these."""
        found = [gradient for piece in self._pieces for gradient in _gradients_of(piece)]
        return [None if gradient is None else (id(gradient), gradient._version) for gradient in found]

    @contextlib.contextmanager
    def contribute_nothing(self) -> Iterator[None]:
        """Make backwards in this context leave zeros: they take part in what is collective, and add nothing.

        Zeros take the place of what arrives at a parameter, so that inf and NaN on the way do not matter.
        """
        whole = [piece._unsharded_param for piece in self._pieces if hasattr(piece, "_unsharded_param")]
        handles = [parameter.register_hook(torch.zeros_like) for parameter in whole if parameter.requires_grad]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def drop_gradients(self) -> None:
        """Forget all gradients, spread or not."""
        for piece in self._pieces:
            _set_gradients(piece, (None, None, None))
        self._is_dirty = False

    @contextlib.contextmanager
    def keep_gradients(self) -> Iterator[None]:
        """Leave the gradients as they are, whatever backward runs in this context."""
        kept = [(piece, _gradients_of(piece)) for piece in self._pieces]
        for piece, _ in kept:
            _set_gradients(piece, (None, None, None))
        try:
            yield
        finally:
            for piece, gradients in kept:
                _set_gradients(piece, gradients)

    def forward_method(self, name: str) -> Callable[..., Any]:
        """Make a method of the model gather parameters as a forward does, and return it."""
        return forward_method(self.module, name, prepared=self.module)

    def state_dict(self) -> dict[str, Tensor]:
        """Return all parameters and persistent buffers whole, under the model's own names; collective."""
        self._control.agree(Call.STATE)
        whole: dict[int, Tensor] = {}
        state: dict[str, Tensor] = {}
        for name, value in self.module.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor):
                # Tied weights are one tensor under several names, and stay so.
                if id(value) not in whole:
                    own = value.detach()
                    whole[id(value)] = own.full_tensor() if isinstance(own, DTensor) else own
                state[name.replace("_orig_mod.", "")] = whole[id(value)]
        return state

    def close(self) -> None:
        """Take our hooks off the model; it stays sharded."""
        for handle in self._handles:
            handle.remove()

    def _pieces_of(self, parameters: Iterable[nn.Parameter]) -> Iterator[Any]:
        chosen = {id(parameter) for parameter in parameters}
        return (piece for piece in self._pieces if id(piece.sharded_param) in chosen)

    # Making it

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module

    @torch.no_grad()
    def _copy_from_rank_0(self) -> None:
        for name, parameter in self.module.named_parameters():
            if parameter.dim() == 0:
                raise PrepareError(
                    f"{name} of {class_name(self.module)} is a parameter without dimensions, which has no parts to "
                    "spread over ranks",
                    hint="give it the shape (1,)",
                )
            if parameter.numel() == 0:
                raise PrepareError(
                    f"{name} of {class_name(self.module)} has no elements (shape {tuple(parameter.shape)}), and torch "
                    "cannot spread it over ranks",
                    hint="leave it out of the model",
                )
            parameter.data = parameter.data.contiguous()
        if self._control.world_size > 1:
            for value in self.module.parameters():
                dist.broadcast(value, src=0)
            for buffer in self.module.buffers():
                whole = buffer.contiguous()
                dist.broadcast(whole, src=0)
                buffer.copy_(whole)

    def _shard(self, units: Units, *, mesh: DeviceMesh, reshards: bool) -> None:
        dtype = self._precision.compute_dtype
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
        self._check_units(units)
        for unit in units.modules:
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
        fully_shard(self.module, mesh=mesh, mp_policy=policy, reshard_after_forward=None if reshards else False)

    def _check_units(self, units: Units) -> None:
        """Refuse what a unit cannot hold.

        A weight that two units share, or a unit and the rest: each would hold a copy of its own. Parameters of unlike
        types: a unit travels as one piece.
        """
        homes: dict[nn.Module, nn.Module] = {}
        for unit in units.modules:
            for part in unit.modules():
                homes.setdefault(part, unit)
        owners: dict[int, nn.Module] = {}
        dtypes: dict[nn.Module, torch.dtype] = {}
        for part in self.module.modules():
            home = homes.get(part, self.module)
            for name, parameter in part.named_parameters(recurse=False):
                owner = owners.setdefault(id(parameter), home)
                if owner is not home:
                    raise PrepareError(
                        f"{name} of {class_name(part)} is shared by {self._named(owner)} and {self._named(home)}",
                        hint="name other classes as units, such that modules with shared weights lie in one or in none",
                    )
                if dtypes.setdefault(home, parameter.dtype) != parameter.dtype:
                    raise PrepareError(
                        f"{class_name(home)} has parameters of {dtypes[home]} and of {parameter.dtype} "
                        f"({name} of {class_name(part)}), and is gathered as one piece",
                        hint="give all parameters of a unit one type, or name classes as units that have one each",
                    )

    def _named(self, unit: nn.Module) -> str:
        return "the rest of the model" if unit is self.module else class_name(unit)

    # Watching forwards

    def _hook(self, units: Units) -> list[Any]:
        """Hook the root's forward, and whatever cannot run outside of it."""
        handles: list[Any] = [
            self.module.register_forward_pre_hook(self._enter_forward, prepend=True),
            self.module.register_forward_hook(self._leave_forward, always_call=True),
        ]
        guarded = set(units.modules)
        inside = {part for unit in units.modules for part in unit.modules()}
        guarded.update(
            part
            for part in self.module.modules()
            if part is not self.module and part not in inside and next(part.parameters(recurse=False), None) is not None
        )
        handles += [part.register_forward_pre_hook(self._check_inside, prepend=True) for part in guarded]
        return [*handles, self.module.register_load_state_dict_pre_hook(_cut_values)]

    def _enter_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        del module, inputs
        self._depth += 1
        if self._depth > 1:
            return
        if self._watch is not None:
            self._watch.begin_pass(Call.FORWARD)
        if self._meeting is not None:
            self._meeting.hold(Call.FORWARD)
        self._recover()
        self._keeps_graph = torch.is_grad_enabled()
        if torch.is_inference_mode_enabled():
            # Torch keeps what it gathers into for later passes, which may need gradients.
            self._modes.enter_context(torch.inference_mode(False))
            self._modes.enter_context(torch.no_grad())
        for number, piece in enumerate(self._pieces):
            # After a forward without a backward the model shows whole parameters: the user may have frozen those.
            is_shown_whole = piece.sharded_state.name == "UNSHARDED"
            if is_shown_whole and piece._unsharded_param.requires_grad is not self._trained[number]:
                piece.sharded_param.requires_grad_(not self._trained[number])
            self._trained[number] = piece.sharded_param.requires_grad
        self.reshard()

    def _leave_forward(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        del module, inputs
        self._depth -= 1
        if self._meeting is not None:
            self._meeting.end()
        if self._depth == 0:
            if not any(tensor.requires_grad for tensor in tensors_in(output)):
                # Torch keeps parameters whole for the backward, and none comes.
                self.reshard()
            self._modes.close()
        return output if self._precision.compute_dtype is None else as_float32(output)

    def _recover(self) -> None:
        """Bring torch's records in order after a pass that was broken off by an exception; gradients stay."""
        context = cast(Any, self._root._get_fsdp_state())._state_ctx
        if self._is_broken or context.iter_forward_root is not None:
            self._is_broken = False
            with self.keep_gradients():
                self._root.reset_iter_state()

    def reshard(self) -> None:
        """Let go of whole parameters; after a step they are those of before it."""
        for part in self._sharded_modules:
            part.reshard()

    def _check_inside(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        del inputs
        # A checkpointed block runs once more in the middle of a backward.
        if self._depth == 0 and torch._C._current_graph_task_id() == -1:
            raise TrainingStepError(
                f"{class_name(module)} ran outside the forward of {class_name(self.module)}, whose parameters "
                "are spread over ranks and are gathered there",
                hint="call the model itself; to run another of its methods, use "
                "accelerator.forward_method(model, 'name_of_the_method')",
            )


def _cut_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Put this rank's part in the place of each whole value that is loaded into a sharded parameter."""
    for name, parameter in module.named_parameters(prefix=prefix.removesuffix("."), remove_duplicate=False):
        value, own = state_dict.get(name), parameter.data
        if not isinstance(own, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == own.shape:
            whole = value.to(own.device)
            state_dict[name] = distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)


def _gradients_of(piece: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients that torch keeps for a parameter: spread, whole, and whole in the dtype of reduction."""
    whole = getattr(piece, "_unsharded_param", None)
    return piece.sharded_param.grad, None if whole is None else whole.grad, piece.unsharded_accumulated_grad


def _set_gradients(piece: Any, gradients: Sequence[Tensor | None]) -> None:
    piece.sharded_param.grad, whole_gradient, piece.unsharded_accumulated_grad = gradients
    if hasattr(piece, "_unsharded_param"):
        piece._unsharded_param.grad = whole_gradient
