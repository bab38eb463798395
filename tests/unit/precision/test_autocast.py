"""Autocast by hooks: on inside the forward alone, whatever happens there, and the model stays what it was."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drivetrain.precision import AutocastHooks
from drivetrain.precision.autocast import as_float32

HALF = (torch.bfloat16, torch.float16)
every_half = pytest.mark.parametrize("dtype", HALF, ids=str)


class Probe(nn.Module):
    """A layer that notes what it computes in, and does in its forward what it is told to."""

    def __init__(self, do: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.do = do
        self.seen: list[tuple[bool, torch.dtype]] = []

    def forward(self, items: Tensor) -> Any:
        result = self.linear(items)
        self.seen.append((torch.is_autocast_enabled("cpu"), result.dtype))
        return result if self.do is None else self.do(result)


@dataclasses.dataclass
class Output:
    loss: Tensor
    logits: Tensor


def is_autocast_on() -> bool:
    return torch.is_autocast_enabled("cpu")


@contextmanager
def hooked(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> Iterator[AutocastHooks]:
    hooks = AutocastHooks(model, device_type="cpu", dtype=dtype)
    try:
        yield hooks
    finally:
        hooks.remove()
    assert not is_autocast_on()


@every_half
def test_forward_computes_in_the_dtype_and_returns_float32(dtype: torch.dtype) -> None:
    model = Probe()
    with hooked(model, dtype):
        output = model(torch.ones(2, 4))
        assert not is_autocast_on()
    assert model.seen == [(True, dtype)]
    assert output.dtype is torch.float32


def test_model_when_hooked_is_the_same_object_with_the_same_forward_and_state() -> None:
    model = Probe()
    names, attributes = list(model.state_dict()), set(vars(model))
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with hooked(model):
        model(torch.ones(2, 4)).sum().backward()
        assert set(vars(model)) == attributes
        assert model.forward.__func__ is Probe.forward
        assert list(model.state_dict()) == names
        for name, value in model.state_dict().items():
            assert value.dtype is torch.float32
            assert torch.equal(value, values[name])
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype is torch.float32


def test_remove_takes_off_every_hook() -> None:
    model = Probe()
    with hooked(model):
        assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert not model._forward_hooks_always_called
    assert model(torch.ones(2, 4)).dtype is torch.float32
    assert model.seen == [(False, torch.float32)]


def test_autocast_when_the_forward_raises_is_off_and_on_again_next_time() -> None:
    def fail(result: Tensor) -> Tensor:
        raise ValueError(f"in the forward, in {result.dtype}")

    model = Probe(fail)
    with hooked(model):
        for _ in range(2):
            with pytest.raises(ValueError, match=r"in the forward, in torch\.bfloat16"):
                model(torch.ones(2, 4))
            assert not is_autocast_on()
        model.do = None
        model(torch.ones(2, 4))
    assert model.seen == [(True, torch.bfloat16)] * 3


@pytest.mark.parametrize("comes_first", [True, False])
def test_autocast_when_another_hook_raises_is_off_without_a_word(comes_first: bool) -> None:
    def fail(module: nn.Module, inputs: Any) -> None:
        raise ValueError("in a hook")

    model = Probe()
    with hooked(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        model.register_forward_pre_hook(fail, prepend=comes_first)
        with pytest.raises(ValueError, match="in a hook"):
            model(torch.ones(2, 4))
        assert not is_autocast_on()


def test_remove_when_an_interrupt_has_ended_a_forward_leaves_its_autocast() -> None:
    def interrupt(result: Tensor) -> Tensor:
        raise KeyboardInterrupt

    model = Probe(interrupt)
    hooks = AutocastHooks(model, device_type="cpu", dtype=torch.bfloat16)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 4))
    hooks.remove()
    assert not is_autocast_on()


def test_hooks_of_the_user_run_inside_autocast() -> None:
    seen: list[bool] = []
    model = Probe()
    model.register_forward_pre_hook(lambda *_: seen.append(is_autocast_on()))
    with hooked(model):
        model.register_forward_pre_hook(lambda *_: seen.append(is_autocast_on()))
        model(torch.ones(2, 4))
    assert seen == [True, True]


def test_autocast_when_a_module_calls_itself_lasts_until_the_outermost_forward_ends() -> None:
    model = Probe()

    def call_itself(result: Tensor) -> Tensor:
        if len(model.seen) < 3:
            inner = model(result)
            assert inner.dtype is torch.float32
            result = model.linear(inner)
        assert is_autocast_on()
        return result

    model.do = call_itself
    with hooked(model):
        assert model(torch.ones(2, 4)).dtype is torch.float32
    assert model.seen == [(True, torch.bfloat16)] * 3


def test_autocast_when_modules_are_nested_is_that_of_each_one() -> None:
    inner = Probe()
    outer = Probe(lambda result: outer.linear(inner(result)))
    with hooked(outer, torch.bfloat16), hooked(inner, torch.float16):
        output = outer(torch.ones(2, 4))
    assert outer.seen == [(True, torch.bfloat16)]
    assert inner.seen == [(True, torch.float16)]
    assert output.dtype is torch.float32


def test_autocast_when_it_is_on_outside_stays_on_after_the_forward() -> None:
    model = Probe()
    with hooked(model), torch.autocast("cpu", dtype=torch.float16):
        model(torch.ones(2, 4))
        assert is_autocast_on()
        assert torch.get_autocast_dtype("cpu") is torch.float16


@every_half
def test_outputs_when_nested_become_float32_and_nothing_else_changes(dtype: torch.dtype) -> None:
    half = torch.tensor([0.5, 2.0], dtype=dtype)
    count, wide = torch.tensor([3]), torch.tensor([0.1], dtype=torch.float64)
    result = as_float32({"a": [half, (half, None)], "b": Output(loss=half, logits=wide), "c": count, "d": "text"})
    assert result["a"][0].dtype is result["a"][1][0].dtype is result["b"].loss.dtype is torch.float32
    assert result["a"][0].tolist() == [0.5, 2.0]
    assert result["a"][1][1] is None
    assert type(result["b"]) is Output
    assert result["b"].logits is wide
    assert result["c"] is count
    assert result["d"] == "text"


def test_model_output_when_it_comes_from_a_hooked_model_is_float32_and_of_its_class() -> None:
    from transformers.modeling_outputs import SequenceClassifierOutput

    model = Probe(lambda result: SequenceClassifierOutput(loss=result.sum(), logits=result))
    with hooked(model):
        output = model(torch.ones(2, 4))
    assert type(output) is SequenceClassifierOutput
    assert output.loss.dtype is output.logits.dtype is output["logits"].dtype is torch.float32
    output.loss.backward()
    assert model.linear.weight.grad is not None


class Blocks(nn.Module):
    """Two blocks, their activations kept or computed again in the backward."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))
        self.recomputes = recomputes

    def forward(self, items: Tensor) -> Any:
        for block in self.blocks:
            items = checkpoint(block, items, use_reentrant=False) if self.recomputes else block(items)
        return items


@every_half
def test_activation_checkpointing_inside_gives_bitwise_the_same_gradients(dtype: torch.dtype) -> None:
    gradients = []
    for recomputes in (False, True):
        model = Blocks(recomputes=recomputes)
        with hooked(model, dtype):
            model(torch.linspace(-1, 1, 12).view(3, 4)).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert all(gradient.abs().sum() > 0 for gradient in gradients[0])


def test_copy_of_a_hooked_model_has_hooks_of_its_own() -> None:
    model = Probe()
    with hooked(model):
        other = copy.deepcopy(model)
        assert other(torch.ones(2, 4)).dtype is torch.float32
        assert other.seen == [(True, torch.bfloat16)]
    other(torch.ones(2, 4))
    assert other.seen[1:] == [(True, torch.bfloat16)]
    assert not is_autocast_on()


def test_hooked_model_when_pickled_whole_comes_back_with_its_precision() -> None:
    model = Probe()
    with hooked(model):
        other = pickle.loads(pickle.dumps(model))
    other(torch.ones(2, 4))
    assert other.seen == [(True, torch.bfloat16)]
    assert torch.equal(other.linear.weight, model.linear.weight)
