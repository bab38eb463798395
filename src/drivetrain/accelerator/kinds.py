"""What the accelerator was given: sorting objects by kind, and refusing what it cannot take."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum, auto
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from drivetrain.accelerator.optimizer import PreparedOptimizer, PreparedScheduler
from drivetrain.cluster.control import Call, Control
from drivetrain.data import PreparedLoader
from drivetrain.errors import PrepareError, RankMismatchError, TrainingStepError

_TAKEN = "prepare() takes models, optimizers, data loaders and learning rate schedulers of torch"

_WRAP_DATA = "wrap data in a torch.utils.data.DataLoader"
# By name: to import them all, to see whether somebody used one, takes half a second.
_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"})


class Kind(Enum):
    """The kinds of object that `prepare` takes."""

    MODEL = auto()
    OPTIMIZER = auto()
    LOADER = auto()
    SCHEDULER = auto()


def kind_of(value: object, *, position: int) -> Kind:
    """Return what an argument of `prepare` is.

    Args:
        position: of the argument, from 1, for the message.

    Raises:
        PrepareError: it is none of the kinds.
    """
    kind = _find_kind(value)
    if kind is None:
        raise PrepareError(f"argument {position} of prepare() is {_described(value)}", hint=_advice(value))
    return kind


def check_model(model: nn.Module) -> None:
    """Refuse a model that cannot be trained or was spread out already.

    Raises:
        PrepareError: it has no parameters, or is wrapped.
    """
    for name, module in model.named_modules():
        _check_no_wrapper(module, name=name, model=model)
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):
            raise PrepareError(
                f"{name} is a DTensor: the model was spread over ranks already, by fully_shard(), by another "
                "Accelerator or in another way",
                hint="build the model again and pass it as it is; prepare() spreads it out as the settings ask",
            )
        if isinstance(parameter, UninitializedParameter) or parameter.device.type == "meta":
            raise PrepareError(
                f"{name} of {type(model).__name__} has no values yet",
                hint="run one batch through a lazy model, or load a model from the meta device, before prepare()",
            )
    if next(model.parameters(), None) is None:
        raise PrepareError(
            f"{type(model).__name__} has no parameters, so there is nothing to train",
            hint="leave it out of prepare(), and move it with .to(accelerator.device) if needed",
        )


def loss_from(value: object) -> Tensor:
    """Return a loss as a 0-d tensor, refusing what has no gradient, before any rank waits for it.

    Raises:
        TrainingStepError: it is no tensor of one element, or depends on no parameter.
    """
    if not isinstance(value, Tensor):
        hint = "pass its `loss`" if hasattr(value, "loss") else "pass a tensor of one element"
        raise TrainingStepError(f"backward() takes a loss, and was given {_described(value)}", hint=hint)
    if value.numel() != 1:
        raise TrainingStepError(
            f"backward() takes a loss of one element, and was given a tensor of shape {tuple(value.shape)}",
            hint="take its mean, or its sum with `num_items`",
        )
    if not value.requires_grad:
        raise TrainingStepError(
            "the loss given to backward() depends on no parameter that is trained",
            hint="compute it from the model's output, outside torch.no_grad()",
        )
    return value.reshape(())


def check_limit(limit: object) -> None:
    """Refuse a limit that gradients cannot be clipped to.

    Raises:
        TrainingStepError: it is no number of 0 or more.
    """
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
        raise TrainingStepError(f"gradients cannot be clipped to {limit!r}", hint="give a number of 0 or more")


def check_norm_type(norm_type: object) -> None:
    """Refuse what is no kind of norm.

    Raises:
        TrainingStepError: it is no number above 0.
    """
    if isinstance(norm_type, bool) or not isinstance(norm_type, int | float) or not norm_type > 0:
        raise TrainingStepError(
            f"norm_type={norm_type!r} is no kind of norm", hint="give a number above 0, such as 2.0 or math.inf"
        )


def compare_models(models: Sequence[nn.Module], control: Control) -> None:
    """Compare what ranks are about to prepare; collective.

    Raises:
        RankMismatchError: names, shapes, dtypes or what is trained differ.
    """
    lines = [_described_parameter(*named) for model in models for named in model.named_parameters()]
    if control.all_equal(Call.PREPARE, "\n".join(lines)):
        return
    by_rank = control.exchange(lines)
    rows = enumerate(zip_longest(*by_rank, fillvalue="nothing more"))
    first = next(row for _, row in rows if len(set(row)) > 1)
    raise RankMismatchError(
        "ranks gave unlike models to prepare(), first in:"
        + "".join(f"\n  rank {rank}: {line}" for rank, line in enumerate(first)),
        hint="build the same models in the same order on every rank",
    )


def check_owner(value: Any, owner: object) -> None:
    """Refuse what another accelerator has prepared.

    Raises:
        PrepareError: it belongs to another accelerator.
    """
    if value.owner is not owner:
        raise PrepareError(
            f"this {type(_given(value)).__name__} was prepared by another Accelerator",
            hint="give each accelerator the objects that it has not seen, and keep one accelerator per training",
        )


def _find_kind(value: object) -> Kind | None:
    if isinstance(value, nn.Module):
        return Kind.MODEL
    if isinstance(value, Optimizer):
        return Kind.OPTIMIZER
    if isinstance(value, DataLoader | PreparedLoader):
        return Kind.LOADER
    if isinstance(value, LRScheduler | PreparedScheduler):
        return Kind.SCHEDULER
    return None


def _check_no_wrapper(module: nn.Module, *, name: str, model: nn.Module) -> None:
    """Refuse a module that stands for one on several ranks; `name` is its name in the model, empty for that itself."""
    if type(module).__module__.startswith("drivetrain."):
        raise PrepareError(
            f"{name} of {type(model).__name__} was prepared already, as a model of its own"
            if name
            else "this model was prepared by another Accelerator, or by this one before free_memory()",
            hint="pass the model as it was before prepare(), which unwrap_model() of the Accelerator that prepared it "
            "returns",
        )
    for ancestor in type(module).__mro__:
        if ancestor.__name__ in _WRAPPERS and ancestor.__module__.startswith("torch."):
            place = f"{name} of {type(model).__name__}" if name else "the model"
            raise PrepareError(
                f"{place} is wrapped in {ancestor.__name__} already",
                hint="pass the model itself; prepare() wraps it as the settings ask",
            )


def _given(value: Any) -> object:
    """Return what `prepare` was given where it returned this."""
    if isinstance(value, PreparedOptimizer):
        return value.optimizer
    return value.scheduler if isinstance(value, PreparedScheduler) else value.loader


def _described_parameter(name: str, parameter: nn.Parameter) -> str:
    kind = str(parameter.dtype).removeprefix("torch.")
    return f"{name} {kind}{list(parameter.shape)}{'' if parameter.requires_grad else ' frozen'}"


def _described(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}, not an object of it"
    if inspect.isgenerator(value):
        return f"a generator, made by {value.__name__}()"
    if isinstance(value, Iterator):
        return "an iterator"  # its class is an inner one of torch, of python or of ours
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _advice(value: object) -> str:
    """Return what to do in place of giving this to `prepare`."""
    if value is None:
        return f"leave out what there is none of; {_TAKEN}"
    if isinstance(value, type):
        return f"pass {value.__name__}(...)"
    if isinstance(value, str | bytes):
        return f"pass the object itself, not its name or path; {_TAKEN}"
    if isinstance(value, Tensor):
        return "move tensors with .to(accelerator.device)"
    if isinstance(value, Iterator) or inspect.isroutine(value):
        return _advice_on_maker(value)
    if isinstance(value, Mapping):
        return _advice_on_items(value.values(), unpacked="prepare(*objects.values())")
    if isinstance(value, list | tuple | set | frozenset):
        return _advice_on_items(value, unpacked="prepare(*objects)")
    if isinstance(value, Dataset) or (hasattr(value, "__getitem__") and hasattr(value, "__len__")):
        return _WRAP_DATA
    return _TAKEN


def _advice_on_items(items: Collection[object], *, unpacked: str) -> str:
    if any(_find_kind(item) for item in items):
        return f"pass the objects one by one: {unpacked}"
    if any(isinstance(item, nn.Parameter) for item in items):
        return "pass the model that has these parameters, and the optimizer that steps them"
    return _WRAP_DATA


def _advice_on_maker(value: object) -> str:
    """Return what to do in place of giving a function or an iterator."""
    if getattr(value, "__name__", "") in ("parameters", "named_parameters"):
        return "pass the model itself, and the optimizer that was built from its parameters"
    if isinstance(value, Iterator):
        return f"pass the data loader itself, and iterate over what prepare() returns for it; {_TAKEN}"
    return f"where it makes what is to be prepared, pass what it returns; {_TAKEN}"
