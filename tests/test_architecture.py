"""The layout of docs/architecture.md: imports point one way, and the method never loads the tools."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import qarl_trl


PACKAGE = Path(qarl_trl.__file__).parent
# What each folder may import of this package, also for annotations; the files at the top may import everything but tools.
MAY_IMPORT = {
    "quant": {"quant"},
    "cpu_exact": {"cpu_exact"},
    "rollout": {"rollout", "cpu_exact", "quant", "_compat", "guards"},
    "learner": {"learner", "quant", "_compat"},
    "metrics": {"metrics", "loss", "quant"},
    "export": {"export", "quant", "config", "redact"},
    "checkpoints": {"checkpoints", "quant", "export", "config", "_compat", "guards"},
}
# A class whose instances are passed in, named in annotations below the module that builds them.
FOR_ANNOTATIONS = {"config"}
COMMANDS = {"cli"}  # finds the tools by name


def imports(path: Path) -> set[str]:
    """Modules of this package that a file imports anywhere, as dotted paths below it."""
    package = ["qarl_trl", *path.relative_to(PACKAGE).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module or "").split(".")
            base = [part for part in base if part]
            for alias in node.names:
                whole = PACKAGE.joinpath(*base[1:], alias.name)
                is_module = whole.with_suffix(".py").exists() or (whole / "__init__.py").exists()
                found.add(".".join([*base, alias.name][1:] if is_module else base[1:]))
    return found - {""}


def graph() -> dict[str, set[str]]:
    """Of every module of the package, by its dotted path, what it imports."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = imports(path)
    return found


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_nothing_from_above(folder):
    for name, imported in graph().items():
        if name.split(".")[0] == folder:
            outside = {found for found in imported if found.split(".")[0] not in MAY_IMPORT[folder] | FOR_ANNOTATIONS}
            assert not outside, f"{name} imports {sorted(outside)}"


def test_the_method_never_imports_the_tools():
    users = {name for name, imported in graph().items() if any(found.split(".")[0] == "tools" for found in imported)}
    assert all(name.startswith("tools") for name in users - COMMANDS), users
    assert users  # control: the graph was read


def test_no_two_modules_import_each_other():
    """Imports inside functions and for annotations count. The package's `__init__` names its two classes lazily."""
    found, done = graph(), set()

    def visit(name: str, way: list[str]) -> None:
        assert name not in way, " -> ".join([*way, name])
        if name not in done:
            for target in found.get(name, ()):
                visit(target, [*way, name])
            done.add(name)

    for name in found:
        visit(name, [])
    assert len(done) > 30  # control: the graph was read


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("qarl_trl", ["torch", "trl", "vllm", "matplotlib", "qarl_trl.tools"]),
        ("qarl_trl.trainer", ["qarl_trl.tools"]),
        ("qarl_trl.cli", ["torch", "trl", "vllm"]),
        ("qarl_trl.tools.report.page", ["torch", "trl", "vllm", "transformers", "matplotlib"]),
        ("qarl_trl.tools.evaluate.command", ["torch", "trl", "vllm", "transformers"]),
        ("qarl_trl.quant", ["trl", "vllm", "qarl_trl.rollout", "peft"]),
        ("qarl_trl.learner.logps", ["trl", "vllm", "peft"]),
        ("qarl_trl.loss", ["trl", "vllm", "transformers"]),
    ],
)
def test_a_module_does_not_load_what_stands_above_it(module, absent):
    code = f"import sys, {module}; print(*(name for name in {absent} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
