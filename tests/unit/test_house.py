from __future__ import annotations

import subprocess
import sys

import pytest

import house
from house import SourceFile

MODULES = (
    "drivetrain",
    "drivetrain.errors",
    "drivetrain.config",
    "drivetrain.window",
    "drivetrain.launch",
    "drivetrain.data",
    "drivetrain.accelerator",
    "drivetrain.strategies.ddp.settings",
    "drivetrain.strategies.ddp.strategy",
    "drivetrain.strategies.common",
)


def source(text: str, *, path: str = "src/drivetrain/data/loader.py") -> SourceFile:
    return SourceFile.parse(path, text)


def layers(text: str, *, path: str) -> list[str]:
    return list(house.layer_problems(source(text, path=path), modules=MODULES))


def test_repository_when_checked_then_it_keeps_every_rule() -> None:
    assert "\n".join(house.all_problems()) == ""


def torch_free_modules() -> list[str]:
    modules = (file.module for file in house.read_files() if file.module)
    return [module for module in modules if house.TORCH_FREE.fullmatch(module)]


def test_torch_free_modules_when_imported_then_torch_is_not_loaded() -> None:
    names = torch_free_modules()
    assert {"drivetrain", "drivetrain.errors", "drivetrain.registry"} <= set(names)
    code = "\n".join(
        [
            "import sys",
            "from importlib import import_module",
            f"for name in {names!r}:",
            "    import_module(name)",
            "    assert 'torch' not in sys.modules, name",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("path", "text", "reason"),
    [
        ("src/drivetrain/errors.py", "import drivetrain.config", "layer 0 does not import layer 1"),
        ("src/drivetrain/errors.py", "def f():\n    from drivetrain import config", "layer 0 does not import layer 1"),
        ("src/drivetrain/data/loader.py", "from drivetrain import Accelerator", "layer 4 does not import layer 8"),
        ("src/drivetrain/data/loader.py", "from drivetrain.launch import start", "parts of layer 4 do not import each"),
        ("src/drivetrain/strategies/ddp/settings.py", "import drivetrain.window", "belong to the config layer"),
        (
            "src/drivetrain/strategies/single/x.py",
            "import drivetrain.strategies.ddp.strategy",
            "do not know each other",
        ),
        ("src/drivetrain/strategies/common.py", "import drivetrain.strategies.ddp.strategy", "do not know each other"),
        ("src/drivetrain/novelty/x.py", "", "`novelty` has no layer"),
        (
            "src/drivetrain/window.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import drivetrain.accelerator",
            "layer 3 does not import layer 5",
        ),
    ],
)
def test_layers_when_an_import_points_up_or_sideways_then_it_is_a_problem(path: str, text: str, reason: str) -> None:
    (problem,) = layers(text, path=path)
    assert problem.startswith(f"{path}:")
    assert reason in problem


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("src/drivetrain/accelerator/facade.py", "from drivetrain import errors, launch, data\nimport torch"),
        ("src/drivetrain/data/loader.py", "import drivetrain.window\nimport drivetrain.data.order"),
        ("src/drivetrain/strategies/ddp/strategy.py", "import drivetrain.strategies.ddp.settings"),
        ("src/drivetrain/strategies/ddp/strategy.py", "from drivetrain.strategies import common"),
        ("src/drivetrain/strategies/ddp/settings.py", "from drivetrain import config, errors"),
        ("tests/unit/test_x.py", "import drivetrain.accelerator"),
    ],
)
def test_layers_when_imports_point_down_then_all_is_well(path: str, text: str) -> None:
    assert layers(text, path=path) == []


def test_cycles_when_two_modules_import_each_other_then_the_circle_is_shown() -> None:
    files = [
        source("from drivetrain.data import b", path="src/drivetrain/data/a.py"),
        source("import drivetrain.data.a", path="src/drivetrain/data/b.py"),
    ]
    assert list(house.cycle_problems(files)) == [
        "src/drivetrain/data/a.py:1: import cycle: drivetrain.data.a -> drivetrain.data.b -> drivetrain.data.a"
    ]


def test_cycles_when_one_import_is_lazy_then_there_is_none() -> None:
    files = [
        source("import drivetrain.data.b", path="src/drivetrain/data/a.py"),
        source("def f():\n    import drivetrain.data.a", path="src/drivetrain/data/b.py"),
    ]
    assert list(house.cycle_problems(files)) == []


@pytest.mark.parametrize("text", ["import torch", "from torch import nn", "import torch.nn as nn"])
@pytest.mark.parametrize(
    "path",
    ["errors.py", "config/load.py", "cli/main.py", "cluster/environ.py", "strategies/ddp/settings.py", "__init__.py"],
)
def test_torch_when_imported_where_it_must_not_be_then_it_is_a_problem(path: str, text: str) -> None:
    assert len(list(house.torch_problems(source(text, path=f"src/drivetrain/{path}")))) == 1


