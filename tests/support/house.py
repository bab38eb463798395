"""The rules of this repository that no other tool checks: who imports whom, sizes, and words that must not appear.

Each check takes a file, or all of them, and yields problems as `path:line: what is wrong`. Run as a program, it
prints them all.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
PACKAGE = "drivetrain"
CODE_FOLDERS = ("src", "tests", "examples", "benchmarks")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80

# Imports point down. Names are the parts directly below the package; the package itself shows them all to users.
LAYERS: Mapping[str, int] = {
    "errors": 0,
    "registry": 0,
    "config": 1,
    "cluster": 2,
    "mesh": 3,
    "precision": 3,
    "window": 3,
    "protocols": 3,
    "strategies": 4,
    "data": 4,
    "checkpoint": 4,
    "launch": 4,
    "trackers": 4,
    "planner": 4,
    "accelerator": 5,
    "trainer": 6,
    "cli": 7,
    "testing": 7,
    "": 8,
}
CONFIG_LAYER = LAYERS["config"]
SIBLINGS_APART = LAYERS["strategies"]  # parts of this layer meet only above it

# Without torch: what `--help` imports, and what a launcher needs to know.
TORCH_FREE = re.compile(
    r"drivetrain(\.(errors|registry|config(\..+)?|cluster(\.environ)?|cli(\.main)?)"
    r"|\.strategies(\.(?!(common|units)$)[^.]+(\.settings)?)?)?"
)
ENVIRONMENT_READERS = re.compile(r"src/drivetrain/cluster/environ\.py")
PICKLERS = re.compile(r"src/drivetrain/testing/.+|tests/.+|benchmarks/.+")
ORDINARY_WORDS = frozenset({"single"})  # strategies whose name is also a plain word


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A parsed file; `path` is relative to the repository's root, with slashes."""

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, path: str, text: str) -> SourceFile:
        """Return the file with its syntax tree."""
        return cls(path=path, text=text, tree=ast.parse(text, filename=path))

    @property
    def module(self) -> str:
        """The dotted name below `src`; empty for a file elsewhere."""
        parts = PurePosixPath(self.path).with_suffix("").parts
        if parts[0] != "src":
            return ""
        return ".".join(parts[1:-1] if parts[-1] == "__init__" else parts[1:])

    def problem(self, where: ast.AST | int, what: str) -> str:
        """Return `what` with the place in front."""
        line = where if isinstance(where, int) else getattr(where, "lineno", 1)
        return f"{self.path}:{line}: {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported module, and whether importing the file is enough to import it too."""

    target: str
    node: ast.AST
    is_eager: bool


def read_files(root: Path = ROOT) -> list[SourceFile]:
    """Return every Python file of the repository's own."""
    paths = sorted(path for folder in CODE_FOLDERS for path in (root / folder).rglob("*.py"))
    return [SourceFile.parse(path.relative_to(root).as_posix(), path.read_text("utf-8")) for path in paths]


# -- imports ---------------------------------------------------------------------------------------------------------


def imports_of(file: SourceFile, *, modules: Iterable[str]) -> Iterator[Import]:
    """Yield the modules that `file` imports; `from package import name` means `package.name` if that is a module."""
    known = frozenset(modules)
    lazy = {id(inner) for node in ast.walk(file.tree) if _is_lazy(node) for inner in ast.walk(node)}
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [name if name in known else node.module for name in names]
        else:
            continue
        for target in targets:
            yield Import(target=target, node=node, is_eager=id(node) not in lazy)


