"""Scopes, windows, clipping, policies and what is refused, on one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.errors import ConfigError, NonFiniteError, PrepareError, TrainingStepError
from scalar import Scalar, loader


def trained(accelerator: Accelerator, *, lr: float = 1.0) -> tuple[Any, Any]:
    model = Scalar()
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))


def one(value: float = 1.0) -> torch.Tensor:
    return torch.tensor([value])


# Windows


def test_steps_inside_a_window_do_nothing() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer = trained(accelerator)
    seen = []
    for _ in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(one()).mean())
            clipped = accelerator.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
            seen.append((accelerator.sync_gradients, clipped is not None, model.weight.item(), accelerator.step))
    inside, at_end = (False, False), (True, True)
    assert [entry[:2] for entry in seen] == [inside, inside, at_end] * 2
    assert [entry[2] for entry in seen] == [0, 0, -1, -1, -1, -2]
    assert [entry[3] for entry in seen] == [0, 0, 1, 1, 1, 2]


def test_zero_grad_first_in_the_scope_keeps_the_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    for value in (1.0, 3.0, 5.0, 7.0):
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(model(one(value)).mean())
            optimizer.step()
    assert model.weight.item() == -(1 + 3) / 2 - (5 + 7) / 2


def test_step_after_the_scope_works_as_inside() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    weights = []
    for value in (1.0, 3.0, 5.0, 7.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(one(value)).mean())
        optimizer.step()
        optimizer.zero_grad()
        weights.append(model.weight.item())
    assert weights == [0, -2, -2, -8]


def test_window_of_the_epoch_before_goes_on_when_the_loop_was_broken_off() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    batches = accelerator.prepare(loader([1.0, 2.0, 3.0, 4.0, 5.0], batch_size=1))
    for _ in range(2):
        for number, batch in enumerate(batches):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
            if number == 2:
                break
    # 1 2 | 3 1 | 2 3
    assert model.weight.item() == -(1.5 + 2 + 2.5)


def test_evaluation_inside_a_window_disturbs_nothing() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer = trained(accelerator)
    train, test = accelerator.prepare(loader([1.0] * 6, batch_size=1), loader([9.0] * 3, batch_size=2))
    weights = []
    for batch in train:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            model.eval()
            with torch.no_grad():
                for rows in test:
                    model(rows)
            model.train()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.item())
    assert weights == [0, 0, 0, -1, -1, -2]


def test_zip_of_two_loaders_ends_the_window_with_the_first() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    first, second = accelerator.prepare(loader([1.0] * 3, batch_size=1), loader([1.0] * 9, batch_size=1))
    weights = []
    for left, right in zip(first, second, strict=False):
        with accelerator.accumulate(model):
            accelerator.backward(model(left).mean() + model(right).mean())
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.item())
    assert weights == [0, -2, -4]


def test_epoch_of_unequal_batches_weighs_every_row_alike() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    for batch in accelerator.prepare(loader([1.0, 2.0, 6.0], batch_size=2)):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
    assert model.weight.item() == pytest.approx(-3.0)
    assert accelerator.last_update.num_items == 3


def test_size_of_windows_can_be_changed_between_them() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = trained(accelerator)
    accelerator.gradient_accumulation_steps = 2
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(one()).mean())
            optimizer.step()
    assert accelerator.step == 1
    with pytest.raises(ConfigError, match="must be 1 or more"):
        accelerator.gradient_accumulation_steps = 0


def test_global_batch_derives_the_window(capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = Accelerator(cpu=True, global_batch_size=6)
    model, optimizer = trained(accelerator)
    for batch in accelerator.prepare(loader([1.0] * 12, batch_size=2)):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.step == 2
    assert accelerator.gradient_accumulation_steps == 3
    err = capsys.readouterr().err
    assert "1 rank on cpu" in err
    assert "global batch 6 = 2 per micro-batch x 1 rank x 3 accumulation steps" in err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"global_batch_size": 7}, "is no multiple of 2 = 2 per micro-batch x 1 ranks"),
        ({"global_batch_size": 1}, "is no multiple of 2"),
        ({"global_batch_size": 6, "gradient_accumulation_steps": 2}, "makes 3 accumulation steps"),
    ],
)
def test_global_batch_that_does_not_divide_is_refused(settings: dict[str, int], message: str) -> None:
    accelerator = Accelerator(cpu=True, **settings)
    model, _ = trained(accelerator)
    for batch in accelerator.prepare(loader([1.0] * 4, batch_size=2)):
        with pytest.raises(ConfigError, match=message), accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
        break


def test_global_batch_without_a_loader_is_refused() -> None:
    accelerator = Accelerator(cpu=True, global_batch_size=6)
    model, _ = trained(accelerator)
    with pytest.raises(ConfigError, match="no prepared loader says how many rows"), accelerator.accumulate(model):
        accelerator.backward(model(one()).mean())


# Without accumulate


def test_steps_without_accumulate_work() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = trained(accelerator)
    for value in (1.0, 3.0):
        optimizer.zero_grad()
        accelerator.backward(model(one(value)).mean())
        optimizer.step()
    assert model.weight.item() == -4
    assert accelerator.step == 2


def test_losses_between_two_steps_add_up_without_accumulate() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = trained(accelerator)
    for _ in range(2):
        accelerator.backward(model(one(2.0)).mean())
        accelerator.backward(model(one(3.0)).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert model.weight.item() == -10


def test_gradients_thrown_away_without_accumulate_leave_no_trace() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = trained(accelerator)
    accelerator.backward(model(one(math.inf)).mean())
    optimizer.zero_grad()
    accelerator.backward(model(one(3.0)).mean())
    optimizer.step()
    assert model.weight.item() == -3
    assert accelerator.last_update.loss.item() == 0


def test_step_without_accumulate_is_refused_when_a_window_is_asked_for() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer = trained(accelerator)
    accelerator.backward(model(one()).mean())
    with pytest.raises(TrainingStepError, match="4 micro-batches per step are asked for"):
        optimizer.step()


def test_step_on_gradients_of_no_backward_of_ours_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = trained(accelerator)
    model(one()).mean().backward()
    with pytest.raises(TrainingStepError, match=r"accelerator.backward\(\) was not called"):
        optimizer.step()


def test_step_without_gradients_does_nothing() -> None:
    accelerator = Accelerator(cpu=True)
    _, optimizer = trained(accelerator)
    optimizer.step()
    assert accelerator.step == 0


def test_step_under_no_sync_alone_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = trained(accelerator)
    with accelerator.no_sync(model):
        accelerator.backward(model(one()).mean())
    with pytest.raises(TrainingStepError, match="never reduced over ranks"):
        optimizer.step()
    accelerator.backward(model(one()).mean())
    optimizer.step()
    assert model.weight.item() == -2


# What is refused


def test_backward_outside_the_scope_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model, _ = trained(accelerator)
    with accelerator.accumulate(model):
        loss = model(one()).mean()
    with pytest.raises(TrainingStepError, match=r"backward\(\) outside accumulate\(\)"):
        accelerator.backward(loss)


def test_scope_inside_itself_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model, _ = trained(accelerator)
    with (
        pytest.raises(TrainingStepError, match="entered again"),
        accelerator.accumulate(model),
        accelerator.accumulate(model),
    ):
        pass


def test_model_in_two_tuples_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model, other = accelerator.prepare(Scalar(), Scalar())
    with accelerator.accumulate(model):
        pass
    with pytest.raises(TrainingStepError, match="together with others"):
        accelerator.accumulate(model, other)


def test_accumulate_of_a_stranger_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(PrepareError, match="Scalar is not a model that this accelerator has prepared"):
        accelerator.accumulate(Scalar())


def test_both_forms_of_backward_in_a_window_are_refused() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, _ = trained(accelerator)
    with accelerator.accumulate(model):
        accelerator.backward(model(one()).mean())
    with pytest.raises(TrainingStepError, match="given a sum in a window"), accelerator.accumulate(model):
        accelerator.backward(model(one()).sum(), num_items=1)


def test_closure_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    _, optimizer = trained(accelerator)
    with pytest.raises(TrainingStepError, match=r"step\(closure\)"):
        optimizer.step(lambda: 0.0)


def test_clipping_of_strangers_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(PrepareError, match="belong to no model"):
        accelerator.clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)


def test_backward_between_clipping_and_step_is_refused_until_the_update_is_left_out() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = trained(accelerator)
    with accelerator.accumulate(model):
        accelerator.backward(model(one(5.0)).mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(TrainingStepError, match="clipped or unscaled"), accelerator.accumulate(model):
        accelerator.backward(model(one(3.0)).mean())
    optimizer.zero_grad()
    with accelerator.accumulate(model):
        accelerator.backward(model(one(3.0)).mean())
        optimizer.step()
    assert model.weight.item() == -3


# Sums, clipping, unscaling


def test_update_without_items_is_left_out() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Scalar(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.zeros(0)).sum(), num_items=0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert model.weight.item() == 1.0
    assert optimizer.param_groups[0]["lr"] == 0.1
    update = accelerator.last_update
    assert (update.loss, update.num_items, update.skipped) == (None, 0, True)
    assert accelerator.optimizer_step_was_skipped


def test_count_may_be_a_tensor() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = trained(accelerator)
    accelerator.backward(model(torch.tensor([1.0, 3.0])).sum(), num_items=torch.tensor(2))
    optimizer.step()
    assert model.weight.item() == -2


@pytest.mark.parametrize("form", ["mean", "sum"])
@pytest.mark.parametrize("covers_all", [True, False])
def test_norm_is_that_of_the_update_and_is_clipped_once(form: str, covers_all: bool) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.ModuleDict({"left": Scalar(), "right": Scalar(), "other": Scalar()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    chosen = [
        *model["left"].parameters(),
        *model["right"].parameters(),
        *(model["other"].parameters() if covers_all else ()),
    ]
    for left, right in ((2.0, 1.0), (4.0, 7.0)):  # means 3 and 4
        with accelerator.accumulate(model):
            loss = model["left"](one(left)).sum() + model["right"](one(right)).sum()
            if not covers_all:
                loss = loss + model["other"](one(2.0)).sum()
            accelerator.backward(loss, num_items=None if form == "mean" else 1)
            norm = accelerator.clip_grad_norm_(chosen, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert norm.shape == ()
    assert norm.item() == pytest.approx(5.0)
    assert accelerator.last_update.grad_norm is norm
    assert model["left"].weight.item() == pytest.approx(-0.6, abs=1e-5)
    assert model["right"].weight.item() == pytest.approx(-0.8, abs=1e-5)
    if not covers_all:
        assert model["other"].weight.item() == pytest.approx(-2.0)


def test_gradient_is_final_after_unscaling() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    for value in (1.0, 5.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(one(value)).sum(), num_items=2)
            accelerator.unscale_gradients(optimizer)
            gradient = model.weight.grad.item()
            optimizer.step()
    assert gradient == 1.5
    assert model.weight.item() == -1.5


def test_two_optimizers_of_one_model_step_the_same_update() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.ModuleDict({"left": Scalar(), "right": Scalar()})
    optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in model.values()]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    for value in (1.0, 3.0, 5.0, 7.0):
        with accelerator.accumulate(model):
            accelerator.backward((model["left"](one(value)) + 10 * model["right"](one(value))).sum(), num_items=1)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert [part.weight.item() for part in model.values()] == [-8, -80]
    assert accelerator.step == 2


def test_two_models_in_one_scope_step_in_turn() -> None:
    accelerator = Accelerator(cpu=True)
    generator, critic = Scalar(1.0), Scalar(1.0)
    generator, critic, for_generator, for_critic = accelerator.prepare(
        generator,
        critic,
        torch.optim.SGD(generator.parameters(), lr=1.0),
        torch.optim.SGD(critic.parameters(), lr=1.0),
    )
    for _ in range(2):
        with accelerator.accumulate(generator, critic):
            for_critic.zero_grad()
            accelerator.backward(critic(generator(one()).detach()).mean())
            for_critic.step()
            for_generator.zero_grad()
            accelerator.backward(critic(generator(one())).mean())
            for_generator.step()
    # c1 = 1 - 1 = 0, g1 = 1 - 0 = 1; c2 = 0 - 1 = -1, g2 = 1 + 1 = 2: the critic's step sees its own loss alone.
    assert (generator.weight.item(), critic.weight.item()) == (2.0, -1.0)
    assert accelerator.step == 2


# Gradients that are not finite


def losses(accelerator: Accelerator, model: Any, optimizer: Any, values: list[float]) -> list[float]:
    seen = []
    for value in values:
        with accelerator.accumulate(model):
            accelerator.backward(model(one(value)).mean() + 1)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(accelerator.last_update.loss.item())
    return seen


def test_non_finite_gradient_ends_the_run_by_default() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = trained(accelerator, lr=0.5)
    with pytest.raises(NonFiniteError, match=r"update 3: the gradient is not finite \(norm nan, loss nan\)"):
        losses(accelerator, model, optimizer, [1.0, 1.0, math.nan, 1.0])
    assert model.weight.item() == -1.0
    update = accelerator.last_update
    assert update.step == 3
    assert math.isnan(update.loss.item())
    assert update.skipped is True


@pytest.mark.parametrize("clips", [True, False])
def test_non_finite_gradient_is_seen_with_and_without_clipping(clips: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = trained(accelerator)
    accelerator.backward(model(one(math.inf)).mean())
    if clips:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(NonFiniteError):
        optimizer.step()
    assert model.weight.item() == 0


def test_updates_that_are_not_finite_are_left_out_and_counted() -> None:
    accelerator = Accelerator(cpu=True, non_finite="skip")
    model = Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    seen = []
    for value in (1.0, math.nan, math.inf, 1.0):
        accelerator.backward(model(one(value)).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append((model.weight.item(), accelerator.optimizer_step_was_skipped, scheduler.last_epoch))
    assert seen == [(-0.5, False, 1), (-0.5, True, 1), (-0.5, True, 1), (-1.0, False, 2)]
    assert accelerator.num_skipped_steps == 2


def test_fused_optimizer_skips_on_the_device_and_the_schedule_goes_on() -> None:
    accelerator = Accelerator(cpu=True, non_finite="skip")
    model = Scalar()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    weights = []
    for value in (1.0, math.nan, 1.0):
        accelerator.backward(model(one(value)).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        weights.append(model.weight.item())
    assert weights[0] == weights[1] != weights[2]
    assert isinstance(accelerator.num_skipped_steps, torch.Tensor)
    assert accelerator.num_skipped_steps.item() == 1
    assert scheduler.last_epoch == 3
    assert optimizer.state[model.weight]["step"].item() == 2
    assert not hasattr(optimizer.optimizer, "found_inf")


def test_policy_ignore_goes_on() -> None:
    accelerator = Accelerator(cpu=True, non_finite="ignore")
    model, optimizer = trained(accelerator)
    seen = losses(accelerator, model, optimizer, [1.0, math.nan, 1.0])
    assert math.isnan(seen[1])
    assert math.isnan(model.weight.item())


# Loaders


def test_rows_are_never_read_twice_over_epochs() -> None:
    accelerator = Accelerator(cpu=True, seed=3)
    rows = TensorDataset(torch.arange(7))
    batches = accelerator.prepare(DataLoader(rows, batch_size=3, shuffle=True))
    orders = [[row for (batch,) in batches for row in batch.tolist()] for _ in range(2)]
    assert [sorted(order) for order in orders] == [list(range(7))] * 2
    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (torch.ones(2, requires_grad=True), r"a tensor of shape \(2,\)"),
        (torch.ones(()), "depends on no parameter"),
        (1.5, "was given a float"),
    ],
)
def test_loss_that_has_no_gradient_is_refused(loss: Any, message: str) -> None:
    accelerator = Accelerator(cpu=True)
    trained(accelerator)
    with pytest.raises(TrainingStepError, match=message):
        accelerator.backward(loss)


def test_loss_of_shape_one_is_logged_without_it() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = trained(accelerator)
    accelerator.backward(model(one()))
    optimizer.step()
    assert accelerator.last_update.loss.shape == ()


@pytest.mark.parametrize("count", ["3", torch.tensor([3, 4]), None.__class__])
def test_count_of_a_wrong_kind_is_refused(count: Any) -> None:
    accelerator = Accelerator(cpu=True)
    model, _ = trained(accelerator)
    with pytest.raises(TrainingStepError, match="is not a count"):
        accelerator.backward(model(one()).sum(), num_items=count)


@pytest.mark.parametrize("limit", [-1.0, float("nan"), "x", None])
def test_limit_of_a_wrong_kind_is_refused(limit: Any) -> None:
    accelerator = Accelerator(cpu=True)
    model, _ = trained(accelerator)
    for clip in (accelerator.clip_grad_norm_, accelerator.clip_grad_value_):
        with pytest.raises(TrainingStepError, match="cannot be clipped"):
            clip(model.parameters(), limit)


def test_gradients_left_over_are_refused_where_they_would_be_scaled() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    for number in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(one()).sum(), num_items=2)
            if number < 3:
                optimizer.step()
    with pytest.raises(TrainingStepError, match="were not cleared"):
        optimizer.step()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = trained(accelerator)
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(one()).sum(), num_items=2)
            optimizer.step()
            if accelerator.sync_gradients:
                model.zero_grad()
    assert model.weight.item() == -1.0


def test_gradients_left_over_once_are_forgotten_when_they_are_cleared() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = trained(accelerator)
    weights = []
    for number in range(4):
        with accelerator.accumulate(model):
            # One item on one process: nothing is left to scale, so gradients that were not cleared add up as in torch.
            accelerator.backward(model(one()).sum(), num_items=1)
            optimizer.step()
            if number != 0:
                optimizer.zero_grad()
        weights.append(model.weight.item())
        accelerator.gradient_accumulation_steps = 1 if number < 1 else 2
    assert weights == [-1.0, -3.0, -3.0, -4.0]
