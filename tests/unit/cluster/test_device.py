"""Which device a rank gets, for any number of accelerators that a machine may have."""

from __future__ import annotations

import pytest
import torch

from drivetrain.cluster.device import Placement, activate, choose_device, num_accelerators
from drivetrain.errors import TopologyError

CPU = torch.device("cpu")


def test_choose_device_when_cpu_is_asked_for_is_the_cpu_whatever_is_there() -> None:
    for count in (0, 1, 8):
        placement = choose_device(use_cpu=True, local_rank=1, local_world_size=2, device_count=count)
        assert placement == Placement(device=CPU, reason="`use_cpu`")


def test_choose_device_when_there_is_no_accelerator_is_the_cpu_and_says_so() -> None:
    placement = choose_device(use_cpu=False, local_rank=3, local_world_size=4, device_count=0)
    assert placement == Placement(device=CPU, reason="no accelerator found")


@pytest.mark.parametrize(("ranks", "count"), [(1, 1), (1, 8), (8, 8)])
def test_choose_device_when_there_are_enough_gives_each_rank_its_own(ranks: int, count: int) -> None:
    placements = [
        choose_device(use_cpu=False, local_rank=rank, local_world_size=ranks, device_count=count)
        for rank in range(ranks)
    ]
    assert [placement.device.index for placement in placements] == list(range(ranks))
    assert {placement.device.type for placement in placements}.isdisjoint({"cpu"})
    assert {placement.reason for placement in placements} == {f"{count} found"}


@pytest.mark.parametrize("rank", [0, 2])
def test_choose_device_when_there_are_fewer_than_ranks_is_an_error_on_every_rank(rank: int) -> None:
    with pytest.raises(TopologyError) as refused:
        choose_device(use_cpu=False, local_rank=rank, local_world_size=3, device_count=2)
    assert refused.value.message == "3 ranks on this machine need 3 accelerators, 2 found"
    assert refused.value.hint == "launch with --num_processes 2 per machine, or with --cpu"


def test_choose_device_when_the_count_is_not_given_asks_torch() -> None:
    placement = choose_device(use_cpu=False, local_rank=0, local_world_size=1)
    assert (placement.device.type == "cpu") == (num_accelerators() == 0)
    assert num_accelerators() == (torch.accelerator.device_count() if torch.accelerator.is_available() else 0)


def test_activate_when_device_is_the_cpu_does_nothing() -> None:
    activate(CPU)