def _is_lazy(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def part_of(module: str) -> str:
    """Return the part below the package that a module belongs to; empty for the package itself."""
    return module.removeprefix(PACKAGE).lstrip(".").partition(".")[0]


def layer_problems(file: SourceFile, *, modules: Iterable[str]) -> Iterator[str]:
    """Yield imports that point up or sideways, lazy ones and those for types included."""
    part = part_of(file.module)
    if not file.module:
        return
    if part not in LAYERS:
        yield file.problem(1, f"`{part}` has no layer: give it one in `LAYERS`")
        return
    for imported in imports_of(file, modules=modules):
        if imported.target.partition(".")[0] == PACKAGE:
            reason = _why_not(file.module, imported.target)
            if reason:
                yield file.problem(imported.node, f"`{file.module}` imports `{imported.target}`: {reason}")


def _why_not(importer: str, target: str) -> str | None:
    own, other = part_of(importer), part_of(target)
    own_layer, other_layer = LAYERS[own], LAYERS.get(other, LAYERS[""])
    if own == "strategies" and importer.endswith(".settings"):
        return None if other_layer <= CONFIG_LAYER else "settings of a strategy belong to the config layer"
    if own == other == "strategies":
        own_name, other_name = strategy_of(importer), strategy_of(target)
        return None if other_name in (None, own_name) else "strategies do not know each other"
    if other_layer > own_layer:
        return f"layer {own_layer} does not import layer {other_layer}"
    if other_layer == own_layer == SIBLINGS_APART and own != other:
        return f"parts of layer {own_layer} do not import each other"
    return None


def strategy_of(module: str) -> str | None:
    """Return the strategy whose folder a module lies in; plain modules of `strategies` belong to none."""
    parts = module.split(".")
    is_inside = parts[:2] == [PACKAGE, "strategies"] and len(parts) > 2
    return parts[2] if is_inside and parts[2] not in ("common", "units") else None


def cycle_problems(files: Iterable[SourceFile]) -> Iterator[str]:
    """Yield each circle of imports that happen while modules load."""
    by_module = {file.module: file for file in files if file.module}
    edges = {
        module: sorted(
            {found.target for found in imports_of(file, modules=by_module) if found.is_eager} & by_module.keys()
        )
        for module, file in by_module.items()
    }
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> Iterator[str]:
        if module in path:
            circle = [*path[path.index(module) :], module]
            yield by_module[module].problem(1, "import cycle: " + " -> ".join(circle))
        elif module not in done:
            for target in edges[module]:
                yield from visit(target, [*path, module])
            done.add(module)

    for module in sorted(edges):
        yield from visit(module, [])


def torch_problems(file: SourceFile) -> Iterator[str]:
    """Yield imports of torch in modules that must load without it."""
    if file.module and TORCH_FREE.fullmatch(file.module):
        for imported in imports_of(file, modules=()):
            if imported.is_eager and imported.target.partition(".")[0] == "torch":
                yield file.problem(imported.node, f"`{file.module}` must load without torch")


# -- sizes -----------------------------------------------------------------------------------------------------------


def code_lines(file: SourceFile) -> frozenset[int]:
    """Return the numbers of the lines that hold code: neither blank nor only comment nor docstring."""
    idle = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
        if token.type not in idle:
            lines.update(range(token.start[0], token.end[0] + 1))
    for docstring in _docstrings(file.tree):
        lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return frozenset(lines)


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the texts that stand alone: docstrings, and those below a field, which document it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def size_problems(file: SourceFile) -> Iterator[str]:
    """Yield files and functions that are too long."""
    lines = code_lines(file)
    if len(lines) > MAX_FILE_LINES:
        yield file.problem(1, f"{len(lines)} lines of code, at most {MAX_FILE_LINES}")
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = len(lines.intersection(range(node.lineno, (node.end_lineno or node.lineno) + 1)))
            if count > MAX_FUNCTION_LINES:
                yield file.problem(node, f"`{node.name}` has {count} lines of code, at most {MAX_FUNCTION_LINES}")


# -- names and words -------------------------------------------------------------------------------------------------


def environment_problems(file: SourceFile) -> Iterator[str]:
    """Yield uses of the process's environment outside the modules whose work that is."""
    if not file.module or ENVIRONMENT_READERS.fullmatch(file.path):
        return
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(file.tree):
        is_attribute = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os" and node.attr in names
        is_import = isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}
        if is_attribute or is_import:
            yield file.problem(node, "only cluster/environ.py touches the environment")


def strategy_names(files: Iterable[SourceFile]) -> frozenset[str]:
    """Return the names of the folders below `strategies`."""
    return frozenset(
        name for file in files if file.path.endswith("/settings.py") and (name := strategy_of(file.module))
    )


