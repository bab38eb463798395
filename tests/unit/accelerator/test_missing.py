"""What an AttributeError of the accelerator says."""

from __future__ import annotations

import re

import pytest

from drivetrain import Accelerator
from drivetrain.accelerator import missing
from drivetrain.accelerator.missing import explain

MEMBERS = dir(Accelerator)


@pytest.mark.parametrize("name", sorted(missing._INSTEAD))
def test_member_when_only_accelerate_has_it_then_is_explained_by_members_that_exist(name: str) -> None:
    assert name not in MEMBERS, "what exists needs no explanation"
    text = explain(name, members=MEMBERS)
    assert text.startswith(f"Accelerator has no `{name}`: ")
    assert "{" not in text
    assert {*re.findall(r"accelerator\.(\w+)", text)} <= {*MEMBERS, "config"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("save_state", "not there yet"),
        ("load_state", "not there yet"),
        ("save", "`accelerator.save_model`"),
        ("even_batches", "`accelerator.config.even_batches`"),
        ("fsdp_plugin", "read `accelerator.config.fsdp_config`"),
        ("prepare_pippy", "did you mean `prepare`?"),
    ],
)
def test_member_when_known_then_the_sentence_says_what_to_do(name: str, words: str) -> None:
    assert words in explain(name, members=MEMBERS)


def test_member_when_misspelled_then_the_nearest_public_one_is_named() -> None:
    assert explain("is_main_proces", members=MEMBERS).endswith("hint: did you mean `is_main_process`?")
    assert explain("_ledgr", members=["_ledger"]) == "Accelerator has no `_ledgr`"


def test_member_when_nothing_is_near_then_only_its_absence_is_said() -> None:
    assert explain("xyzzy", members=MEMBERS) == "Accelerator has no `xyzzy`"
