"""Padding of one tensor, and what it cannot be padded with."""

from __future__ import annotations

import pytest
import torch

from drivetrain.cluster.padding import padded, padding_problem


@pytest.mark.parametrize(
    ("dim", "size", "first", "expected"),
    [
        (0, 3, False, [[1, 2], [3, 4], [9, 9]]),
        (0, 3, True, [[9, 9], [1, 2], [3, 4]]),
        (1, 4, False, [[1, 2, 9, 9], [3, 4, 9, 9]]),
        (-1, 3, True, [[9, 1, 2], [9, 3, 4]]),
        (-2, 3, False, [[1, 2], [3, 4], [9, 9]]),
        (0, 2, False, [[1, 2], [3, 4]]),
        (2, 5, False, [[1, 2], [3, 4]]),
        (-3, 5, False, [[1, 2], [3, 4]]),
    ],
)
def test_tensor_when_padded_then_has_the_fill_where_it_was_short(
    dim: int, size: int, first: bool, expected: list[list[int]]
) -> None:
    tensor = torch.tensor([[1, 2], [3, 4]])
    assert padded(tensor, dim=dim, size=size, fill=9, first=first).tolist() == expected
    assert tensor.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.uint8])
def test_tensor_when_padded_then_keeps_its_dtype_and_graph(dtype: torch.dtype) -> None:
    tensor = torch.ones(0, 2, dtype=dtype).requires_grad_(dtype.is_floating_point)
    result = padded(tensor, dim=0, size=2, fill=1, first=False)
    assert torch.equal(result, torch.ones(2, 2, dtype=dtype))
    assert result.requires_grad == dtype.is_floating_point


@pytest.mark.parametrize(
    ("dtype", "fill", "is_held"),
    [
        (torch.int64, -100, True),
        (torch.int64, 2.0, True),
        (torch.int64, 0.5, False),
        (torch.int64, float("nan"), False),
        (torch.int64, 2**70, False),
        (torch.uint8, -100, False),
        (torch.float32, float("-inf"), True),
        (torch.bfloat16, 0.1, True),
        (torch.bool, False, True),
        (torch.float32, "0", False),
        (torch.float32, None, False),
    ],
)
def test_fill_when_the_dtype_cannot_hold_it_then_is_a_problem(dtype: torch.dtype, fill: object, is_held: bool) -> None:
    problem = padding_problem({"x": [torch.ones(2).to(dtype)]}, dim=0, fill=fill)
    assert (problem is None) == is_held
    if problem is not None:
        assert f"pad_index={fill!r} is no value of {str(dtype).removeprefix('torch.')}" in str(problem)


@pytest.mark.parametrize("dim", [None, "1", 0.0, True])
def test_dim_when_it_is_no_whole_number_then_is_a_problem(dim: object) -> None:
    assert "is no dim of a tensor" in str(padding_problem(torch.ones(1), dim=dim, fill=0))
