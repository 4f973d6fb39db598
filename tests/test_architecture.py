"""The house of docs/architecture.md: arrows point one way, and a room does not load what stands above it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import qarl_trl


PACKAGE = Path(qarl_trl.__file__).parent
# What each room may import of this package, also for annotations; the files at the top may import everything but `tools`.
ROOMS = {
    "quant": {"quant"},
    "rollout": {"rollout", "quant", "config", "_compat"},
    "learner": {"learner", "quant"},
    "export": {"export", "quant", "config", ""},
    "checkpoints": {"checkpoints", "quant", "export", "config", "_compat"},
    "metrics": {"metrics", "loss", "quant", "config"},
    "tools.evaluate": {"tools.evaluate", "export", "data", "rewards", "rollout", "quant", "redact", "_compat"},
    "tools.plan": {"tools.plan", "quant", "optim", "rollout", "train"},
    "tools.doctor": {"tools.doctor", "tools.plan", "tools.evaluate", "export", "rollout", "quant"}
    | {"train", "validate", "config", "rewards", "processes", "_compat"},
    "tools.report": {"tools.report", "redact"},
}


def imports(path: Path, lazy: bool) -> set[str]:
    """Modules of this package that a file imports, as dotted paths below it."""
    package = ["qarl_trl", *path.relative_to(PACKAGE).parent.parts]
    tree = ast.parse(path.read_text())
    annotations = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]  # TYPE_CHECKING
    found = set()
    for node in ast.walk(tree) if lazy else tree.body + annotations:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module or "").split(".")
            base = [part for part in base if part]
            for alias in node.names:
                whole = PACKAGE.joinpath(*base[1:], alias.name)
                is_module = whole.with_suffix(".py").exists() or (whole / "__init__.py").exists()
                found.add(".".join([*base, alias.name][1:] if is_module else base[1:]))
    return found


def files() -> dict[str, Path]:
    """Every module of the package by its dotted path."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def room_of(name: str) -> str:
    """The folder of a module, or the file at the top."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "tools" else parts[0]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_nothing_from_above(room):
    inside = {name: path for name, path in files().items() if room_of(name) == room}
    assert inside
    for name, path in inside.items():
        outside = {found for found in imports(path, lazy=True) if room_of(found) not in ROOMS[room]}
        assert not outside, f"{name} imports {sorted(outside)}"


def test_the_method_does_not_import_the_tools():
    for name, path in files().items():
        if not name.startswith("tools"):
            assert not {found for found in imports(path, lazy=True) if found.startswith("tools")}, name


def test_no_two_modules_import_each_other():
    graph = {name: imports(path, lazy=False) for name, path in files().items()}
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> None:
        if not name:  # the version
            return
        assert name not in way, " -> ".join([*way, name])
        if name not in done:
            for target in graph.get(name, ()):
                visit(target, [*way, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    assert len(done) > 30  # control: the graph was read


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("qarl_trl", ["torch", "trl", "vllm", "matplotlib"]),
        ("qarl_trl.cli", ["torch", "trl", "vllm"]),
        ("qarl_trl.tools.report.command", ["torch", "trl", "vllm", "transformers", "matplotlib"]),
        ("qarl_trl.tools.report.page", ["torch", "trl", "vllm", "transformers"]),
        ("qarl_trl.tools.evaluate.command", ["torch", "trl", "vllm", "transformers"]),
        ("qarl_trl.quant", ["trl", "vllm", "qarl_trl.rollout", "peft"]),
        ("qarl_trl.learner.logps", ["trl", "vllm", "peft"]),
        ("qarl_trl.loss", ["trl", "vllm", "transformers"]),
    ],
)
def test_a_room_does_not_load_what_stands_above_it(module, absent):
    code = f"import sys, {module}; print(*(name for name in {absent} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_the_top_of_the_package_can_be_read_in_one_sitting():
    assert len(list(PACKAGE.glob("*.py"))) <= 14
    for path in files().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path.name}: {node.name}"
