"""The layout of dev/architecture.md: imports point one way, and the method never loads the tools."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qarl_trl


PACKAGE = Path(qarl_trl.__file__).parent
PAGE = PACKAGE.parent / "dev" / "architecture.md"

# The foundation below every folder but those that import nothing.
BASE = {"_compat", "guards", "processes", "redact"}
# The folders, files and modules of this package that each folder may import besides its own. The files at the top may
# import everything but the tools.
MAY_IMPORT = {
    "data": {"rewards", "boxes"},
    "_compat": set(),
    "quant": set(),
    "cpu_exact": {"quant"},
    "export": {"quant"} | BASE,
    "checkpoints": {"export", "quant"} | BASE,
    "learner": {"quant"} | BASE,
    "rollout": {"cpu_exact", "quant"} | BASE,
    "metrics": {"loss", "quant"} | BASE,
    # It checks settings, so it may import the modules that define them.
    "validate": {"config", "trainers.settings", "learner", "rollout", "checkpoints", "export", "cpu_exact", "quant"}
    | BASE,
    # All of the method but trainer.py and config.py, which are made of it.
    "trainers": {
        *(
            "validate",
            "metrics",
            "rollout",
            "learner",
            "checkpoints",
            "export",
            "cpu_exact",
            "quant",
            "loss",
            "optim",
            "options",
        ),
        *BASE,
    },
}
# The same for the folders inside quant/: none of them knows the owner of the weights, which knows them.
INSIDE_QUANT = {
    "sharding": {"quantize", "scheme"},
    "gemms": {"cuda_kernels", "quantize", "reference", "scheme"},
    "layers": {"gemms", "names", "quantize", "scheme", "sharding"},
}
# Its instances are passed to all folders, which name it in annotations alone (`if TYPE_CHECKING`).
FOR_ANNOTATIONS = {"config"}
# The command line finds the tools by name.
COMMANDS = {"cli"}


class WithoutAnnotations(ast.NodeTransformer):
    """Removes what only a type checker imports."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return node.orelse
        return self.generic_visit(node)


