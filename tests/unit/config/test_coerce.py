from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.config.coerce import Unfit, coerce
from drivetrain.config.keys import Key, keys
from drivetrain.config.section import Setting
from drivetrain.config.sources import Source, SourceKind, Value

STAGES = Key(
    path="stage",
    section="",
    name="stage",
    flat="stage",
    kind="choice",
    choices=(0, 1, 2),
    default=1,
    help="",
    setting=Setting(),
)


def key(path: str) -> Key:
    return STAGES if path == "stage" else keys()[path]


def value(raw: object, kind: SourceKind = "flag") -> Value:
    return Value(raw=raw, source=Source(kind=kind, place="here"), written="key")


@pytest.mark.parametrize(
    ("path", "raw", "result"),
    [
        *[("use_cpu", text, True) for text in ("true", "True", "1", "yes", "on", " yes ")],
        *[("use_cpu", text, False) for text in ("false", "0", "no", "off")],
        ("use_cpu", True, True),
        ("num_processes", "12", 12),
        ("num_processes", 12, 12),
        ("ddp_config.timeout", "1e2", 100.0),
        ("ddp_config.timeout", 60, 60.0),
        ("gpu_ids", "0,1", "0,1"),
        ("gpu_ids", 0, "0"),
        ("gpu_ids", [0, 1], "0,1"),
        ("mixed_precision", "bf16", "bf16"),
        ("mixed_precision", False, "no"),
        ("distributed_type", False, "NO"),
        ("project_dir", Path("a/b"), "a/b"),
        ("stage", "2", 2),
        ("stage", 2, 2),
    ],
)
def test_coerce_when_value_fits_then_has_the_type_of_the_setting(path: str, raw: object, result: object) -> None:
    found = coerce(key(path), value(raw))
    assert (type(found), found) == (type(result), result)


@pytest.mark.parametrize(
    ("path", "raw", "hint"),
    [
        ("use_cpu", "maybe", None),
        ("use_cpu", 1, None),
        ("use_cpu", [], None),
        ("num_processes", True, None),
        ("num_processes", 2.0, "write `2`"),
        ("num_processes", 2.5, None),
        ("num_processes", float("inf"), None),
        ("num_processes", "two", None),
        ("num_processes", "9" * 5000, None),
        ("num_processes", {"a": 1}, None),
        ("ddp_config.timeout", True, None),
        ("ddp_config.timeout", "soon", None),
        ("gpu_ids", True, "put it in quotes"),
        ("gpu_ids", 0.1, "put it in quotes"),
        ("project_dir", ["a", "b"], None),
        ("mixed_precision", "bf61", "did you mean `bf16`?"),
        ("mixed_precision", True, None),
        ("distributed_type", "multi-gpu", "did you mean `MULTI_GPU`?"),
        ("distributed_type", "DEEPSPEED", None),
        ("distributed_type", "MULTI_XPU", None),
        ("stage", True, None),
        ("stage", 2.0, None),
        ("stage", "3", None),
    ],
)
def test_coerce_when_value_does_not_fit_then_says_why(path: str, raw: object, hint: str | None) -> None:
    with pytest.raises(Unfit) as caught:
        coerce(key(path), value(raw))
    assert caught.value.hint == hint
    assert len(caught.value.message) < 120


@pytest.mark.parametrize(("path", "raw"), [("num_processes", "2"), ("use_cpu", "yes"), ("ddp_config.timeout", "60")])
def test_coerce_when_text_comes_from_code_then_is_not_read_as_a_number(path: str, raw: str) -> None:
    with pytest.raises(Unfit):
        coerce(key(path), value(raw, "code"))
