"""Nested containers: what is gone into, that types are kept, and that both ways through meet the same tensors."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drivetrain.cluster.tree import described, leaves_in, map_tensors, named_leaves, tensors_in


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Output:
    loss: Any
    logits: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Derived:
    """A dataclass with a tensor that its constructor makes itself."""

    double: Any = dataclasses.field(init=False)
    single: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "double", self.single * 2)


class Rows(list[Any]):
    pass


Loose = namedtuple("Loose", ["value"])


def numbered(count: int) -> list[Tensor]:
    return [torch.tensor(number) for number in range(count)]


def plus_ten(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor + 10)


CONTAINERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dict": lambda a, b: {"a": a, "b": b},
    "OrderedDict": lambda a, b: OrderedDict(a=a, b=b),
    "defaultdict": lambda a, b: defaultdict(list, a=a, b=b),
    "UserDict": lambda a, b: UserDict(a=a, b=b),
    "list": lambda a, b: [a, b],
    "subclass of list": lambda a, b: Rows([a, b]),
    "tuple": lambda a, b: (a, b),
    "NamedTuple": Pair,
    "namedtuple": lambda a, b: [Loose(a), Loose(b)],
    "dataclass": Output,
    "nested": lambda a, b: {"a": [(a, Output(loss={"b": Pair(b, None)}))]},
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_map_tensors_keeps_containers_and_comes_to_each_tensor_in_order(name: str) -> None:
    make = CONTAINERS[name]
    one, two = numbered(2)
    value = make(one, two)
    mapped = plus_ten(value)
    assert type(mapped) is type(value)
    assert [tensor.item() for tensor in tensors_in(mapped)] == [10, 11]
    assert repr(mapped) == repr(make(one + 10, two + 10))
    assert list(tensors_in(value)) == [one, two], "the value that was given must stay as it was"


def test_map_tensors_when_value_is_a_tensor_returns_what_the_function_does() -> None:
    assert plus_ten(torch.tensor(1)).item() == 11
    assert map_tensors(torch.tensor(1), str) == "tensor(1)"


@pytest.mark.parametrize("value", [None, 3, 0.5, "text", b"bytes", Output, {1, 2}, SimpleNamespace(a=torch.ones(1))])
def test_map_tensors_when_value_is_no_container_passes_it_on(value: Any) -> None:
    assert plus_ten(value) is value
    assert list(tensors_in(value)) == []
    assert list(leaves_in(value)) == [value]


def test_map_tensors_when_dataclass_derives_a_field_lets_it_do_so_again() -> None:
    value = Derived(single=torch.tensor(1))
    mapped = plus_ten(value)
    assert (mapped.single.item(), mapped.double.item()) == (11, 22)
    assert [tensor.item() for tensor in tensors_in(value)] == [1]


def test_map_tensors_when_value_is_a_model_output_keeps_its_attributes_and_keys() -> None:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    one, two = numbered(2)
    output = CausalLMOutputWithPast(loss=one, logits=two)
    mapped = plus_ten(output)
    assert type(mapped) is CausalLMOutputWithPast
    assert list(mapped) == ["loss", "logits"]
    assert (mapped.loss.item(), mapped["loss"].item(), mapped[0].item()) == (10, 10, 10)
    assert mapped.past_key_values is None
    assert output.loss is one


def test_map_tensors_when_value_is_a_batch_encoding_keeps_its_class() -> None:
    from transformers import BatchEncoding

    mapped = plus_ten(BatchEncoding({"input_ids": torch.tensor([1])}))
    assert type(mapped) is BatchEncoding
    assert mapped["input_ids"].tolist() == [11]


def test_map_tensors_when_a_mapping_cannot_be_written_makes_another_of_its_kind() -> None:
    value = MappingProxyType({"a": torch.tensor(1)})
    mapped = plus_ten(value)
    assert type(mapped) is MappingProxyType
    assert (mapped["a"].item(), value["a"].item()) == (11, 1)


def test_named_leaves_when_nested_tell_the_way_to_each() -> None:
    value = {"a": [1, (Output(loss=2), Pair(3, None))]}
    expected = {"['a'][0]": 1, "['a'][1][0].loss": 2, "['a'][1][0].logits": None, "['a'][1][1][0]": 3}
    assert dict(named_leaves(value)) == {**expected, "['a'][1][1][1]": None}
    assert list(named_leaves(5)) == [("", 5)]


class Silent(UserDict[str, Any]):
    """A container whose own text differs from process to process."""

    def __repr__(self) -> str:
        return object.__repr__(self)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1], 2: (3,)}, "{'a': [_], 2: (_,)}"),
        ((1, Pair(2, [])), "(_, Pair(first=_, second=[]))"),
        (Output(loss=1), "Output(loss=_, logits=_)"),
        (Silent(a=1), "Silent{'a': _}"),
        (OrderedDict(a={}), "OrderedDict{'a': {}}"),
    ],
)
def test_described_when_nested_shows_containers_and_leaves_leaves_to_the_caller(value: Any, text: str) -> None:
    assert described(value, lambda _: "_") == text


LEAVES = st.one_of(st.builds(torch.tensor, st.integers(0, 9)), st.none(), st.integers(), st.text(max_size=2))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Output, inner, inner),
    ),
    max_leaves=8,
)


@given(VALUES)
def test_tensors_in_any_value_are_those_that_map_tensors_comes_to(value: Any) -> None:
    seen: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    assert repr(map_tensors(value, note)) == repr(value)
    listed = list(tensors_in(value))
    assert len(listed) == len(seen)
    assert all(one is other for one, other in zip(listed, seen, strict=True))
    assert [leaf for leaf in leaves_in(value) if isinstance(leaf, Tensor)] == seen
