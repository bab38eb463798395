"""The one place where a setting exists: file keys, flags, variables, help and reference are made from these fields.

`CoreConfig` holds what does not depend on the strategy. `run_config()` adds one section per registered strategy and
the values of `distributed_type` that they serve; `drivetrain.config.RunConfig` is its result.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cache
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, create_model, field_validator

from drivetrain.config.section import Section, Setting, Topology
from drivetrain.registry import strategy_specs

_HARDWARE = "Hardware and precision"
_PROCESSES = "Processes and machines"
_LAUNCH = "Launch"
_TRAINING = "Training"
_DATA = "Data"

SectionT = TypeVar("SectionT", bound=Section)


def _idle(reason: str, *, when: Callable[[Topology], bool]) -> Callable[[Topology], str | None]:
    return lambda topology: reason if when(topology) else None


_ON_CPU = _idle("this run is on the CPU", when=lambda topology: topology.is_on_cpu)
_ON_ONE_MACHINE = _idle("this run is on a single machine", when=lambda topology: topology.num_machines == 1)
_ALWAYS = _idle("machines find each other by address, within one network or across several", when=lambda _: True)
_WITHOUT_LAUNCHER = _idle(
    "this run is a single process, which takes the launcher's place", when=lambda topology: not topology.keeps_launcher
)


class CoreConfig(Section):
    """All settings of a run, apart from the strategies' sections."""

    compute_environment: Annotated[Literal["LOCAL_MACHINE"], Setting(panel=_HARDWARE)] = "LOCAL_MACHINE"
    """Where the run takes place. Kept for files of Accelerate; machines that you start processes on are local ones."""

    use_cpu: Annotated[bool, Setting(panel=_HARDWARE, aliases=("cpu",))] = False
    """Train on the CPU even where an accelerator is present."""

    mixed_precision: Annotated[Literal["no", "fp16", "bf16"], Setting(panel=_HARDWARE)] = "no"
    """Type of the forward and backward computation. Parameters and optimizer state stay in fp32."""

    gpu_ids: Annotated[
        str | None, Setting(panel=_HARDWARE, is_list=True, shared=False, idle=_ON_CPU, neutral=("all",))
    ] = Field(default=None, min_length=1)
    """Devices of this machine to use, such as `0,1`, or `all`. Unset: all that are visible."""

    distributed_type: Annotated[str | None, Setting(panel=_PROCESSES)] = None
    """How the model is distributed.

    Unset: as the section of a strategy says; else `NO` for one process, plain data parallelism
    for several.
    """

    num_processes: Annotated[PositiveInt | None, Setting(panel=_PROCESSES)] = None
    """Number of processes over all machines. Unset: one per device of every machine, one in all on the CPU."""

    num_machines: Annotated[PositiveInt, Setting(panel=_PROCESSES, shared=False)] = 1
    """Number of machines that take part."""

    machine_rank: Annotated[NonNegativeInt, Setting(panel=_PROCESSES, shared=False, idle=_ON_ONE_MACHINE)] = 0
    """Rank of this machine, from 0."""

    main_process_ip: Annotated[str | None, Setting(panel=_PROCESSES, shared=False, idle=_ON_ONE_MACHINE)] = Field(
        default=None, min_length=1
    )
    """Address of the machine with rank 0, as the others reach it. Needed with several machines."""

    main_process_port: Annotated[int | None, Setting(panel=_PROCESSES, shared=False)] = Field(
        default=None, ge=0, le=65535
    )
    """Port on the machine with rank 0. Unset or 0: a free one, on a single machine."""

    same_network: Annotated[bool, Setting(panel=_PROCESSES, shared=False, idle=_ALWAYS, neutral=(False,))] = True
    """Whether all machines are in one local network. Kept for files of Accelerate; makes no difference here."""

    rdzv_backend: Annotated[
        Literal["static", "c10d"] | None,
        Setting(panel=_PROCESSES, shared=False, idle=_ON_ONE_MACHINE, neutral=("static",)),
    ] = None
    """How machines find each other. Unset: chosen by the launcher."""

    max_restarts: Annotated[NonNegativeInt, Setting(panel=_LAUNCH, shared=False)] = 0
    """How often all processes are started again after one of them failed."""

    monitor_interval: Annotated[PositiveFloat, Setting(panel=_LAUNCH, shared=False, idle=_WITHOUT_LAUNCHER)] = 0.1
    """Seconds between two looks at the processes."""

    start_method: Annotated[
        Literal["fork", "spawn"] | None, Setting(panel=_LAUNCH, shared=False, idle=_WITHOUT_LAUNCHER)
    ] = None
    """How processes are started. Unset: `fork` after torch was imported once on Linux, `spawn` on macOS."""

    num_cpu_threads_per_process: Annotated[PositiveInt | None, Setting(panel=_LAUNCH, shared=False)] = None
    """Threads of each process for operations on the CPU. Unset: the usable CPUs divided by the local processes."""

    log_dir: Annotated[str | None, Setting(panel=_LAUNCH, shared=False)] = Field(default=None, min_length=1)
    """Folder that gets each process's output in a file of its own. Unset: all output goes to the terminal."""

    gradient_accumulation_steps: Annotated[PositiveInt | None, Setting(panel=_TRAINING)] = None
    """Micro-batches per optimizer step. Unset: 1, or what `global_batch_size` asks for."""

    global_batch_size: Annotated[PositiveInt | None, Setting(panel=_TRAINING)] = None
    """Samples per optimizer step over all processes. Unset: whatever batch size, processes and accumulation give."""

    seed: Annotated[int | None, Setting(panel=_TRAINING)] = Field(default=None, ge=0, lt=2**32)
    """Seed of every random number generator and of the order of the data. Unset: generators are left as they are."""

    non_finite: Annotated[Literal["raise", "skip", "ignore"], Setting(panel=_TRAINING)] = "raise"
    """What happens when a gradient is infinite or NaN: stop, leave the update out, or go on without looking."""

    project_dir: Annotated[str | None, Setting(panel=_TRAINING)] = Field(default=None, min_length=1)
    """Folder for checkpoints and logs. Unset: the current folder."""

    logging_dir: Annotated[str | None, Setting(panel=_TRAINING)] = Field(default=None, min_length=1)
    """Folder for logs, such as `metrics.jsonl` and what TensorBoard reads. Unset: `project_dir`."""

    log_with: Annotated[str | None, Setting(panel=_TRAINING, is_list=True)] = Field(default=None, min_length=1)
    """Trackers that get the logged values, besides `metrics.jsonl`.

    Names such as `tensorboard,wandb`, `all` for those that are installed, or `none`. Unset: none.
    """

    check_collectives: Annotated[Literal["always", "never"], Setting(panel=_TRAINING)] = "always"
    """Whether ranks compare shapes and types before they gather, so that a difference is an error and not a hang."""

    even_batches: Annotated[bool, Setting(panel=_DATA)] = True
    """Give every process the same number of batches; one without samples left gets a batch that counts for nothing."""

    @field_validator("main_process_port")
    @classmethod
    def _zero_is_unset(cls, port: int | None) -> int | None:
        return port or None

    @property
    def wants_cpu(self) -> bool:
        """Whether the run must stay on the CPU, by `use_cpu` or by its distributed type."""
        return self.use_cpu or self.distributed_type == "MULTI_CPU"

    @property
    def names_devices(self) -> bool:
        """Whether `gpu_ids` picks devices, rather than leaving the choice open."""
        return self.gpu_ids is not None and self.gpu_ids.lower() != "all"

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names in `log_with`, each once."""
        names = (name.strip().lower() for name in (self.log_with or "").split(","))
        return tuple(dict.fromkeys(name for name in names if name))

    def section(self, settings: type[SectionT], /) -> SectionT:
        """Return the section that is described by this settings model."""
        for value in self.__dict__.values():
            if isinstance(value, settings):
                return value
        raise TypeError(f"no section of the configuration is a {settings.__name__}")

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        if cls is CoreConfig:
            raise TypeError("CoreConfig lacks the strategies' sections: use drivetrain.config.RunConfig")
        return super().__new__(cls)


@cache
def run_config() -> type[CoreConfig]:
    """Return the model of all settings: the core ones and a section for each registered strategy."""
    specs = strategy_specs()
    fields: dict[str, Any] = {
        spec.section: (spec.settings, Field(default=spec.settings(), description=f"Settings of {spec.title}."))
        for spec in specs
        if spec.section is not None and spec.settings is not None
    }
    allowed = tuple(dict.fromkeys(name for spec in specs for name in spec.distributed_types))
    field = copy(CoreConfig.model_fields["distributed_type"])
    fields["distributed_type"] = (Literal[allowed] | None, field)
    model = create_model("RunConfig", __base__=CoreConfig, __module__="drivetrain.config", **fields)
    model.__doc__ = "All settings of a run."
    return model
