"""`prepare` and what it returns, on one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.accelerator.optimizer import PreparedOptimizer, PreparedScheduler
from drivetrain.errors import ConfigError, PrepareError


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], torch.optim.lr_scheduler.LRScheduler]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(torch.randn(10, 3)), batch_size=2)
    return model, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def test_prepare_in_any_order_returns_that_order(accelerator: Accelerator) -> None:
    model, optimizer, loader, scheduler = parts()
    prepared = accelerator.prepare(scheduler, loader, optimizer, model)
    assert isinstance(prepared[0], PreparedScheduler)
    assert prepared[1].dataset is loader.dataset
    assert isinstance(prepared[2], PreparedOptimizer)
    assert prepared[3] is model


def test_prepare_of_what_is_prepared_returns_it(accelerator: Accelerator) -> None:
    once = accelerator.prepare(*parts())
    assert all(first is second for first, second in zip(once, accelerator.prepare(*once), strict=True))


def test_prepare_of_the_same_originals_returns_the_same(accelerator: Accelerator) -> None:
    model, optimizer, _, scheduler = parts()
    once = accelerator.prepare(model, optimizer, scheduler)
    again = accelerator.prepare(model, optimizer, scheduler)
    assert all(first is second for first, second in zip(once, again, strict=True))


def test_prepare_one_by_one_works_with_the_optimizer_first(accelerator: Accelerator) -> None:
    model, optimizer, _, scheduler = parts()
    optimizer = accelerator.prepare(optimizer)
    scheduler = accelerator.prepare(scheduler)
    model = accelerator.prepare(model)
    before = model.weight.clone()
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_optimizer_is_seen_through(accelerator: Accelerator) -> None:
    model, original, _, _ = parts()
    model, optimizer = accelerator.prepare(model, original)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is original.param_groups
    assert optimizer.defaults is original.defaults
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    assert optimizer.state is original.state
    assert optimizer.state_dict()["state"].keys() == {0, 1}
    optimizer.load_state_dict(original.state_dict())
    extra = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [extra], "lr": 1.0})
    assert original.param_groups[1]["lr"] == 1.0


def test_schedule_built_on_a_prepared_optimizer_works(accelerator: Accelerator) -> None:
    model, optimizer, _, _ = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert scheduler.get_last_lr() == [0.05]


def test_plateau_schedule_gets_its_metric(accelerator: Accelerator) -> None:
    model, optimizer, _, _ = parts()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for metric in (1.0, 2.0):
        accelerator.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        scheduler.step(metric)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_unwrap_returns_the_model(accelerator: Accelerator) -> None:
    model = nn.Linear(2, 2)
    assert accelerator.unwrap_model(accelerator.prepare(model)) is model
    stranger = nn.Linear(2, 2)
    assert accelerator.unwrap_model(stranger) is stranger


def build_model() -> nn.Module:
    return nn.Linear(2, 2)


def own_generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("wrong", "message", "hint"),
    [
        (None, "argument 1 of prepare() is None", "leave out what there is none of"),
        (torch.ones(2), "is a Tensor", ".to(accelerator.device)"),
        ([1, 2, 3], "is a list", "wrap data in a torch.utils.data.DataLoader"),
        (TensorDataset(torch.ones(2)), "is a TensorDataset", "wrap data in a torch.utils.data.DataLoader"),
        (parts()[2].dataset, "is a TensorDataset", "wrap data in a torch.utils.data.DataLoader"),
        (nn.Linear, "is the class Linear, not an object of it", "pass Linear(...)"),
        (torch.optim.AdamW, "is the class AdamW, not an object of it", "pass AdamW(...)"),
        ("model", "is a str", "pass the object itself, not its name or path"),
        (3, "is an int", "prepare() takes models, optimizers"),
        (build_model, "is a function", "pass what it returns"),
        (build_model().parameters, "is a method", "pass the model itself"),
        (build_model().parameters(), "is a generator, made by parameters()", "pass the model itself"),
        (build_model().named_parameters(), "is a generator, made by named_parameters()", "pass the model itself"),
        (own_generator(), "is a generator, made by own_generator()", "pass the data loader itself"),
        (iter(parts()[2]), "is an iterator", "pass the data loader itself"),
        (iter(Accelerator(cpu=True).prepare(parts()[2])), "is an iterator", "pass the data loader itself"),
        (list(parts()[:2]), "is a list", "one by one: prepare(*objects)"),
        (parts(), "is a tuple", "one by one: prepare(*objects)"),
        (set(parts()[:1]), "is a set", "one by one: prepare(*objects)"),
        ({"model": build_model()}, "is a dict", "one by one: prepare(*objects.values())"),
        ({"rows": [1, 2]}, "is a dict", "wrap data in a torch.utils.data.DataLoader"),
        (list(build_model().parameters()), "is a list", "pass the model that has these parameters"),
        ([], "is a list", "DataLoader"),
    ],
)
def test_prepare_of_a_wrong_thing_names_it(accelerator: Accelerator, wrong: object, message: str, hint: str) -> None:
    with pytest.raises(PrepareError) as error:
        accelerator.prepare(wrong)
    assert message in error.value.message
    assert hint in error.value.hint


def test_model_without_parameters_is_refused(accelerator: Accelerator) -> None:
    with pytest.raises(PrepareError, match="Sequential has no parameters"):
        accelerator.prepare(nn.Sequential(nn.ReLU()))


def test_model_in_a_wrapper_of_torch_is_refused(accelerator: Accelerator) -> None:
    with pytest.raises(PrepareError, match="the model is wrapped in DataParallel already"):
        accelerator.prepare(nn.DataParallel(nn.Linear(2, 2)))
    with pytest.raises(PrepareError, match="0 of Sequential is wrapped in DataParallel already"):
        accelerator.prepare(nn.Sequential(nn.DataParallel(nn.Linear(2, 2)), nn.Linear(2, 2)))


def test_optimizer_of_another_model_is_refused_at_its_first_use(accelerator: Accelerator) -> None:
    model = accelerator.prepare(nn.Linear(2, 2))
    optimizer = accelerator.prepare(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(PrepareError, match="SGD steps 2 of 2 parameters that belong to no model"):
        optimizer.step()


def test_optimizer_of_another_model_prepared_together_is_refused_at_once(accelerator: Accelerator) -> None:
    with pytest.raises(PrepareError, match="SGD steps 2 of 2 parameters that belong to no model"):
        accelerator.prepare(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def test_schedule_of_an_unknown_optimizer_is_refused(accelerator: Accelerator) -> None:
    _, _, _, scheduler = parts()
    with pytest.raises(PrepareError, match="StepLR was built for an optimizer that is not prepared"):
        accelerator.prepare(scheduler)


def test_objects_of_another_accelerator_are_refused_under_their_own_names(accelerator: Accelerator) -> None:
    _, optimizer, loader, scheduler = Accelerator(cpu=True).prepare(*parts())
    for value, name in ((optimizer, "SGD"), (loader, "DataLoader"), (scheduler, "StepLR")):
        with pytest.raises(PrepareError, match=f"this {name} was prepared by another Accelerator"):
            accelerator.prepare(value)


def test_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        Accelerator(cpu=True, gradient_acumulation_steps=2)


def test_free_memory_lets_go_of_models(accelerator: Accelerator) -> None:
    model, optimizer = nn.Linear(2, 2), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.free_memory()
    with pytest.raises(PrepareError, match="not a model that this accelerator has prepared"):
        accelerator.get_state_dict(model)
    other = accelerator.prepare(nn.Linear(2, 2))
    accelerator.backward(other(torch.ones(1, 2)).sum())


@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
def test_compiled_model_keeps_its_names_and_is_known(accelerator: Accelerator, when: str) -> None:
    model = nn.Linear(2, 2)
    if when == "before prepare":
        prepared = accelerator.prepare(torch.compile(model, backend="eager"))
    else:
        prepared = torch.compile(accelerator.prepare(model), backend="eager")
        assert accelerator.unwrap_model(prepared) is model
    assert set(accelerator.get_state_dict(prepared)) == {"weight", "bias"}
    with accelerator.accumulate(prepared):
        accelerator.backward(prepared(torch.ones(1, 2)).sum())


@pytest.mark.parametrize("model", [nn.LazyLinear(3), nn.Linear(2, 2, device="meta")], ids=["lazy", "meta"])
def test_model_without_values_is_refused(accelerator: Accelerator, model: nn.Module) -> None:
    with pytest.raises(PrepareError, match=r"weight of .* has no values yet"):
        accelerator.prepare(model)


def test_models_that_share_a_parameter_are_refused(accelerator: Accelerator) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(PrepareError, match="Linear shares parameters with another prepared model: bias, weight"):
        accelerator.prepare(model, model[0])


def test_order_of_a_loader_does_not_depend_on_the_loaders_before_it() -> None:
    accelerator = Accelerator(cpu=True, seed=0)
    rows = TensorDataset(torch.arange(20))
    pair = [DataLoader(rows, batch_size=1, shuffle=True) for _ in range(2)]
    first, second = accelerator.prepare(*pair)
    assert [row.item() for (row,) in first] == [row.item() for (row,) in second]
    assert accelerator.prepare(pair[0]) is first


def test_config_of_a_wrong_kind_is_a_problem_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="a path, a mapping or a RunConfig"):
        Accelerator(cpu=True, config=3)  # type: ignore[arg-type]
