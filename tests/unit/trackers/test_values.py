"""What may be logged, and what becomes of it."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drivetrain.errors import TrackerError
from drivetrain.trackers.values import flat_configuration, plain_configuration, plain_values
from host_reads import READS, counted_reads


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (3, 3),
        (True, True),
        (0.1, 0.1),
        (None, None),
        ("text", "text"),
        (np.float32(0.5), 0.5),
        (np.float64(0.1), 0.1),
        (np.int64(-7), -7),
        (np.bool_(True), True),
        (np.array([2.5]), 2.5),
        (Fraction(1, 4), 0.25),
        (torch.tensor(2.5), 2.5),
        (torch.tensor([[7]]), 7),
        (torch.tensor(2**62 + 1), 2**62 + 1),  # a float64 would lose the 1
        (torch.tensor(True), True),
        (torch.tensor(0.1, dtype=torch.float64), 0.1),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor(0.5, dtype=torch.float16), 0.5),
        (torch.tensor(200, dtype=torch.uint8), 200),
        (torch.ones((), requires_grad=True) * 2, 2.0),
        (torch.arange(10.0)[3::7][:1], 3.0),  # a stride of 7
        (torch.tensor([1 + 2j]).conj().imag, -2.0),  # negated only when it is read
    ],
)
def test_value_when_it_is_one_number_or_text_then_it_becomes_plain_exactly(value: object, plain: object) -> None:
    result = plain_values({"key": value})["key"]
    assert (type(result), result) == (type(plain), plain)


@pytest.mark.parametrize("number", [math.inf, -math.inf])
def test_value_when_it_is_infinite_then_it_stays_infinite(number: float) -> None:
    assert plain_values({"a": number, "b": torch.tensor(number)}) == {"a": number, "b": number}


def test_value_when_it_is_nan_then_it_stays_nan() -> None:
    plain = plain_values({"a": math.nan, "b": torch.tensor(math.nan), "c": np.float32(math.nan)})
    assert all(isinstance(value, float) and math.isnan(value) for value in plain.values())


def test_values_of_many_types_when_logged_then_keep_their_order_and_come_with_one_read_of_the_device() -> None:
    dtypes = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.float64, torch.float32, torch.uint8]
    values: dict[str, Any] = {
        f"v{number}": torch.tensor(number % 2, dtype=dtype) for number, dtype in enumerate(dtypes)
    }
    values["text"] = "between"
    values["last"] = torch.tensor(5.0)
    with counted_reads() as reads:
        plain = plain_values(values)
    assert list(plain.items()) == [
        *((f"v{number}", number % 2) for number in range(len(dtypes))),
        ("text", "between"),
        ("last", 5.0),
    ]
    by_method = {name: sum(n for place, n in reads.items() if place.startswith(f"{name} at ")) for name in READS}
    # The rest looks at the copy on the host, once per type.
    assert by_method == {**dict.fromkeys(READS, 0), "cpu": 1, "tolist": len(set(dtypes))}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int16])
def test_values_when_small_types_come_first_then_all_are_read_exactly(dtype: torch.dtype) -> None:
    values = {"small": torch.tensor(True), "large": torch.tensor(3, dtype=dtype), "next": torch.tensor(False)}
    assert plain_values(values) == {"small": True, "large": 3, "next": False}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(3), r"'loss' cannot be logged: it is a tensor of shape \[3\]"),
        (torch.zeros(0), r"a tensor of shape \[0\]"),
        (torch.zeros((), device="meta"), "meta device"),
        (torch.tensor(1j), "complex64"),
        ([1.0, 2.0], "'loss' cannot be logged: it is a list"),
        (np.zeros(2), "it is a ndarray"),
        ({"a": 1}, "'loss/a'"),
        (object(), "it is a object"),
        (1 + 2j, "it is a complex"),
    ],
)
def test_value_when_it_cannot_be_logged_then_the_error_names_key_and_type(value: object, words: str) -> None:
    with pytest.raises(TrackerError, match=words):
        plain_values({"fine": 1, "loss": value})


def test_values_when_they_have_no_names_then_are_refused() -> None:
    unnamed: Any = torch.tensor(1.0)
    with pytest.raises(TrackerError, match="takes values by name, and got a Tensor"):
        plain_values(unnamed)
    with pytest.raises(TrackerError, match="the key 3, a int"):
        plain_values({3: 1.0})  # type: ignore[dict-item]


def test_configuration_when_it_holds_objects_then_their_text_is_stored() -> None:
    given = {"lr": 0.1, "betas": (0.9, 0.99), "path": Path("a") / "b", "deep": {"dtype": torch.bfloat16, 1: None}}
    plain = plain_configuration(given)
    assert plain == {"lr": 0.1, "betas": [0.9, 0.99], "path": "a/b", "deep": {"dtype": "torch.bfloat16", "1": None}}
    assert isinstance(plain, dict)
    assert flat_configuration(plain) == {
        "lr": 0.1,
        "betas": "[0.9, 0.99]",
        "path": "a/b",
        "deep.dtype": "torch.bfloat16",
        "deep.1": "None",
    }


def test_tensor_when_it_is_a_parameter_then_it_is_read_without_its_graph() -> None:
    weight = torch.nn.Parameter(torch.tensor([4.0]))
    assert plain_values({"w": weight}) == {"w": 4.0}
    assert isinstance(weight, Tensor)
    assert weight.grad is None
