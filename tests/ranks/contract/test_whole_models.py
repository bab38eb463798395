"""CASES 7 and 10, and methods besides `forward`: what must hold for a model as a whole, however it is spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from drivetrain import Accelerator
from drivetrain.testing import ranks
from scalar import whole
from topologies import Topology, every_topology, two_ranks

SECONDS = 10.0


# Case 7: norm and clipping


class Pair(nn.Module):
    """Two elements in one parameter; the gradient of its output is (3, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self) -> Tensor:
        return (self.weight * torch.tensor([3.0, 4.0])).sum()


def norm_and_clipped(
    settings: dict[str, Any], *, window: int, norm_type: float = 2.0
) -> tuple[float, str, list[float], list[float]]:
    """Return norm, its type, gradient after clipping to 1, and weights after a step."""
    with Accelerator(gradient_accumulation_steps=window, **settings) as accelerator:
        model = Pair()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        norms = []
        for _ in range(window):
            with accelerator.accumulate(model):
                accelerator.backward(model())
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=norm_type))
                if accelerator.sync_gradients:
                    gradient = whole(next(accelerator.unwrap_model(model).parameters()).grad).tolist()
                optimizer.step()
                optimizer.zero_grad()
        *inside, norm = norms
        assert inside == [None] * (window - 1)
        assert norm.dim() == 0
        update = accelerator.last_update
        assert update is not None
        assert update.grad_norm.item() == norm.item()
        weights = accelerator.get_state_dict(model)["weight"].tolist()
        return norm.item(), type(norm).__name__, gradient, weights


@every_topology
@pytest.mark.parametrize("window", [1, 2])
def test_norm_when_elements_lie_on_different_ranks_then_is_that_of_all(topology: Topology, window: int) -> None:
    for norm, kind, gradient, weights in ranks.run(
        norm_and_clipped, topology.settings, window=window, ranks=topology.ranks
    ):
        assert norm == pytest.approx(5.0, abs=1e-6)
        assert kind == "Tensor"
        assert gradient == pytest.approx([0.6, 0.8], abs=1e-5)
        assert weights == pytest.approx([-0.6, -0.8], abs=1e-5)


@every_topology
@pytest.mark.parametrize(("norm_type", "norm"), [(1.0, 7.0), (float("inf"), 4.0)])
def test_norm_when_of_another_type_then_is_that_of_all(topology: Topology, norm_type: float, norm: float) -> None:
    for found, _, gradient, _ in ranks.run(
        norm_and_clipped, topology.settings, window=1, norm_type=norm_type, ranks=topology.ranks
    ):
        assert found == pytest.approx(norm, abs=1e-6)
        assert gradient == pytest.approx([3 / norm, 4 / norm], abs=1e-5)


# Case 10: tied weights


class Tied(nn.Module):
    """An embedding whose weight is the output's too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.output = nn.Linear(4, 8, bias=False)
        self.output.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(torch.tanh(self.table(ids)))


def tied() -> Tied:
    torch.manual_seed(1)
    return Tied()


def batch(rank: int) -> Tensor:
    return (torch.arange(6) * (rank + 2) + rank) % 8


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids[:-1]), ids[1:])


def train_tied_plainly(num_ranks: int) -> tuple[Tensor, Tensor]:
    """Return the first gradient and the weight after three steps over all ranks' batches."""
    model = tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    first = None
    for _ in range(3):
        for rank in range(num_ranks):
            (loss_of(model, batch(rank)) / num_ranks).backward()
        first = model.table.weight.grad.clone() if first is None else first
        optimizer.step()
        optimizer.zero_grad()
    assert first is not None
    return first, model.table.weight.detach()


def train_tied(settings: dict[str, Any], folder: str) -> tuple[int, bool, Tensor, Tensor]:
    with Accelerator(**settings) as accelerator:
        model = tied()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        model, optimizer = accelerator.prepare(model, optimizer)
        first = None
        for _ in range(3):
            accelerator.backward(loss_of(model, batch(accelerator.process_index)))
            accelerator.unscale_gradients(optimizer)
            plain = accelerator.unwrap_model(model)
            first = whole(plain.table.weight.grad).clone() if first is None else first
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_model(model, folder)
        accelerator.wait_for_everyone()
        weight = accelerator.get_state_dict(model)["table.weight"]
        assert first is not None
        return len(list(plain.parameters())), plain.output.weight is plain.table.weight, first, weight


@every_topology
def test_tied_weights_when_trained_then_stay_one_parameter(topology: Topology, tmp_path: Path) -> None:
    gradient, expected = train_tied_plainly(topology.ranks)
    for count, is_one, first, weight in ranks.run(train_tied, topology.settings, str(tmp_path), ranks=topology.ranks):
        assert (count, is_one) == (1, True)
        assert torch.allclose(first, gradient, atol=1e-6)
        assert torch.allclose(weight, expected, atol=1e-6)
    (stored,) = load_file(tmp_path / "model.safetensors").values()
    loaded = tied()
    loaded.table.weight.data.zero_()
    loaded.load_state_dict({"table.weight": stored, "output.weight": stored})
    assert torch.allclose(loaded.output.weight, expected, atol=1e-6)
    assert loaded.output.weight is loaded.table.weight


# Methods besides `forward`


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(rows)))

    def distance(self, rows: Tensor, *, scale: float) -> Tensor:
        """Use the forward twice, and a layer of it alone."""
        return scale * (self(rows) - self(-rows)) + self.first(rows).sum()


def two_ways() -> TwoWays:
    torch.manual_seed(2)
    return TwoWays()


def rows_of(rank: int) -> Tensor:
    return torch.arange(6.0).view(2, 3) * (rank + 1) / 7


def gradients_by_method(settings: dict[str, Any], *, uses_result: bool) -> dict[str, Tensor]:
    with Accelerator(**settings) as accelerator:
        model = two_ways()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        method = accelerator.forward_method(model, "distance")
        for _ in range(2):
            with accelerator.accumulate(model):
                rows = rows_of(accelerator.process_index)
                found = method(rows, scale=2.0) if uses_result else model.distance(rows, scale=2.0)
                optimizer.zero_grad()
                accelerator.backward(found.mean())
                optimizer.step()
        with torch.no_grad():
            assert torch.isfinite(model.distance(rows, scale=1.0)).all()
            assert torch.isfinite(model(rows)).all()
        plain = accelerator.unwrap_model(model)
        return {name: whole(value.grad) for name, value in plain.named_parameters()}


@every_topology
@pytest.mark.parametrize("uses_result", [True, False])
def test_method_when_it_goes_through_the_engine_then_trains_like_a_forward(
    topology: Topology, uses_result: bool
) -> None:
    plain = two_ways()
    for rank in range(topology.ranks):
        (plain.distance(rows_of(rank), scale=2.0).mean() / topology.ranks).backward()
    for found in ranks.run(gradients_by_method, topology.settings, uses_result=uses_result, ranks=topology.ranks):
        for name, value in plain.named_parameters():
            assert torch.allclose(found[name], value.grad, atol=1e-6), name


def misspell_a_method(settings: dict[str, Any]) -> None:
    accelerator = Accelerator(**settings)
    accelerator.forward_method(accelerator.prepare(two_ways()), "distanse")


@two_ranks
def test_method_when_there_is_none_then_the_nearest_is_named(topology: Topology) -> None:
    with pytest.raises(ranks.RanksFailed) as failed:
        ranks.run(misspell_a_method, topology.settings, ranks=2, timeout=SECONDS)
    assert failed.value.exceptions[0] == (
        "PrepareError",
        "TwoWays has no method `distanse`\n  hint: did you mean `distance`?",
    )