def strategy_name_problems(file: SourceFile, *, names: Iterable[str]) -> Iterator[str]:
    """Yield the name of a strategy in code outside its folder.

    Identifiers and texts are split into words, so `DDPStrategy` and `is_ddp` count; docstrings do not. Its section,
    such as `ddp_config`, is what users write, and may appear.
    """
    if not file.module:
        return
    docstrings = {id(node) for node in _docstrings(file.tree)}
    foreign = {name for name in names if name not in ORDINARY_WORDS and strategy_of(file.module) != name}
    for node in ast.walk(file.tree):
        for text in _texts(node) if id(node) not in docstrings else ():
            for name in sorted(foreign & _words(text, sections={f"{name}_config" for name in foreign})):
                yield file.problem(node, f"`{text}` names the strategy `{name}` outside its folder")


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the identifiers and the text that a node itself holds."""
    for field in ("id", "attr", "arg", "name", "asname", "module", "value"):
        value = getattr(node, field, None)
        if isinstance(value, str):
            yield value


def _words(text: str, *, sections: Iterable[str]) -> set[str]:
    for section in sections:
        text = re.sub(rf"\b{section}\b", " ", text)
    return {word.lower() for word in re.findall(r"[A-Z]{2,}\d*(?![a-z])|[A-Z]?[a-z]+\d*|[A-Z]+\d*", text)}


def ascii_problems(file: SourceFile) -> Iterator[str]:
    """Yield lines with characters beyond ASCII."""
    for number, line in enumerate(file.text.splitlines(), start=1):
        if not line.isascii():
            yield file.problem(number, "a character beyond ASCII")


# In pieces, so that this file may hold them.
_UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")
_PLACES = re.compile(r"/wo" + r"rk/|/ro" + r"ot/|py" + r"pi\.org|pythonhos" + r"ted\.org|download\.py" + r"torch\.org")


def word_problems(path: str, text: str) -> Iterator[str]:
    """Yield unfinished business, and names of places on one machine or of package registries, in any text file."""
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern, what in (
            (_UNFINISHED, "unfinished: open an issue"),
            (_PLACES, "names a place outside the project"),
        ):
            found = pattern.search(line)
            if found:
                yield f"{path}:{number}: `{found.group()}` {what}"


def call_problems(file: SourceFile) -> Iterator[str]:
    """Yield calls that run code found in data, or a shell."""
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if name in ("pickle.load", "pickle.loads", "pickle.Unpickler") and not PICKLERS.fullmatch(file.path):
            yield file.problem(node, f"`{name}` can run code: files are data")
        elif name == "torch.load" and given.get("weights_only") != "True":
            yield file.problem(node, "`torch.load` without `weights_only=True` can run code")
        elif name in ("yaml.load", "yaml.unsafe_load", "os.system", "eval"):
            yield file.problem(node, f"`{name}` can run code")
        elif given.get("shell") == "True":
            yield file.problem(node, "`shell=True`: hand over a list of arguments")


# -- all of it -------------------------------------------------------------------------------------------------------


def all_problems(root: Path = ROOT) -> list[str]:
    """Return every problem of the repository at `root`."""
    files = read_files(root)
    modules = {file.module for file in files if file.module}
    names = strategy_names(files)
    per_file: tuple[Callable[[SourceFile], Iterator[str]], ...] = (
        torch_problems,
        size_problems,
        environment_problems,
        ascii_problems,
        call_problems,
        lambda file: layer_problems(file, modules=modules),
        lambda file: strategy_name_problems(file, names=names),
    )
    problems = [problem for file in files for check in per_file for problem in check(file)]
    problems += cycle_problems(files)
    for path in _text_files(root):
        problems += word_problems(path.relative_to(root).as_posix(), path.read_text("utf-8", errors="replace"))
    return problems


def _text_files(root: Path) -> Iterator[Path]:
    yield from (
        path
        for name in ("README.md", "Makefile", "pyproject.toml", "constraints.txt")
        if (path := root / name).exists()
    )
    for folder in (*CODE_FOLDERS, "docs", ".ci"):
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and path.suffix in {"", ".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".sh"}:
                yield path


def main() -> int:
    """Print all problems; return the exit code."""
    problems = all_problems()
    print("\n".join(problems or ["house rules: no problem"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
