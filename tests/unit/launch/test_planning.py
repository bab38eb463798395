"""The plan of a launch, from settings and the facts of a machine that is made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drivetrain.config import flags, layer_from_flags, layer_from_mapping, layer_from_variables, resolve
from drivetrain.config.keys import keys
from drivetrain.errors import ConfigError
from drivetrain.launch.machine import Devices, Machine
from drivetrain.launch.planning import LaunchPlan, Seat, plan, rank_variables
from drivetrain.launch.script import Script

NO_DEVICES = Devices(present=0, visible=0, variable="", reason="no accelerator found")


def gpus(count: int, *, visible: int | None = None) -> Devices:
    """Return that many CUDA devices."""
    seen = count if visible is None else visible
    return Devices(present=count, visible=seen, variable="CUDA_VISIBLE_DEVICES", reason=f"{seen} found")


def make(
    settings: dict[str, object],
    *,
    cpus: int = 8,
    devices: Devices = NO_DEVICES,
    variables: dict[str, str] | None = None,
    platform: str = "linux",
) -> LaunchPlan:
    """Return the plan for these settings on a made up machine."""
    machine = Machine(cpus=cpus, devices=devices, variables=variables or {}, platform=platform, python="python")
    resolved = resolve([layer_from_mapping(settings, place="run.yaml")])
    return plan(resolved, script=Script(target="train.py"), machine=machine)


@pytest.mark.parametrize(
    ("settings", "devices", "ranks", "used"),
    [
        ({}, NO_DEVICES, 1, 0),
        ({}, gpus(4), 4, 4),
        ({}, gpus(4, visible=2), 2, 2),
        ({"use_cpu": True}, gpus(4), 1, 0),
        ({"use_cpu": True, "num_processes": 3}, gpus(2), 3, 0),
        ({"num_processes": 3}, NO_DEVICES, 3, 0),
        ({"num_processes": 2}, gpus(4), 2, 4),
        ({"distributed_type": "NO"}, gpus(4), 1, 4),
        ({"distributed_type": "MULTI_CPU", "num_processes": 2}, gpus(1), 2, 0),
        ({"gpu_ids": "1,3"}, gpus(4), 2, 2),
        ({"gpu_ids": "all"}, gpus(4), 4, 4),
    ],
)
def test_ranks_when_planned_then_are_those_asked_for_or_one_per_device(
    settings: dict[str, object], devices: Devices, ranks: int, used: int
) -> None:
    made = make(settings, devices=devices)
    assert (made.world_size, made.devices.value) == (ranks, used)


def test_plan_when_more_processes_than_devices_are_asked_for_then_refuses() -> None:
    with pytest.raises(ConfigError) as caught:
        make({"num_processes": 3}, devices=gpus(2))
    assert str(caught.value).splitlines() == [
        "1 problem in the configuration",
        "  num_processes = 3 (run.yaml)",
        "    3 processes need 3 devices on this machine, 2 can be used (2 found)",
        "    hint: use --num_processes 2, or --cpu to train on the CPU",
    ]


@pytest.mark.parametrize("devices", [NO_DEVICES, gpus(2, visible=0)])
def test_plan_when_accelerators_are_needed_and_none_can_be_used_then_refuses(devices: Devices) -> None:
    settings: dict[str, object] = {"distributed_type": "MULTI_GPU", "num_processes": 2}
    with pytest.raises(ConfigError) as caught:
        make(settings, devices=devices)
    (problem,) = caught.value.problems
    assert (problem.path, problem.value, problem.source) == ("distributed_type", "MULTI_GPU", "run.yaml")
    assert problem.message == f"`MULTI_GPU` needs accelerators: {devices.reason}"
    assert make(settings, devices=gpus(2)).devices.value == 2


@pytest.mark.parametrize(("devices", "there"), [(gpus(2), "0 to 1"), (NO_DEVICES, "no accelerator found")])
def test_plan_when_a_device_does_not_exist_then_refuses(devices: Devices, there: str) -> None:
    with pytest.raises(ConfigError, match=f"no such device: {there}") as caught:
        make({"gpu_ids": "0,2"}, devices=devices)
    assert caught.value.problems[0].source == "run.yaml"


@pytest.mark.parametrize(
    ("settings", "platform", "method"),
    [
        ({}, "linux", "exec"),
        ({}, "darwin", "exec"),
        ({"num_processes": 2}, "linux", "fork"),
        ({"num_processes": 2}, "darwin", "spawn"),
        ({"num_processes": 2, "start_method": "spawn"}, "linux", "spawn"),
        ({"max_restarts": 1}, "linux", "fork"),
        ({"log_dir": "logs"}, "linux", "fork"),
    ],
)
def test_start_method_when_planned_then_needs_a_parent_only_for_what_a_parent_does(
    settings: dict[str, object], platform: str, method: str
) -> None:
    assert make(settings, platform=platform).start_method == method


@pytest.mark.parametrize(
    ("settings", "cpus", "variables", "threads"),
    [
        ({"num_processes": 2}, 8, {}, 4),
        ({"num_processes": 3}, 8, {}, 2),
        ({"num_processes": 4}, 2, {}, 1),
        ({}, 8, {}, 8),
        ({"num_processes": 2}, 8, {"OMP_NUM_THREADS": "3"}, 3),
        ({"num_processes": 2}, 8, {"OMP_NUM_THREADS": "6,2"}, 6),
        ({"num_processes": 2}, 8, {"OMP_NUM_THREADS": "many"}, 4),
        ({"num_processes": 2, "num_cpu_threads_per_process": 5}, 8, {"OMP_NUM_THREADS": "3"}, 5),
    ],
)
def test_threads_when_planned_then_are_the_usable_cpus_shared_out(
    settings: dict[str, object], cpus: int, variables: dict[str, str], threads: int
) -> None:
    made = make(settings, cpus=cpus, variables=variables)
    assert made.threads.value == threads
    assert rank_variables(made, seat(0))["OMP_NUM_THREADS"] == str(threads)


def seat(local_rank: int, *, machine_rank: int = 0) -> Seat:
    """Return a place in a running job."""
    return Seat(
        local_rank=local_rank,
        machine_rank=machine_rank,
        master_addr="10.0.0.1",
        master_port=4711,
        run_id="run",
        attempt=1,
        launcher_holds_store=True,
        settings="{}",
    )


def test_variables_when_there_are_two_machines_then_number_ranks_over_both() -> None:
    settings = {"num_processes": 4, "num_machines": 2, "machine_rank": 1, "max_restarts": 2}
    made = make({**settings, "main_process_ip": "10.0.0.1", "main_process_port": 4711})
    assert (made.world_size, made.local_world_size, made.master_addr, made.master_port) == (4, 2, "10.0.0.1", 4711)
    assert rank_variables(made, seat(1, machine_rank=1)) == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "4",
        "DRIVETRAIN_RUN_ID": "run",
        "DRIVETRAIN_SETTINGS": "{}",
    }


def test_variables_when_devices_are_named_then_hide_the_others() -> None:
    assert rank_variables(make({"gpu_ids": "1,3"}, devices=gpus(4)), seat(0))["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert "CUDA_VISIBLE_DEVICES" not in rank_variables(make({"gpu_ids": "all"}, devices=gpus(4)), seat(0))
    assert "CUDA_VISIBLE_DEVICES" not in rank_variables(make({}, devices=gpus(4)), seat(0))


OTHER_VALUES: dict[str, object] = {
    "gpu_ids": "all",
    "machine_rank": 0,
    "main_process_ip": "10.0.0.2",
    "main_process_port": 4712,
    "same_network": False,
    "rdzv_backend": "c10d",
    "max_restarts": 3,
    "monitor_interval": 7.0,
    "start_method": "spawn",
    "num_cpu_threads_per_process": 5,
    "log_dir": "logs",
}
TWO_MACHINES = {"num_machines": 2, "num_processes": 4, "main_process_ip": "10.0.0.1", "main_process_port": 4711}
LAUNCHES: dict[str, tuple[dict[str, object], Devices]] = {
    "one process": ({"use_cpu": True}, NO_DEVICES),
    "two processes": ({"num_processes": 2}, gpus(2)),
    "two machines": ({**TWO_MACHINES, "machine_rank": 1}, NO_DEVICES),
}


def warnings_of(settings: dict[str, object], flag: dict[str, str], *, devices: Devices = NO_DEVICES) -> tuple[str, ...]:
    """Return what a launch with this file and these flags says, or refuses."""
    table = {flag.path: flag for flag in flags()}
    typed = layer_from_flags([(table[path], f"--{path}", text) for path, text in flag.items()])
    resolved = resolve([layer_from_mapping(settings, place="run.yaml"), typed])
    machine = Machine(cpus=8, devices=devices, variables={}, platform="linux", python="python")
    try:
        return plan(resolved, script=Script(target="train.py"), machine=machine).warnings
    except ConfigError as error:
        return tuple(f"{problem.source} {problem.message}" for problem in error.problems)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_setting_when_it_changes_nothing_in_the_plan_then_its_flag_is_said_to_have_no_effect(launch: str) -> None:
    settings, devices = LAUNCHES[launch]
    base = make(settings, devices=devices)
    only_launcher = {path for path, key in keys().items() if not key.setting.shared} - {"num_machines"}
    assert only_launcher == set(OTHER_VALUES)
    for path, value in OTHER_VALUES.items():
        changed = make({**settings, path: value}, devices=devices)
        changes = replace(changed, resolved=base.resolved) != base
        # What the plan only hands on is read by the agent, and a single process has none.
        changes = changes and not (path == "monitor_interval" and base.start_method == "exec")
        said = warnings_of(settings, {path: str(value)}, devices=devices)
        is_neutral = value in (keys()[path].default, *keys()[path].setting.neutral)
        assert (said == ()) == (changes or is_neutral), (path, said)


@pytest.mark.parametrize(
    ("settings", "flag", "warning"),
    [
        ({}, {"main_process_ip": "10.0.0.1"}, "flag --main_process_ip has no effect: this run is on a single machine"),
        ({}, {"rdzv_backend": "c10d"}, "flag --rdzv_backend has no effect: this run is on a single machine"),
        (
            {"rdzv_backend": "c10d"},
            {},
            "`rdzv_backend: c10d` (run.yaml) has no effect: this run is on a single machine",
        ),
        (
            {"main_process_ip": "10.0.0.1"},
            {},
            "`main_process_ip: 10.0.0.1` (run.yaml) has no effect: this run is on a single machine",
        ),
        (
            {},
            {"start_method": "spawn"},
            "flag --start_method has no effect: this run is a single process, which takes the launcher's place",
        ),
    ],
)
def test_warning_when_a_setting_has_no_effect_then_names_source_and_reason(
    settings: dict[str, object], flag: dict[str, str], warning: str
) -> None:
    assert warnings_of(settings, flag) == (warning,)


def test_warning_when_a_variable_has_no_effect_then_names_it() -> None:
    resolved = resolve([layer_from_variables({"DRIVETRAIN_RDZV_BACKEND": "c10d"})])
    machine = Machine(cpus=8, devices=NO_DEVICES, variables={}, platform="linux", python="python")
    assert plan(resolved, script=Script(target="train.py"), machine=machine).warnings == (
        "`rdzv_backend: c10d` (variable DRIVETRAIN_RDZV_BACKEND) has no effect: this run is on a single machine",
    )


def test_warning_when_a_file_of_accelerate_holds_neutral_values_then_there_is_none() -> None:
    written_for_everybody: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "NO",
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "gpu_ids": "all",
        "machine_rank": 0,
        "main_process_ip": None,
        "main_process_port": None,
        "main_training_function": "main",
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": 1,
        "rdzv_backend": "static",
        "tpu_env": [],
        "tpu_use_cluster": False,
        "use_cpu": False,
    }
    for same_network in (True, False):
        assert warnings_of({**written_for_everybody, "same_network": same_network}, {}) == ()


def test_warning_when_several_processes_are_launched_then_settings_of_the_run_are_never_without_effect() -> None:
    settings: dict[str, object] = {"ddp_config": {"bucket_cap_mb": 3}, "even_batches": False, "log_dir": "logs"}
    assert warnings_of(settings, {"check_collectives": "never", "start_method": "spawn"}) == ()
