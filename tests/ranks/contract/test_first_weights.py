"""Training starts from what rank 0 has, also where the others have built something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Accelerator
from drivetrain.testing import ranks
from topologies import Topology, two_ranks


def built_on(rank: int, *, is_trained: bool) -> nn.Module:
    """Return a model whose parameters and buffers are those of one rank."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).requires_grad_(is_trained)
    model[1].running_mean.fill_(float(rank))
    return model


def prepared_state(settings: dict[str, Any], *, is_trained: bool) -> dict[str, Tensor]:
    with Accelerator(**settings) as accelerator:
        model = accelerator.prepare(built_on(accelerator.process_index, is_trained=is_trained))
        return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@two_ranks
@pytest.mark.parametrize("is_trained", [True, False])
def test_weights_when_ranks_have_built_unlike_ones_then_are_those_of_rank_0(
    topology: Topology, is_trained: bool
) -> None:
    expected = built_on(0, is_trained=is_trained).state_dict()
    assert not torch.equal(expected["0.weight"], built_on(1, is_trained=is_trained).state_dict()["0.weight"])
    for state in ranks.run(prepared_state, topology.settings, is_trained=is_trained, ranks=2):
        assert state.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(state[name], expected[name])] == []