def imports(path: Path, for_annotations: bool = True) -> set[str]:
    """Modules of this package that a file imports anywhere, as dotted paths below it."""
    tree = ast.parse(path.read_text())
    if not for_annotations:
        tree = WithoutAnnotations().visit(tree)

    folder = ["qarl_trl", *path.relative_to(PACKAGE).parent.parts]
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = _source(node, folder)
            if source[0] == "qarl_trl":
                modules |= {_module(source[1:], alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            absolute = [alias.name for alias in node.names if alias.name.startswith("qarl_trl.")]
            modules |= {name.removeprefix("qarl_trl.") for name in absolute}
    return modules - {""}


def _source(node: ast.ImportFrom, folder: list[str]) -> list[str]:
    """The parts of the module from which `from ... import` takes names, in a file of `folder`."""
    named = node.module.split(".") if node.module else []
    if not node.level:
        return named
    # One dot is the folder itself, each further one the folder above.
    above = folder[: len(folder) - node.level + 1]
    return [*above, *named]


def _module(source: list[str], name: str) -> str:
    """`source.name` if that is a module of this package, otherwise `source`, in which `name` is defined."""
    # `from .quant import store` names a module, `from .quant import apply_quantization` a function.
    path = PACKAGE.joinpath(*source, name)
    is_module = path.with_suffix(".py").exists() or (path / "__init__.py").exists()
    return ".".join([*source, name] if is_module else source)


def graph(for_annotations: bool = True) -> dict[str, set[str]]:
    """What each module of the package imports, by its dotted path."""
    imported = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        imported[".".join(parts)] = imports(path, for_annotations)
    return imported


def top(module: str) -> str:
    """The folder, or the file, of the package that a module is in."""
    return module.split(".")[0]


def imports_outside(folder: str, may_import: set[str], imported: dict[str, set[str]]) -> list[str]:
    """What the modules of a folder import besides it and `may_import`, as sentences."""
    outside = []
    for name, modules in imported.items():
        if top(name) != folder:
            continue
        for module in sorted(modules):
            if top(module) != folder and not {module, top(module)} & may_import:
                outside.append(f"{name} imports {module}")
    return outside


def folders() -> set[str]:
    return {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_nothing_from_above(folder):
    outside = imports_outside(folder, MAY_IMPORT[folder], graph(for_annotations=False))

    assert not outside


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_names_nothing_from_above_in_annotations_but_the_config(folder):
    outside = imports_outside(folder, MAY_IMPORT[folder] | FOR_ANNOTATIONS, graph())

    assert not outside


def test_an_import_from_above_is_found():
    """Control of both."""
    above = {"quant.store": {"quant.quantize", "trainers.low_bit"}, "validate.run": {"trainers.low_bit"}}

    assert imports_outside("quant", MAY_IMPORT["quant"], above) == ["quant.store imports trainers.low_bit"]
    assert imports_outside("validate", MAY_IMPORT["validate"], above) == ["validate.run imports trainers.low_bit"]


def inside_quant(imported: dict[str, set[str]]) -> dict[str, set[str]]:
    """What the modules of quant/ import of each other, by their paths below it."""
    inside = {}
    for name, modules in imported.items():
        if name.startswith("quant."):
            of_quant = {module.removeprefix("quant.") for module in modules if module.startswith("quant.")}
            inside[name.removeprefix("quant.")] = of_quant
    return inside


@pytest.mark.parametrize("folder", INSIDE_QUANT)
def test_a_folder_of_quant_imports_what_is_below_it(folder):
    outside = imports_outside(folder, INSIDE_QUANT[folder], inside_quant(graph()))

    assert not outside

    # Control: a layer that takes the store itself.
    above = {f"quant.{folder}.lora": {"quant.store", "quant.quantize"}}
    assert imports_outside(folder, INSIDE_QUANT[folder], inside_quant(above)) == [f"{folder}.lora imports store"]


def test_every_folder_of_quant_has_its_rule():
    inside = {path.parent.name for path in (PACKAGE / "quant").glob("*/__init__.py")}

    assert inside == INSIDE_QUANT.keys()


def test_the_page_draws_what_a_folder_may_import_below_it():
    """Down to the single file that the page draws above: the arithmetic of the loss, which imports nothing."""
    drawing = PAGE.read_text().split("```")[1]
    below_the_tools = drawing.partition("-----")[2]
    drawn = re.findall(r"^(\w+)/ ", below_the_tools, re.MULTILINE)

    assert drawn[:2] == ["data", "trainers"]
    # `validate` may still be one file.
    assert set(MAY_IMPORT) - {"validate"} <= set(drawn)
    for folder, may_import in MAY_IMPORT.items():
        above = drawn[: drawn.index(folder)]
        assert not may_import & set(above), f"{folder} may import what stands above it: {above}"


def test_every_folder_of_the_method_has_its_rule():
    assert folders() - {"tools"} <= MAY_IMPORT.keys()
    # Control: folders were found.
    assert {"quant", "trainers"} <= folders()


def test_the_method_never_imports_the_tools():
    users = set()
    for name, imported in graph().items():
        if any(top(module) == "tools" for module in imported):
            users.add(name)

    for name in users - COMMANDS:
        assert top(name) == "tools", name
    # Control: the graph was read.
    assert users


def test_no_two_modules_import_each_other():
    """Imports inside functions and for annotations count. The package's `__init__` names its two classes lazily."""
    imported = graph()
    finished = set()

    def visit(name: str, way: list[str]) -> None:
        assert name not in way, " -> ".join([*way, name])
        if name in finished:
            return
        for target in imported.get(name, ()):
            visit(target, [*way, name])
        finished.add(name)

    for name in imported:
        visit(name, [])
    # Control: the graph was read.
    assert len(finished) > 30


# Modules, and what is not loaded with them. One process loads them all, so they go from least to most.
NOT_LOADED = {
    "qarl_trl": ["torch", "trl", "vllm", "matplotlib", "qarl_trl.tools"],
    "qarl_trl.tools.report.page": ["torch", "trl", "vllm", "transformers", "matplotlib"],
    "qarl_trl.tools.evaluate.command": ["torch", "trl", "vllm", "transformers"],
    "qarl_trl.cli": ["torch", "trl", "vllm"],
    "qarl_trl.loss": ["trl", "vllm", "transformers"],
    "qarl_trl.quant": ["trl", "vllm", "qarl_trl.rollout", "peft"],
    "qarl_trl.learner.logps": ["trl", "vllm", "peft"],
    "qarl_trl.cpu_exact.ops": ["trl", "vllm", "peft"],
    "qarl_trl.trainers.settings": ["vllm", "qarl_trl.trainers.low_bit", "qarl_trl.rollout"],
    # What the help of `sft`, `rloo` and `distill` reads.
    "qarl_trl.trainers.configs": ["vllm", "qarl_trl.trainers.low_bit", "qarl_trl.rollout"],
}
PRINT_LOADED = """
import importlib, sys
for module, absent in {not_loaded}.items():
    importlib.import_module(module)
    for name in absent:
        if name in sys.modules:
            print(module, "loads", name)
"""


def test_a_module_does_not_load_what_stands_above_it():
    assert loads(NOT_LOADED) == []


def test_a_library_that_is_loaded_too_early_is_found():
    # Control of the test above: the first loads both, the second has no torch.
    assert loads({"qarl_trl.recipe": ["json", "yaml"], "qarl_trl": ["torch"]}) == [
        "qarl_trl.recipe loads json",
        "qarl_trl.recipe loads yaml",
    ]


def loads(not_loaded: dict[str, list[str]]) -> list[str]:
    code = PRINT_LOADED.format(not_loaded=not_loaded)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return result.stdout.splitlines()
