"""Logging on several ranks: one of them writes, and records come in order where that is asked for."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Accelerator, get_logger
from drivetrain.errors import TopologyError
from drivetrain.testing import ranks
from host_reads import counted_reads
from keeping_tracker import KeepingTracker


def log_on_all_ranks(folder: str) -> tuple[list[str], list[str], int]:
    """Log a tensor; return the trackers that were open, what they were told, and how often a device was read."""
    with Accelerator(cpu=True, project_dir=folder, log_with=KeepingTracker) as accelerator:
        accelerator.init_trackers("project", config={"lr": 0.1})
        opened = [tracker.name for tracker in accelerator.trackers]
        with counted_reads() as reads:
            accelerator.log({"rank": torch.tensor(float(accelerator.process_index))}, step=5)
        tracker: Any = accelerator.get_tracker("keeping")
        tracker.log({"native": accelerator.process_index}, 6)
        calls = list(tracker.calls) if accelerator.is_main_process else []
    return opened, [call[0] for call in calls], reads["cpu"] if "cpu" in reads else reads.total()


@pytest.mark.parametrize("count", [2, 3])
def test_values_when_all_ranks_log_then_the_main_one_alone_reads_and_writes(tmp_path: Path, count: int) -> None:
    main, *others = ranks.run(log_on_all_ranks, str(tmp_path / "logs"), ranks=count)
    (row,) = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert (row["step"], row["rank"]) == (5, 0.0)
    assert main[:2] == (["jsonl", "keeping"], ["init", "config", "log", "log"])
    assert main[2] > 0
    assert others == [([], [], 0)] * (count - 1)


def log_on_the_main_rank_alone(folder: str) -> int:
    """Do what many scripts do: call for trackers under a condition, and train on."""
    with Accelerator(cpu=True, project_dir=folder) as accelerator:
        if accelerator.is_main_process:
            accelerator.init_trackers("project")
            accelerator.log({"loss": 1.0}, step=1)
        accelerator.wait_for_everyone()
        return accelerator.process_index


def test_values_when_the_main_rank_alone_logs_then_nobody_waits(tmp_path: Path) -> None:
    assert ranks.run(log_on_the_main_rank_alone, str(tmp_path), ranks=2) == [0, 1]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def log_in_order(file: str, *, count: int, in_order: bool) -> None:
    """Log one record per rank to one file; the lower the rank, the later it comes to it."""
    rank = torch.distributed.get_rank()
    handler = logging.FileHandler(file)
    logger = get_logger("ranks", "INFO")
    logger.logger.addHandler(handler)
    logger.info("main")
    torch.distributed.barrier()
    time.sleep(0.3 * (count - 1 - rank))
    logger.info("rank %d", rank, main_process_only=False, in_order=in_order)
    # Ranks that do not log it meet the others nonetheless.
    get_logger("quiet", "INFO" if rank == 0 else "ERROR").info("quiet", main_process_only=False, in_order=in_order)
    logger.warning_once("once", main_process_only=False, in_order=in_order)
    handler.close()


@pytest.mark.parametrize("in_order", [True, False])
def test_records_when_in_order_then_ranks_come_one_after_another(tmp_path: Path, in_order: bool) -> None:
    count = 3
    ranks.run(log_in_order, str(tmp_path / "log"), count=count, in_order=in_order, ranks=count, init_group=True)
    first, *others = (tmp_path / "log").read_text().splitlines()
    assert first == "main"
    by_rank = [f"rank {rank}" for rank in range(count)]
    assert [line for line in others if line != "once"] == (by_rank if in_order else by_rank[::-1])
    assert others.count("once") == count


def log_where_rank_1_does_not() -> str:
    """Leave on rank 1; return what rank 0 is told."""
    if torch.distributed.get_rank() == 1:
        return ""
    with pytest.raises(TopologyError) as caught:
        get_logger("ranks").warning("here", main_process_only=False, in_order=True)
    return caught.value.message


def test_record_in_order_when_a_rank_has_left_then_the_others_get_an_error(tmp_path: Path) -> None:
    message, _ = ranks.run(log_where_rank_1_does_not, ranks=2, init_group=True, timeout=30)
    assert message.startswith("rank 0 waited in a log call with in_order=True and another rank did not come")


def fail_on_rank_0(folder: str) -> None:
    """Fail after the trackers were opened; the file tells how they were ended."""

    class Telling(KeepingTracker):
        def fail(self) -> None:
            time.sleep(1.5)  # as sending the rest over a network does
            (Path(folder) / "ended").write_text("failed")

    with Accelerator(cpu=True, project_dir=folder, log_with=Telling) as accelerator:
        accelerator.init_trackers("project")
        if accelerator.is_main_process:
            raise ValueError("cause-5c1")
        accelerator.wait_for_everyone()


def test_trackers_when_the_main_rank_fails_then_are_failed_and_its_error_is_first(tmp_path: Path) -> None:
    with pytest.raises(ranks.RanksFailed) as caught:
        ranks.run(fail_on_rank_0, str(tmp_path), ranks=2)
    first = str(caught.value).rsplit("rank 0 raised:", 1)[1]  # the first to fail comes last
    assert "ValueError: cause-5c1" in first
    assert (tmp_path / "ended").read_text() == "failed"