@pytest.mark.parametrize("path", ["strategies/ddp/strategy.py", "strategies/common.py", "cluster/device.py"])
def test_torch_when_imported_elsewhere_then_all_is_well(path: str) -> None:
    assert list(house.torch_problems(source("import torch", path=f"src/drivetrain/{path}"))) == []


def test_code_lines_when_lines_say_nothing_to_python_then_they_do_not_count() -> None:
    text = '''"""Docstring
over two lines."""

# comment
x = """a text
over two lines"""


def f():  # comment
    """Docstring."""
    return x
'''
    assert house.code_lines(source(text)) == {5, 6, 9, 11}


@pytest.mark.parametrize(("extra", "count"), [(0, 0), (1, 1)])
def test_sizes_when_one_line_above_the_limit_then_it_is_a_problem(extra: int, count: int) -> None:
    file = source("x = 1\n" * (house.MAX_FILE_LINES + extra))
    body = '    """Doc."""\n' + "    x = 1\n" * (house.MAX_FUNCTION_LINES - 1 + extra)
    function = source("def f():\n" + body)
    assert len(list(house.size_problems(file))) == count
    assert len(list(house.size_problems(function))) == count


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ['A']",
        "import os\nos.getenv('A')",
        "from os import environ",
        "import os\nos.putenv('A', '')",
    ],
)
def test_environment_when_touched_outside_its_reader_then_it_is_a_problem(text: str) -> None:
    assert len(list(house.environment_problems(source(text)))) == 1
    assert list(house.environment_problems(source(text, path="src/drivetrain/cluster/environ.py"))) == []
    assert list(house.environment_problems(source(text, path="tests/unit/test_x.py"))) == []


@pytest.mark.parametrize(
    "text",
    [
        "if kind == 'ddp': pass",
        "is_ddp = True",
        "x.ddp",
        "f(ddp=1)",
        "class DDPEngine: pass",
        "say('DDP needs two ranks')",
        "import a.ddp",
    ],
)
def test_strategy_names_when_used_outside_the_folder_then_it_is_a_problem(text: str) -> None:
    problems = list(house.strategy_name_problems(source(text), names={"ddp"}))
    assert len(problems) == 1
    assert "names the strategy `ddp` outside its folder" in problems[0]
    inside = source(text, path="src/drivetrain/strategies/ddp/strategy.py")
    assert list(house.strategy_name_problems(inside, names={"ddp"})) == []


@pytest.mark.parametrize(
    "text",
    [
        '"""Works with ddp."""',
        "# ddp",
        "f(ddp_config=None)",
        "hint = 'see `ddp_config.bucket_cap_mb`'",
        "add_ppd = 1",
        "single = 1",
    ],
)
def test_strategy_names_when_they_are_prose_or_a_section_then_all_is_well(text: str) -> None:
    assert list(house.strategy_name_problems(source(text), names={"ddp", "single"})) == []


def test_strategy_names_when_folders_have_settings_then_they_are_found() -> None:
    files = [source("", path=f"src/drivetrain/strategies/{name}/settings.py") for name in ("one", "two")]
    assert house.strategy_names([*files, source("")]) == {"one", "two"}


def test_ascii_when_a_line_holds_another_character_then_it_is_a_problem() -> None:
    assert list(house.ascii_problems(source("x = 1\ny = '\u00e9'\n"))) == [
        "src/drivetrain/data/loader.py:2: a character beyond ASCII"
    ]


@pytest.mark.parametrize(
    "word", ["# TO" + "DO later", "FIX" + "ME", "cd /wo" + "rk/main", "https://py" + "pi.org/simple"]
)
def test_words_when_forbidden_then_they_are_a_problem(word: str) -> None:
    (problem,) = house.word_problems("README.md", f"fine\n{word}\n")
    assert problem.startswith("README.md:2: ")


def test_words_when_ordinary_then_all_is_well() -> None:
    assert list(house.word_problems("README.md", "a mastodon does the work / root of all\n")) == []


@pytest.mark.parametrize(
    "text",
    [
        "pickle.load(f)",
        "pickle.loads(b)",
        "torch.load(p)",
        "torch.load(p, weights_only=False)",
        "subprocess.run('ls', shell=True)",
        "yaml.load(f)",
        "os.system('ls')",
        "eval('1')",
    ],
)
def test_calls_when_they_can_run_code_from_data_then_they_are_a_problem(text: str) -> None:
    assert len(list(house.call_problems(source(text)))) == 1


@pytest.mark.parametrize(
    "text", ["torch.load(p, weights_only=True)", "model.eval()", "subprocess.run(['ls'])", "yaml.safe_load(f)"]
)
def test_calls_when_they_are_safe_then_all_is_well(text: str) -> None:
    assert list(house.call_problems(source(text))) == []


def test_calls_when_the_test_harness_pickles_then_all_is_well() -> None:
    assert list(house.call_problems(source("pickle.loads(b)", path="src/drivetrain/testing/ranks.py"))) == []
