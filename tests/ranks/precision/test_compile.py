"""torch.compile of a model, before `prepare` and after it: compiled, and the same numbers as without."""

from __future__ import annotations

import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Accelerator
from drivetrain.testing import ranks

When = Literal["never", "before", "after"]
Setting = Literal["no", "bf16"]
COUNTS = (1, 2)
UPDATES = 3
MICRO_STEPS = 2
NUM_LAYERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Losses of all updates, weights at the end, and the linear layers in what was compiled."""

    losses: list[float]
    weights: Tensor
    num_compiled_layers: int


class Backend:
    """Compiles with torch's `aot_eager`, and counts the linear layers that it is given."""

    def __init__(self) -> None:
        self.num_layers = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        from torch._dynamo import lookup_backend

        self.num_layers += sum(node.target is torch._C._nn.linear for node in graph.graph.nodes)
        return lookup_backend("aot_eager")(graph, inputs)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, items: Tensor) -> dict[str, Tensor]:
        return {"output": self.second(self.first(items).tanh())}


def train(when: When, precision: Setting, *, backend: Any) -> tuple[list[float], Tensor]:
    torch._dynamo.reset()
    model: Any = Net()
    data = torch.randn(UPDATES, MICRO_STEPS, 8, 8)
    losses = []
    with Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=MICRO_STEPS) as accelerator:
        if when == "before":
            model = torch.compile(model, backend=backend)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        model, optimizer = accelerator.prepare(model, optimizer)
        if when == "after":
            model = torch.compile(model, backend=backend)
        share = slice(accelerator.process_index, None, accelerator.num_processes)
        for rows in data.flatten(0, 1):
            with accelerator.accumulate():
                output = model(rows[share])["output"]
                assert output.dtype is torch.float32
                assert not torch.is_autocast_enabled("cpu")
                accelerator.backward(output.square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and accelerator.last_update is not None:
                losses.append(accelerator.last_update.loss.item())
        return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train_in_every_way() -> dict[tuple[When, Setting], Trace]:
    whens: tuple[When, ...] = ("never", "before", "after")
    precisions: tuple[Setting, ...] = ("no", "bf16")
    traces = {}
    for when in whens:
        for precision in precisions:
            backend = Backend()
            losses, weights = train(when, precision, backend=backend)
            traces[when, precision] = Trace(losses=losses, weights=weights, num_compiled_layers=backend.num_layers)
    return traces


@pytest.fixture(scope="module")
def traces() -> dict[int, list[dict[tuple[When, Setting], Trace]]]:
    """What ranks got, by number of ranks and by rank."""
    return {count: ranks.run(train_in_every_way, ranks=count, timeout=100) for count in COUNTS}


def check_same(trace: Trace, expected: Trace, *, tolerance: float) -> None:
    assert trace.losses == pytest.approx(expected.losses, rel=tolerance)
    difference = (trace.weights - expected.weights).norm() / expected.weights.norm()
    assert difference.item() < tolerance


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_model_trains_as_the_plain_one_does(
    traces: dict[int, list[dict[tuple[When, Setting], Trace]]], count: int, precision: Setting, when: When
) -> None:
    plain = traces[1][0]["never", precision]
    for one in traces[count]:
        trace = one[when, precision]
        assert trace.num_compiled_layers == NUM_LAYERS, "all of the model is compiled, once"
        assert len(trace.losses) == UPDATES
        check_same(trace, traces[count][0]["never", precision], tolerance=1e-6)  # the same kernels in the same order
        assert torch.equal(trace.weights, traces[count][0][when, precision].weights), "ranks hold the same weights"
        # Ranks add up their shares in another order: in fp32 a rounding, in bf16 one of the 8 bits of an activation.
        check_same(trace, plain, tolerance=1e-5 if precision == "no" else 2.0**-8)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("when", ["never", "before", "after"])
def test_compiled_model_computes_in_bf16_where_that_is_asked_for(
    traces: dict[int, list[dict[tuple[When, Setting], Trace]]], count: int, when: When
) -> None:
    exact, rounded = (traces[count][0][when, precision].weights for precision in ("no", "bf16"))
    difference = ((exact - rounded).norm() / exact.norm()).item()
    assert 2.0**-16 < difference < 2.0**-6  # rounding to 8 bits shows, and no more than that


def train_with_inductor() -> list[tuple[list[float], Tensor]]:
    from torch._inductor import config

    # One process, no vector instructions to try out, no headers to compile beforehand: a third of the time.
    quick = {
        "compile_threads": 1,
        "cpp.vec_isa_ok": False,
        "cpp_cache_precompile_headers": False,
        "fx_graph_cache": False,
    }
    with config.patch(quick):
        return [train(when, "no", backend="inductor") for when in ("never", "before")]


def missing_for_inductor() -> str | None:
    """Return what inductor needs to build its kernels and does not find; None if all is there."""
    if not any(map(shutil.which, ("g++", "clang++"))):
        return "a C++ compiler (g++ or clang++)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python.h, the headers of this Python"
    return None


@pytest.mark.skipif(missing_for_inductor() is not None, reason=f"inductor needs {missing_for_inductor()}")
def test_model_compiled_by_inductor_trains_as_the_plain_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    [(plain, compiled)] = ranks.run(train_with_inductor, ranks=1, timeout=110)
    # Fused kernels round in other places: a few units of 2**-24 per operation.
    assert compiled[0] == pytest.approx(plain[0], rel=1e-5)
    assert torch.allclose(compiled[1], plain[1], rtol=1e-5, atol=1e-6)
    assert any(tmp_path.rglob("*.so")), "inductor has built a kernel"
