from __future__ import annotations

import re
from pathlib import Path

import pytest

import pages
from pages import Block


@pytest.mark.deadline(600)
@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.relative_to(pages.ROOT).as_posix())
def test_page_when_its_code_runs_then_nothing_fails(page: Path, tmp_path: Path) -> None:
    assert "\n\n".join(pages.problems(page, folder=tmp_path)) == ""


def problems(tmp_path: Path, text: str) -> list[str]:
    page = tmp_path / "page.md"
    page.write_text(text)
    return pages.problems(page, folder=tmp_path)


def test_blocks_when_a_page_has_several_then_language_words_and_lines_are_right() -> None:
    named = "# Title\n```python file=train.py\nx = 1\n```\n"
    text = named + "1. Item\n   ```\n   plain\n     deep\n   ```\n````bash\n```\n````\n"
    assert list(pages.blocks(text)) == [
        Block(line=3, language="python", words=("file=train.py",), text="x = 1\n"),
        Block(line=7, language="", words=(), text="plain\n  deep\n"),
        Block(line=11, language="bash", words=(), text="```\n"),
    ]


def test_blocks_when_one_is_never_closed_then_value_error_names_its_line() -> None:
    with pytest.raises(ValueError, match="the block in line 2 is never closed"):
        list(pages.blocks("text\n```python\nx = 1\n"))


def test_commands_when_lines_continue_then_they_are_one_command() -> None:
    block = Block(
        line=5, language="bash", words=(), text="# comment\nmake demo\n\ndrivetrain launch \\\n  x.py  # more\n"
    )
    assert list(pages.commands(block)) == [(6, "make demo"), (8, "drivetrain launch   x.py  # more")]


def test_python_when_blocks_follow_each_other_then_they_share_a_namespace(tmp_path: Path) -> None:
    assert problems(tmp_path, "```python\nx = 1\n```\ntext\n```python\nassert x == 1\n```\n") == []


def test_python_when_a_block_fails_then_the_page_and_its_line_are_shown(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "```python\nx = 1\n```\ntext\n```python\n\nassert x == 2\n```\n")
    assert problem.startswith("page.md:2: exit code 1\n")
    assert 'page.md", line 7' in problem


def test_python_when_a_block_is_a_file_then_it_is_written_and_not_run(tmp_path: Path) -> None:
    assert problems(tmp_path, "```python file=a.py\nraise SystemExit(1)\n```\n```bash\npython a.py\n```\n") == []
    assert (tmp_path / "a.py").read_text() == "raise SystemExit(1)\n"


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("make nothing", "page.md:2: the Makefile has no target `nothing`"),
        ("python examples/nothing.py", "page.md:2: there is no file `examples/nothing.py`"),
        ("torchrun --nproc_per_node 2 examples/nothing.py", "page.md:2: there is no file `examples/nothing.py`"),
        ("frobnicate", "page.md:2: `frobnicate` is neither run nor checked: mark the block as `text`"),
    ],
)
def test_bash_when_a_command_names_what_is_not_there_then_it_is_a_problem(
    tmp_path: Path, command: str, problem: str
) -> None:
    assert problems(tmp_path, f"```bash\n{command}\n```\n") == [problem]


def test_bash_when_commands_name_what_is_there_then_all_is_well(tmp_path: Path) -> None:
    commands = "make demo ARGS=--help\nmake test\npython examples/language_model.py\npip install drivetrain"
    assert problems(tmp_path, f"```bash\n{commands}\n```\n") == []


def test_bash_when_drivetrain_fails_then_its_output_is_shown(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "```bash\ndrivetrain launch nothing_here.py\n```\n")
    assert problem.startswith("page.md:2: exit code 2\n")
    assert "nothing_here.py" in problem


def test_makefile_when_read_then_demo_and_test_come_first() -> None:
    text = (pages.ROOT / "Makefile").read_text()
    assert re.findall(r"^([a-z]+):", text, re.MULTILINE)[:2] == ["demo", "test"]
    assert {"demo", "test", "check", "ranks", "e2e", "docs", "soak", "bench", "clean"} <= pages.make_targets()
