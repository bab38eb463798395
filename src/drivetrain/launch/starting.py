"""Carries a plan out: one rank takes the launcher's place, several become its children."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from drivetrain.cluster.environ import add_variables
from drivetrain.config import settings_to_text
from drivetrain.errors import LaunchError
from drivetrain.launch.planning import LaunchPlan, Seat, rank_variables

if TYPE_CHECKING:
    from drivetrain.launch.failures import Ending


def start(plan: LaunchPlan) -> int:
    """Run the plan to its end and return the launcher's exit code: 0, or 1 when a rank failed.

    A plan of one rank does not return: the script has this process from then on. A signal that ends several ranks
    ends this process too, as the same signal. Nothing is written but what the user asked for, so nothing is left.

    Raises:
        LaunchError: the ranks could not be started.
    """
    if plan.start_method == "exec":
        _become_script(plan)
    return _run_ranks(plan)


def _become_script(plan: LaunchPlan) -> NoReturn:
    seat = Seat(
        local_rank=0,
        machine_rank=0,
        master_addr=plan.master_addr,
        master_port=plan.master_port or _free_port(),
        run_id=run_id(plan),
        attempt=0,
        launcher_holds_store=False,
        settings=settings_to_text(plan.resolved),
    )
    add_variables(rank_variables(plan, seat))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(plan.python, [plan.python, *plan.script.command])


def _run_ranks(plan: LaunchPlan) -> int:
    # While there is no rank, Ctrl-C just ends this process. Raised inside an import, it could be lost: torch's C++ side
    # drops any exception that its import of numpy raises.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Before torch is imported: its thread pool takes the number from here.
    add_variables({"OMP_NUM_THREADS": str(plan.threads.value)})
    if plan.log_dir is not None:
        Path(plan.log_dir).mkdir(parents=True, exist_ok=True)
        sys.stderr.write(f"drivetrain: output of the ranks: {os.path.join(plan.log_dir, 'rank-N.log')}\n")
        sys.stderr.flush()

    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import RendezvousError

    from drivetrain.launch.agent import RankAgent
    from drivetrain.launch.rendezvous import make_rendezvous
    from drivetrain.launch.signals import Interrupted, die_of

    agent = RankAgent(
        plan,
        rendezvous=make_rendezvous(plan, run_id=run_id(plan)),
        on_failure=lambda endings, restarts_left: _tell(plan, endings, restarts_left),
    )
    try:
        return 1 if agent.run().is_failed() else 0
    except (DistError, RendezvousError) as error:
        raise LaunchError(
            f"the machines did not meet, or lost each other: {str(error).splitlines()[0]}",
            hint="all need the same num_machines, main_process_ip and main_process_port, and a machine_rank each",
        ) from error
    except Interrupted as interruption:
        sys.stderr.write(f"{interruption}: all ranks were stopped\n")
        return die_of(interruption.number)


def _tell(plan: LaunchPlan, endings: Sequence[Ending], restarts_left: int) -> None:
    from drivetrain.launch.failures import report

    sys.stderr.write(report(endings, program=plan.script.target))
    if restarts_left > 0:
        attempt = plan.max_restarts - restarts_left + 2
        sys.stderr.write(f"starting all ranks again: attempt {attempt} of {plan.max_restarts + 1}\n")
    sys.stderr.flush()


def run_id(plan: LaunchPlan) -> str:
    """Return the name of the job, the same on all its machines and another for each job of one machine."""
    if plan.num_machines > 1:
        return f"{plan.master_addr}-{plan.master_port}"
    return os.urandom(8).hex()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
