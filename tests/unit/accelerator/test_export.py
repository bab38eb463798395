"""The file that `save_model` writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drivetrain.accelerator.export import write_weights


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run under a umask."""
    earlier = os.umask(request.param)
    yield request.param
    os.umask(earlier)


def test_file_when_written_then_its_mode_is_that_of_any_other_file(tmp_path: Path, umask: int) -> None:
    weights = {"weight": torch.arange(3.0)}
    for _ in range(2):
        path = write_weights(weights, tmp_path / "model")
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    assert [path.name for path in path.parent.iterdir()] == ["model.safetensors"]
    assert torch.equal(load_file(path)["weight"], weights["weight"])
