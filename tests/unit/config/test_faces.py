"""Every face of the schema shows every setting."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from drivetrain.config import flags, nearest, resolve
from drivetrain.config.keys import by_flat_name, keys, sections
from drivetrain.config.layers import OWN_VARIABLES
from drivetrain.config.migrate import RENAMED, rule_for
from drivetrain.config.reference import reference


def test_flags_when_listed_then_every_setting_has_one_and_no_name_repeats() -> None:
    assert [flag.path for flag in flags() if flag.stands_for is None] == list(keys())
    names = [name for flag in flags() for name in (*flag.names, *flag.aliases)]
    assert len(names) == len(set(names))


def test_flags_when_spelled_then_underscore_and_hyphen_both_exist() -> None:
    table = {flag.path: flag for flag in flags()}
    assert table["num_processes"].names == ("--num_processes", "--num-processes")
    assert table["seed"].names == ("--seed",)
    assert table["ddp_config.bucket_cap_mb"].names == ("--ddp_bucket_cap_mb", "--ddp-bucket-cap-mb")
    assert (table["use_cpu"].aliases, table["use_cpu"].kind) == (("--cpu",), "bool")
    assert table["mixed_precision"].choices == ("no", "fp16", "bf16")
    assert (table["non_finite"].default_text, table["seed"].default_text) == ("raise", "")


@pytest.mark.parametrize("path", list(keys()))
def test_setting_when_described_then_has_a_help_text_that_explains_an_absent_default(path: str) -> None:
    key = keys()[path]
    assert re.fullmatch(r"[A-Z].*\.", key.help)
    assert key.setting.panel
    assert (key.default is None) == ("Unset" in key.help or "Needed" in key.help)


def test_names_when_compared_then_no_two_meanings_share_one() -> None:
    variables = {key.variable for key in keys().values()}
    assert len(variables) == len(keys())
    assert not variables & OWN_VARIABLES
    top = set(sections()[""]) | set(sections())
    assert not [name for name in {*top, *by_flat_name()} if rule_for(name)], (
        "a key of the schema is never looked up among the foreign ones"
    )
    assert {rule.path for rule in RENAMED.values()} <= set(keys())


def test_reference_when_printed_then_has_a_row_for_every_setting() -> None:
    text = reference()
    assert [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")] == list(keys())


def test_defaults_when_resolved_then_are_those_of_the_table() -> None:
    config = resolve([]).config
    for key in keys().values():
        holder = getattr(config, key.section) if key.section else config
        assert getattr(holder, key.name) == key.default


def test_nearest_when_nothing_is_near_then_is_none() -> None:
    assert nearest("num_proceses", ["num_processes", "num_machines"]) == "num_processes"
    assert nearest("xyzzy", ["num_processes"]) is None


def test_config_when_imported_then_loads_neither_torch_nor_rich_nor_yaml() -> None:
    code = (
        "import sys; from drivetrain.config import flags, resolve; flags(); resolve([]); "
        "sys.exit(' '.join({'torch', 'rich', 'ruamel', 'numpy'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")
