"""Where the machines of a job meet, and the store at which the ranks of each attempt meet.

Every attempt gets a store of its own: with gloo, a second attempt in the store of the first finds the addresses of dead
ranks and dials them (pytorch issue 135712). The launcher of the first machine holds the servers, bound before a rank
starts, so that no two jobs are given the same port.
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from drivetrain.cluster.environ import add_variables
from drivetrain.errors import LaunchError
from drivetrain.launch.planning import LaunchPlan

_MEETING_SECONDS = 600.0


def make_rendezvous(plan: LaunchPlan, *, run_id: str) -> RendezvousHandler:
    """Return the way in which the machines of a plan meet; with one machine, there is nothing to wait for.

    Raises:
        LaunchError: the address cannot be used.
    """
    if plan.rendezvous == "c10d":
        # Every attempt then gets a store of its own, here too.
        add_variables({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
        return get_rendezvous_handler(
            RendezvousParameters(
                backend="c10d",
                endpoint=f"{plan.master_addr}:{plan.master_port}",
                run_id=run_id,
                min_nodes=plan.num_machines,
                max_nodes=plan.num_machines,
                is_host=plan.machine_rank == 0,
            )
        )
    try:
        return StaticRendezvous(
            run_id=run_id,
            machine_rank=plan.machine_rank,
            num_machines=plan.num_machines,
            address=plan.master_addr,
            port=plan.master_port or 0,
            timeout_seconds=_MEETING_SECONDS,
        )
    except DistError as error:
        what = f"port {plan.master_port}" if plan.machine_rank == 0 else f"{plan.master_addr}:{plan.master_port}"
        raise LaunchError(
            f"{what} cannot be used for the ranks to meet: {str(error).splitlines()[0]}",
            hint="another job may hold it: set another --main_process_port, or none at all on a single machine",
        ) from error


class StaticRendezvous(RendezvousHandler):
    """A fixed number of machines with fixed ranks, which meet at a known address; one machine meets itself.

    Args:
        address: of the first machine, as the others reach it.
        port: where the machines meet, and the ranks of the first attempt; 0 takes a free one (one machine only).
        timeout_seconds: how long a machine waits for the others.
    """

    def __init__(
        self, *, run_id: str, machine_rank: int, num_machines: int, address: str, port: int, timeout_seconds: float
    ) -> None:
        self._run_id = run_id
        self._machine_rank = machine_rank
        self._num_machines = num_machines
        self._address = address
        self._timeout = timedelta(seconds=timeout_seconds)
        self._meeting = self._open_store(port, is_server=machine_rank == 0)
        self._attempts: list[TCPStore] = []

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks connect to the server that the launcher holds."""
        return True

    def get_backend(self) -> str:
        """Return the name of this way to meet, for torch's events."""
        return "static"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all machines, and return the stores of the next attempt."""
        attempt = len(self._attempts)
        store = PrefixStore(f"{self._run_id}/{attempt}", self._meeting)
        port = self._port_of_attempt(attempt, store)
        return RendezvousInfo(store, self._machine_rank, self._num_machines, RendezvousStoreInfo(self._address, port))

    def is_closed(self) -> bool:
        """Return False: these machines stay."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no machine joins later."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True: the servers end with the launcher."""
        return True

    def _port_of_attempt(self, attempt: int, store: Store) -> int:
        """Return the port of the ranks' store: the known one at first, then a free one of the first machine."""
        if attempt == 0:
            self._attempts.append(self._meeting)
        elif self._machine_rank == 0:
            self._attempts.append(self._open_store(0, is_server=True))
            store.set("port", str(self._attempts[-1].port))
        else:
            port = int(store.get("port"))
            self._attempts.append(self._open_store(port, is_server=False))
        return self._attempts[-1].port

    def _open_store(self, port: int, *, is_server: bool) -> TCPStore:
        return TCPStore(self._address, port, is_master=is_server, timeout=self._timeout, wait_for_workers=False)
