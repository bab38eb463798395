"""The list of breaks fits the source as it is; that each one is noticed is what `make mutations` shows."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import run
from breaks import ROOT, BadBreak, Break, lines_found, listed, made_up

TEXT = "first = 1\nsecond = first\n"
BREAKS = listed()


def broken(pattern: str, replacement: str, *, line: int | None = None) -> Break:
    return Break(
        name="b", loses="", file="x.py", pattern=pattern, replacement=replacement, tests=("tests/x.py",), line=line
    )


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("one", BREAKS, ids=lambda one: one.name)
def test_break_when_the_source_is_as_it_is_then_changes_one_line_of_it(one: Break) -> None:
    text = (ROOT / one.path).read_text("utf-8")
    before, after = text.splitlines(), one.apply(text).splitlines()
    (number,) = lines_found(one.pattern, text)
    assert [i for i, pair in enumerate(zip(before, after, strict=True), 1) if pair[0] != pair[1]] == [number]


@pytest.mark.parametrize("one", BREAKS, ids=lambda one: one.name)
def test_break_when_listed_then_says_what_it_loses_and_names_tests_that_exist(one: Break) -> None:
    assert one.loses
    assert one.tests
    for test in one.tests:
        path, _, function = test.partition("::")
        assert not function or function.partition("[")[0] in functions_of(path), test


def test_list_when_counted_then_holds_no_break_twice() -> None:
    assert len({(one.file, one.pattern, one.replacement) for one in BREAKS}) == len(BREAKS) > 25


@pytest.mark.parametrize(
    ("pattern", "replacement", "message"),
    [
        ("third", "x", "finds no line"),
        ("first", "x", "finds lines 1, 2"),
        ("second", "second", "line 2 of src/drivetrain/x.py stays as it is"),
        ("second =", "(", "is no Python any more"),
    ],
)
def test_break_when_it_does_not_fit_then_is_refused(pattern: str, replacement: str, message: str) -> None:
    with pytest.raises(BadBreak, match=message):
        broken(pattern, replacement).apply(TEXT)


def test_rule_when_made_up_then_breaks_each_line_that_it_finds_alone(tmp_path: Path) -> None:
    path = tmp_path / "src/drivetrain/x.py"
    path.parent.mkdir(parents=True)
    path.write_text(TEXT)
    found = list(made_up(r"x.py:= (\w+)=>= not \1", tests=["tests/x.py"], root=tmp_path))
    assert [one.name for one in found] == ["x.py:1", "x.py:2"]
    assert [one.apply(TEXT) for one in found] == ["first = not 1\nsecond = first\n", "first = 1\nsecond = not first\n"]


@pytest.mark.parametrize(
    ("rule", "message"), [("x.py", "is not of the form"), ("window.py:no such line=>x", "finds no line")]
)
def test_rule_when_it_cannot_be_made_then_is_refused(rule: str, message: str) -> None:
    with pytest.raises(BadBreak, match=message):
        list(made_up(rule, tests=["tests/x.py"]))


@pytest.mark.parametrize(
    ("code", "output", "verdict", "detail"),
    [
        (0, "1 passed", "SURVIVED", ""),
        (1, "FAILED tests/x.py::test_a[1] - assert 1 == 2\n1 failed", "killed", "by test_a[1] - assert 1 == 2"),
        (1, "Timeout (0:01:15)!", "killed", "by the deadline of a test"),
        (None, "", "UNUSABLE", "by time: no end after 3 s"),
        (2, "ERROR tests/x.py - NameError\n1 error", "UNUSABLE", "ERROR tests/x.py - NameError"),
        (4, "ERROR: not found: tests/x.py::test_b", "UNUSABLE", "ERROR: not found: tests/x.py::test_b"),
        (-11, "", "UNUSABLE", "exit code -11"),
    ],
)
def test_judge_when_tests_have_ended_then_only_a_failure_or_no_end_kills(
    code: int | None, output: str, verdict: str, detail: str
) -> None:
    assert run.judge(run.Ended(code=code, output=output), seconds=3) == (verdict, detail)


def test_list_when_asked_for_then_is_printed_and_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--list"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == [one.name for one in BREAKS]
