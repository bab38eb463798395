"""Ranks that part ways inside a sharded model: an error within seconds says who was where, and no weights mix."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Accelerator
from drivetrain.testing import ranks
from scalar import whole

SETTINGS = {"distributed_type": "FSDP", "cpu": True}
SECONDS = 10.0

pytestmark = pytest.mark.deadline(60)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.outer(torch.tanh(self.inner(rows)))


class Net(nn.Module):
    """Blocks and two heads; what a forward runs is told from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.heads = nn.ModuleDict({"left": nn.Linear(4, 1), "right": nn.Linear(4, 1), "wide": nn.Linear(4, 3)})
        self.order = [0, 1, 2]
        self.uses = ["left"]

    def forward(self, rows: Tensor) -> Tensor:
        for number in self.order:
            rows = self.blocks[number](rows)
        return torch.cat([self.heads[name](rows) for name in self.uses], dim=1)


def build() -> Net:
    torch.manual_seed(5)
    return Net()


def rows_of(rank: int) -> Tensor:
    return torch.arange(8.0).view(2, 4) / (3 + rank)


class Run:
    """A prepared training and its step."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.rank = accelerator.process_index
        self.plain = build()
        self.model, self.optimizer = accelerator.prepare(self.plain, torch.optim.SGD(self.plain.parameters(), lr=0.1))

    def loss(self) -> Tensor:
        return self.model(rows_of(self.rank)).square().mean()

    def step(self, loss: Tensor | None = None) -> None:
        self.accelerator.backward(self.loss() if loss is None else loss)
        self.optimizer.step()
        self.optimizer.zero_grad()


def raise_in(module: nn.Module) -> Any:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    return module.register_forward_pre_hook(fail)


def raise_in_backward(loss: Tensor) -> Tensor:
    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    twice = loss * 2
    twice.register_hook(fail)
    return twice * 1


def skip_a_block(run: Run) -> None:
    run.plain.order = [0, 1, 2] if run.rank else [0, 2]


def skip_unlike_blocks(run: Run) -> None:
    run.plain.order = [0, 1] if run.rank else [0, 2]


def skip_the_last_block(run: Run) -> None:
    run.plain.order = [0, 1, 2] if run.rank else [0, 1]


def run_a_block_twice(run: Run) -> None:
    run.plain.order = [0, 1, 2] if run.rank else [0, 1, 1, 2]


def use_unlike_heads(run: Run) -> None:
    run.plain.uses = ["left"] if run.rank else ["right"]


def use_a_further_head(run: Run) -> None:
    run.plain.uses = ["left"] if run.rank else ["left", "wide"]


def freeze_on_one_rank(run: Run) -> None:
    run.plain.blocks[1].requires_grad_(run.rank == 0)


def evaluate_on_one_rank(run: Run) -> None:
    with torch.no_grad() if run.rank else contextlib.nullcontext():
        run.model(rows_of(0))


def catch_in_a_forward_on_one_rank(run: Run) -> None:
    if run.rank == 0:
        handle = raise_in(run.plain.blocks[1])
        with contextlib.suppress(ZeroDivisionError):
            run.loss()
        handle.remove()


def catch_in_a_backward_on_one_rank(run: Run) -> None:
    loss = run.loss()
    if run.rank == 0:
        with contextlib.suppress(ZeroDivisionError):
            run.accelerator.backward(raise_in_backward(loss))
        run.optimizer.zero_grad()
    else:
        run.accelerator.backward(loss)


def take_a_constant_loss_on_one_rank(run: Run) -> None:
    loss = run.loss()
    run.step(loss if run.rank else torch.zeros((), requires_grad=True) * 1)


def go_backward_raw_on_one_rank(run: Run) -> None:
    loss = run.loss()
    if run.rank == 0:
        loss.backward()
    else:
        run.model(rows_of(0))


BRANCHES = [
    skip_a_block,
    skip_unlike_blocks,
    skip_the_last_block,
    run_a_block_twice,
    use_unlike_heads,
    use_a_further_head,
    freeze_on_one_rank,
    evaluate_on_one_rank,
    catch_in_a_forward_on_one_rank,
    catch_in_a_backward_on_one_rank,
    take_a_constant_loss_on_one_rank,
    go_backward_raw_on_one_rank,
]


def part_ways(branch: Callable[[Run], None]) -> None:
    with Accelerator(**SETTINGS) as accelerator:
        run = Run(accelerator)
        run.step()
        branch(run)
        run.step()
        run.step()


@pytest.mark.parametrize("branch", BRANCHES, ids=lambda branch: branch.__name__)
def test_ranks_when_they_part_ways_in_a_model_then_each_says_where_all_were(branch: Callable[[Run], None]) -> None:
    with pytest.raises(ranks.RanksFailed) as failed:
        ranks.run(part_ways, branch, ranks=2, timeout=SECONDS)
    raised = failed.value.exceptions
    assert set(raised) == {0, 1}
    for kind, message in raised.values():
        assert kind == "RankMismatchError"
        assert "\n  rank 0: " in message
        assert "\n  rank 1: " in message


def mix_blocks_late() -> None:
    with Accelerator(**SETTINGS) as accelerator:
        run = Run(accelerator)
        for _ in range(5):
            run.step()
        skip_unlike_blocks(run)
        run.step()
        run.step()


def test_blocks_when_they_mix_after_many_updates_then_are_found_in_the_next_pass() -> None:
    with pytest.raises(ranks.RanksFailed) as failed:
        ranks.run(mix_blocks_late, ranks=2, timeout=SECONDS)
    assert set(failed.value.exceptions) == {0, 1}
    for kind, message in failed.value.exceptions.values():
        assert kind == "RankMismatchError"
        assert "different parts of a sharded model in the last pass" in message


# What looks odd and is alike on all ranks


def look_between(run: Run) -> None:
    for _ in range(2):
        run.accelerator.backward(run.loss())
        run.model(rows_of(7))
        run.optimizer.step()
        run.optimizer.zero_grad()


def look_in_inference_mode(run: Run) -> None:
    for _ in range(2):
        with torch.inference_mode():
            assert not run.model(rows_of(7)).requires_grad
        run.step()


def look_and_read_after_the_step(run: Run) -> None:
    for _ in range(2):
        run.accelerator.backward(run.loss())
        run.model(rows_of(7))
        run.optimizer.step()
        shown = {name: whole(value.detach()) for name, value in run.plain.named_parameters()}
        state = run.accelerator.get_state_dict(run.model)
        assert all(torch.equal(shown[name], state[name]) for name in shown)
        run.optimizer.zero_grad()


def follow_a_frozen_copy(run: Run) -> None:
    target = run.accelerator.prepare(build().requires_grad_(False))
    for _ in range(2):
        assert not target(rows_of(7)).requires_grad
        with torch.no_grad():
            for value in target.parameters():
                value.mul_(0.5)
        run.step()
    assert torch.allclose(
        run.accelerator.get_state_dict(target)["heads.left.bias"], build().heads["left"].bias / 4, atol=1e-7
    )


def interrupt_a_forward(run: Run) -> None:
    handle = run.plain.blocks[1].register_forward_pre_hook(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        run.loss()
    handle.remove()
    run.optimizer.zero_grad()
    look_between(run)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def break_off_a_backward(run: Run) -> None:
    for number in range(3):
        loss = run.loss()
        if number == 1:
            with contextlib.suppress(ZeroDivisionError):
                run.accelerator.backward(raise_in_backward(loss))
            run.optimizer.zero_grad()
        else:
            run.step(loss)


def break_off_an_evaluation_inside_a_window(run: Run) -> None:
    run.accelerator.gradient_accumulation_steps = 2
    for number in range(4):
        with run.accelerator.accumulate(run.model):
            run.step()
        if number % 2 == 0:
            handle = raise_in(run.plain.blocks[1])
            with contextlib.suppress(ZeroDivisionError), torch.no_grad():
                run.model(rows_of(7))
            handle.remove()


def trained(odd: Callable[[Run], None]) -> dict[str, Tensor]:
    with Accelerator(**SETTINGS) as accelerator:
        run = Run(accelerator)
        odd(run)
        return accelerator.get_state_dict(run.model)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "odd",
    [
        look_between,
        look_in_inference_mode,
        look_and_read_after_the_step,
        follow_a_frozen_copy,
        interrupt_a_forward,
        break_off_a_backward,
        break_off_an_evaluation_inside_a_window,
    ],
    ids=lambda odd: odd.__name__,
)
def test_weights_when_something_odd_is_done_on_all_ranks_then_are_those_of_plain_torch(
    num_ranks: int, odd: Callable[[Run], None]
) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for rank in range(num_ranks):
            (model(rows_of(rank)).square().mean() / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks.run(trained, odd, ranks=num_ranks, timeout=SECONDS):
        for name, value in model.state_dict().items():
            assert torch.allclose(found[name], value, atol=1e-6), name


def clip_what_was_gathered() -> None:
    with Accelerator(**SETTINGS) as accelerator:
        run = Run(accelerator)
        loss = run.loss()
        parameters = list(run.model.parameters())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(parameters, 0.1)


def test_clipping_when_parameters_were_taken_between_forward_and_backward_then_is_an_error() -> None:
    with pytest.raises(ranks.RanksFailed, match="belong to no model that this accelerator has prepared"):
        ranks.run(clip_what_was_gathered, ranks=2, timeout=SECONDS)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("Adafactor", {}, "Adafactor does not work on sharded parameters"),
        ("Rprop", {}, "Rprop does not work on sharded parameters"),
        ("SGD", {"lr": 0.1, "fused": True}, "SGD with `fused=True` does not work"),
    ],
)
def test_optimizer_when_it_needs_whole_parameters_then_is_refused(
    kind: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ranks.RanksFailed, match=message):
        ranks.run(prepare_with, kind, options, ranks=1, timeout=SECONDS)


def prepare_with(kind: str, options: dict[str, Any]) -> None:
    with Accelerator(**SETTINGS) as accelerator:
        model = build()
        accelerator.prepare(model, getattr(torch.optim, kind)(model.parameters(), **options))
