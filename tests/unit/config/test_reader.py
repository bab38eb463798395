from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.config.reader import MAX_BYTES, MAX_DEPTH, parse, plain_scalar, read_entries
from drivetrain.config.sources import Entry, plain
from drivetrain.errors import ConfigError, Problem


def values(text: str) -> object:
    return plain(parse(text, name="run.yaml"))


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, name="run.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("off", "off"),
        ("Yes", "Yes"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"),
        ("0777", 777),
        ("0o17", 15),
        ("0x1F", 31),
        ("-3", -3),
        ("1e-4", 0.0001),
        ("1.5", 1.5),
        (".5", 0.5),
        ("5.", 5.0),
        ("1_000", "1_000"),
        ("0,1", "0,1"),
        (".inf", float("inf")),
        ("-.INF", float("-inf")),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_plain_scalar_when_unquoted_then_follows_the_core_schema_of_yaml_1_2(text: str, value: object) -> None:
    found = plain_scalar(text)
    assert (type(found), found) == (type(value), value)


def test_parse_when_scalars_are_quoted_then_keeps_text() -> None:
    assert values("a: 'true'\nb: \"1\"\nc: |\n  2\nd: ''\n") == {"a": "true", "b": "1", "c": "2\n", "d": ""}


def test_parse_when_keys_repeat_then_keeps_all_with_their_lines() -> None:
    entries = parse("a: 1\nb:\n  c: 2\n  c: 3\na: 4\n", name="run.yaml")
    assert [(entry.key, entry.place) for entry in entries] == [
        ("a", "run.yaml line 1"),
        ("b", "run.yaml line 2"),
        ("a", "run.yaml line 5"),
    ]
    inner = entries[1].value
    assert isinstance(inner, tuple)
    assert [entry.place for entry in inner] == ["run.yaml line 3", "run.yaml line 4"]


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "---\n...\n", "null\n"])
def test_parse_when_there_is_nothing_then_returns_no_entries(text: str) -> None:
    assert parse(text, name="run.yaml") == ()


def test_parse_when_text_is_json_then_reads_what_json_reads() -> None:
    text = '{\n\t"a": [1, 2.5, null, true],\r\n\t"b": {"c": "\\u00e9\\ud83d\\ude00 \\/ x"}, "d": {}\n}'
    assert values(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        pytest.param("a: 1\nb: &x 2\n", 2, "`&x` is an anchor", id="anchor"),
        pytest.param("a: 1\nb: *x\n", 2, "`*x` is an alias", id="alias"),
        pytest.param("a: &a [*a]\n", 1, "`&a` is an anchor", id="self-reference"),
        pytest.param("&k a: 1\n", 1, "`&k` is an anchor", id="anchor-on-a-key"),
        pytest.param("\n\na: !!python/object/apply:os.system [ls]\n", 3, "is a tag", id="python-tag"),
        pytest.param("a: !!str 3\n", 1, "is a tag", id="standard-tag"),
        pytest.param("a: !own {}\n", 1, "`!own` is a tag", id="own-tag"),
        pytest.param("a: ! 3\n", 1, "is a tag", id="bare-tag"),
        pytest.param("!!map {a: 1}\n", 1, "is a tag", id="tag-at-the-root"),
        pytest.param("a: 1\n---\nb: 2\n", 2, "second document", id="second-document"),
        pytest.param("- a\n- b\n", 1, "`key: value` pairs", id="list-at-the-root"),
        pytest.param("hello\n", 1, "`key: value` pairs", id="text-at-the-root"),
        pytest.param("a: 1\n? [b, c]\n: 2\n", 2, "a key must be text", id="list-as-key"),
        pytest.param("a: 1\nb: [1, 2\nc: 3\n", 3, "not valid YAML or JSON", id="open-bracket"),
        pytest.param("a: 1\nb: c: 2\n", 2, "not valid YAML or JSON", id="two-colons"),
        pytest.param("a: 1\nb: 'x\n", 3, "not valid YAML or JSON", id="open-quote"),
        pytest.param("a: 1\nb: \x00\n", 2, "not valid YAML or JSON", id="null-character"),
        pytest.param("a: " + "[" * 100_000, 1, "nested deeper than", id="bracket-bomb"),
        pytest.param('a: "\\ud83d"\n', 1, "surrogate", id="half-a-surrogate"),
    ],
)
def test_parse_when_text_is_not_plain_data_then_names_the_line(text: str, line: int, words: str) -> None:
    message = refusal(text)
    assert words in message
    assert f"run.yaml line {line}\n" in message


@pytest.mark.parametrize("style", ["block", "flow"])
def test_parse_when_nesting_reaches_the_bound_then_one_more_level_is_refused(style: str) -> None:
    def nested(levels: int) -> str:
        if style == "flow":
            return "{a: " * levels + "1" + "}" * levels
        return "".join(f"{' ' * level}a:\n" for level in range(levels))

    assert parse(nested(MAX_DEPTH), name="run.yaml")
    assert f"nested deeper than {MAX_DEPTH}" in refusal(nested(MAX_DEPTH + 1))


@given(st.text(alphabet="{}[]:,-?&*!|>%@'\"#\n\t \\~\x00\x85\ue000\u00e9<.01ab", max_size=40))
def test_parse_when_text_is_arbitrary_then_gives_entries_or_one_problem(text: str) -> None:
    problems: tuple[Problem, ...] = ()
    entries: tuple[Entry, ...] = ()
    try:
        entries = parse(f"seed: 1\n{text}", name="run.yaml")
    except ConfigError as error:
        problems = error.problems
    places = {"run.yaml", *(f"run.yaml line {line}" for line in range(1, 45))}
    assert [entry.key for entry in entries[:1]] + [problem.source in places for problem in problems] in (
        ["seed"],
        [True],
    )


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_read_entries_when_encoding_is_unicode_then_reads_the_text(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes("project_dir: caf\u00e9\r\nseed: 3\r\n".encode(encoding))
    assert plain(read_entries(path)) == {"project_dir": "caf\u00e9", "seed": 3}


def test_read_entries_when_encoding_is_another_then_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes("seed: 3\nproject_dir: caf\u00e9\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"run\.yaml line 2\n.*not UTF-8"):
        read_entries(path)


def test_read_entries_when_file_is_huge_then_is_refused_by_size(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"#" * MAX_BYTES)
    assert read_entries(path) == ()
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        read_entries(path)


@pytest.mark.parametrize(("name", "words"), [("absent.yaml", "No such file"), ("", "Is a directory")])
def test_read_entries_when_there_is_no_such_file_then_says_so(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_entries(tmp_path / name)
