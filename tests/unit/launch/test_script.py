"""Whether there is a program, found out without importing anything of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from drivetrain.errors import LaunchError
from drivetrain.launch.script import Script, check


def _write_package(folder: Path) -> None:
    for name in ("package/__init__.py", "package/inner/__init__.py", "package/inner/train.py", "bare/__init__.py"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise AssertionError('imported')\n")
    (folder / "package" / "__main__.py").write_text("raise AssertionError('imported')\n")


@pytest.mark.parametrize("name", ["package", "package.inner.train", "json.tool"])
def test_check_when_the_module_exists_then_passes_without_importing_it(tmp_path: Path, name: str) -> None:
    _write_package(tmp_path)
    check(Script(target=name, is_module=True), folder=str(tmp_path), search_path=sys.path)


@pytest.mark.parametrize("name", ["bare", "package.missing", "package.inner.train.deeper", "no such", "package..inner"])
def test_check_when_the_module_cannot_run_then_refuses(tmp_path: Path, name: str) -> None:
    _write_package(tmp_path)
    with pytest.raises(LaunchError, match="no module named"):
        check(Script(target=name, is_module=True), folder=str(tmp_path), search_path=[])


def test_check_when_the_file_exists_then_passes(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    check(Script(target="train.py"), folder=str(tmp_path), search_path=[])
    check(Script(target=str(tmp_path / "train.py")), folder="/", search_path=[])


def test_check_when_there_is_no_file_then_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        check(Script(target="trian.py"), folder=str(tmp_path), search_path=[])
    assert str(caught.value) == f"there is no file `trian.py` in {tmp_path}"


def test_check_when_a_module_is_given_as_a_file_then_hints_at_the_flag(tmp_path: Path) -> None:
    _write_package(tmp_path)
    with pytest.raises(LaunchError, match=r"launched with `-m package\.inner\.train`"):
        check(Script(target="package.inner.train"), folder=str(tmp_path), search_path=[])


def test_check_when_a_folder_is_given_then_refuses(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="is a folder"):
        check(Script(target="."), folder=str(tmp_path), search_path=[])


def test_command_when_asked_for_then_is_what_follows_python() -> None:
    assert Script(target="a.py", arguments=("--x",)).command == ("a.py", "--x")
    assert Script(target="a.b", is_module=True, arguments=("-m",)).command == ("-m", "a.b", "-m")
