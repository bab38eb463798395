"""Several ranks, or ranks that are restarted: torch's elastic agent with our own processes and our own report.

torch's part is the order of things: meet, assign ranks, start, watch, restart, leave together. Ours are the four
methods in which that agent leaves the processes to its subclass.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousHandler

from drivetrain.config import settings_to_text
from drivetrain.launch.failures import Ending, first_failure
from drivetrain.launch.planning import LaunchPlan, Seat, rank_variables
from drivetrain.launch.ranks import RankGroup
from drivetrain.launch.signals import Interrupted
from drivetrain.launch.worker import Order

_ROLE = "default"
_EXIT_BARRIER_SECONDS = 300.0


class RankAgent(SimpleElasticAgent):
    """The agent of this machine.

    Args:
        on_failure: is told how every rank of a failed attempt ended and how many restarts are left.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        rendezvous: RendezvousHandler,
        on_failure: Callable[[Sequence[Ending], int], None],
    ) -> None:
        spec = WorkerSpec(
            role=_ROLE,
            local_world_size=plan.local_world_size,
            rdzv_handler=rendezvous,
            entrypoint=plan.script.target,
            max_restarts=plan.max_restarts,
            # The agent sleeps this long before each look, and our look sleeps until there is something to see.
            monitor_interval=0.001,
        )
        super().__init__(spec, exit_barrier_timeout=_EXIT_BARRIER_SECONDS)
        self._plan = plan
        self._on_failure = on_failure
        self._ranks: RankGroup | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        orders = [self._order(worker.local_rank, worker_group) for worker in worker_group.workers]
        self._ranks = RankGroup(orders, start_method="spawn" if self._plan.start_method == "spawn" else "fork")
        return dict(enumerate(self._ranks.pids.values()))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._ranks is not None
        decided = self._ranks.wait(seconds=self._plan.monitor_interval)
        endings = self._ranks.settle() if decided else None
        if (number := self._ranks.signal) is not None:
            raise Interrupted(number)
        if endings is None:
            return RunResult(state=WorkerState.HEALTHY)
        if first_failure(endings) is None:
            results = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=results)
        self._on_failure(endings, self._remaining_restarts)
        return RunResult(state=WorkerState.FAILED)

    def _stop_workers(self, _worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:  # noqa: ARG002
        if self._ranks is not None:
            self._ranks.stop(self._ranks.signal or death_sig)

    def _order(self, local_rank: int, worker_group: WorkerGroup) -> Order:
        attempt = self._plan.max_restarts - self._remaining_restarts
        group_rank: int | None = worker_group.group_rank
        assert group_rank is not None
        seat = Seat(
            local_rank=local_rank,
            machine_rank=group_rank,
            master_addr=str(worker_group.master_addr),
            master_port=str(worker_group.master_port),
            run_id=worker_group.spec.rdzv_handler.get_run_id(),
            attempt=attempt,
            launcher_holds_store=worker_group.spec.rdzv_handler.use_agent_store,
            settings=settings_to_text(self._plan.resolved),
        )
        variables = rank_variables(self._plan, seat)
        return Order(
            rank=int(variables["RANK"]),
            script=self._plan.script,
            variables=variables,
            threads=self._plan.threads.value,
            launcher_pid=os.getpid(),
            log_file=self._log_file(variables["RANK"]),
        )

    def _log_file(self, rank: str) -> str | None:
        return None if self._plan.log_dir is None else os.path.join(self._plan.log_dir, f"rank-{rank}.log")
