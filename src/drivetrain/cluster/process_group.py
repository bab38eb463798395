"""The ranks of a run: their numbers, and the process groups that they talk through.

A group that exists already is used and never closed. A group that is opened here is closed once, at the end of the
`Accelerator` that opened it or of the process, and may be opened again afterwards.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from drivetrain.cluster.control import Call, Control
from drivetrain.cluster.environ import ProcessEnvironment
from drivetrain.errors import RankMismatchError, TopologyError

_END_SECONDS = 5.0
_SHARING: set[Ranks] = set()
"""Those that use a default group that was opened here: the last one to go closes it."""


class Ranks:
    """Who this process is among the ranks, and the way to the others.

    Attributes:
        rank, local_rank, world_size, local_world_size: as torchrun defines them.
        control: small agreements on the CPU.
        backend: of the default process group; None on one process.
    """

    def __init__(self, environment: ProcessEnvironment, *, backend: str | None, control: Control, owns: bool) -> None:
        self.rank = control.rank
        self.world_size = control.world_size
        self.local_rank = environment.local_rank
        self.local_world_size = environment.local_world_size
        self.backend = backend
        self.control = control
        self._is_open = True
        if owns:
            _SHARING.add(self)

    def close(self, *, is_failing: bool) -> None:
        """Leave the run: meet the other ranks at the end, briefly, and close what was opened here.

        Args:
            is_failing: this rank goes because of an error; it waits for nobody.

        Raises:
            RankMismatchError: another rank is in a call that this one has left out.
        """
        if not self._is_open:
            return
        self._is_open = False
        was_sharing = self in _SHARING
        _SHARING.discard(self)
        if not dist.is_initialized():
            return
        if not was_sharing or _SHARING:
            if self.control.group is not None:
                dist.destroy_process_group(self.control.group)
            return
        try:
            if not is_failing and self.control.group is not None:
                self._meet_at_the_end()
        finally:
            dist.destroy_process_group()

    def _meet_at_the_end(self) -> None:
        agreement = self.control.start(Call.END)
        try:
            agreement.wait(seconds=_END_SECONDS)
        except RankMismatchError:
            raise
        except TopologyError:
            # A rank that is late, or failed and has said so itself.
            return


def open_ranks(
    environment: ProcessEnvironment,
    *,
    device: torch.device,
    backend: str | None,
    timeout_seconds: float,
    needs_group: bool = False,
) -> Ranks:
    """Return the ranks of this run, opening the process groups if there is more than one rank; collective.

    Args:
        backend: of the default group; None for the one that fits the device.
        timeout_seconds: after which a collective that a rank does not join fails.
        needs_group: open one for a single rank, too.

    Raises:
        TopologyError: the backend does not fit, or a rank does not come.
    """
    timeout = timedelta(seconds=timeout_seconds)
    is_first = not dist.is_initialized()
    owns = is_first or bool(_SHARING)
    if is_first:
        if environment.world_size == 1 and not needs_group:
            control = Control(rank=0, world_size=1, group=None)
            return Ranks(environment, backend=None, control=control, owns=False)
        _open_default_group(environment, device=device, backend=backend, timeout=timeout)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="gloo", timeout=timeout) if world_size > 1 else None
    control = Control(rank=rank, world_size=world_size, group=group)
    return Ranks(environment, backend=dist.get_backend(), control=control, owns=owns)


def _open_default_group(
    environment: ProcessEnvironment, *, device: torch.device, backend: str | None, timeout: timedelta
) -> None:
    chosen = backend or dist.get_default_backend_for_device(device)
    if device.type != "cpu" and ":" not in chosen:
        chosen = f"cpu:gloo,{device.type}:{chosen}"
    try:
        dist.init_process_group(
            chosen,
            store=_generation_store(environment, timeout=timeout),
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timeout,
            device_id=device if device.type != "cpu" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise TopologyError(
            f"rank {environment.rank} of {environment.world_size} could not join the process group "
            f"over {chosen} at {environment.master_addr}:{environment.master_port}: {error}",
            hint="every rank must start, reach that address, and use the same backend",
        ) from error


def _generation_store(environment: ProcessEnvironment, *, timeout: timedelta) -> Store:
    """Return a store with keys of its own for each time that the ranks open a group.

    The store outlives a group that is closed, and with it the addresses that the ranks had then.
    """
    if environment.world_size == 1:
        return HashStore()
    store = _rendezvous(environment, timeout=timeout)
    generation = store.add(f"drivetrain/opened/{environment.rank}", 1)
    return PrefixStore(f"drivetrain/{generation}", store)


def _rendezvous(environment: ProcessEnvironment, *, timeout: timedelta) -> Store:
    url = environment.variables.get("DRIVETRAIN_RENDEZVOUS", "")
    if url.startswith("file://"):
        return FileStore(url.removeprefix("file://"))
    url = (
        f"tcp://{environment.master_addr}:{environment.master_port}"
        f"?rank={environment.rank}&world_size={environment.world_size}"
    )
    store: Store = next(rendezvous(url, timeout=timeout))[0]
    return store
