"""Loggers that know about ranks, without any; the others are in tests/ranks."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

import drivetrain
from drivetrain.cluster.log import RankLogger, get_logger
from drivetrain.errors import ConfigError

NAME = "a script"


@pytest.fixture
def logger() -> Iterator[RankLogger]:
    """Return a logger that takes everything, and forget its level afterwards."""
    yield get_logger(NAME, "debug")
    logging.getLogger(NAME).setLevel(logging.NOTSET)


def set_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Let the environment say that this is a rank of two."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")


@pytest.mark.parametrize(("rank", "messages"), [(0, ["main", "all", "in order"]), (1, ["all", "in order"])])
def test_logger_when_there_is_no_accelerator_yet_then_the_environment_says_which_rank_logs(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    logger: RankLogger,
    rank: int,
    messages: list[str],
) -> None:
    set_rank(monkeypatch, rank)
    logger.info("main")
    logger.info("all", main_process_only=False)
    logger.info("in order", main_process_only=False, in_order=True)  # with nobody to wait for
    assert caplog.messages == messages


def test_logger_when_the_environment_is_half_set_then_logs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, logger: RankLogger
) -> None:
    monkeypatch.setenv("RANK", "1")
    logger.warning("still here")
    assert caplog.messages == ["still here"]


def test_record_when_logged_then_its_origin_is_the_caller(caplog: pytest.LogCaptureFixture, logger: RankLogger) -> None:
    logger.info("by name %s", "x")
    logger.log(logging.INFO, "by level")
    logger.warning_once("once")
    try:
        raise ValueError("cause")
    except ValueError:
        logger.exception("caught", extra={"mark": 3})
    assert {record.funcName for record in caplog.records} == {"test_record_when_logged_then_its_origin_is_the_caller"}
    assert caplog.messages == ["by name x", "by level", "once", "caught"]
    assert caplog.records[-1].__dict__["mark"] == 3
    assert caplog.records[-1].exc_info is not None


def test_warning_once_when_it_comes_again_then_only_another_one_is_logged(
    caplog: pytest.LogCaptureFixture, logger: RankLogger
) -> None:
    for number in (1, 1, 2, 1):
        logger.warning_once("slow: %s", number)
    assert caplog.messages == ["slow: 1", "slow: 2"]


def test_level_when_given_then_holds_for_this_logger_alone(caplog: pytest.LogCaptureFixture) -> None:
    root = logging.getLogger().level
    logger = get_logger(NAME, "ERROR")
    try:
        logger.warning("no")
        logger.error("yes")
    finally:
        logging.getLogger(NAME).setLevel(logging.NOTSET)
    assert (caplog.messages, logging.getLogger().level) == (["yes"], root)


def test_level_when_it_does_not_exist_then_the_nearest_is_named() -> None:
    with pytest.raises(ConfigError, match=r"log_level = INFOO \(get_logger\(log_level=...\)\)(.|\n)*`INFO`"):
        get_logger(NAME, "INFOO")


def test_get_logger_when_imported_from_the_package_then_torch_is_not_loaded() -> None:
    code = (
        "import sys; from drivetrain import get_logger; get_logger('x').warning('hello'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert (done.stdout, done.stderr) == ("False\n", "hello\n")
    assert drivetrain.get_logger is get_logger
