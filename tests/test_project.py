"""Files that nothing else runs here: workflows, the Makefile, pins and dependencies agree with each other."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml


ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("path", sorted((GITHUB / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_a_workflow_gives_its_jobs_no_right_but_reading(path):
    """What a job needs beyond that, it says itself; a workflow without this line gives rights to write."""
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}


def test_every_make_target_that_is_called_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = set()
    for path in (*GITHUB.rglob("*.yml"), ROOT / ".ci" / "run", ROOT / "CONTRIBUTING.md"):
        called |= set(re.findall(r"(?:^|run: |`)make ([a-z-]+)", path.read_text(), re.MULTILINE))

    assert {"install", "coverage", "test-latest", "dist", "docs"} <= called  # control
    assert not called - targets


def test_pinned_tools_are_those_that_the_extras_ask_for():
    """ruff and mypy: another version finds other faults."""
    pins = dict(re.findall(r"^([a-z-]+)==([0-9.]+)", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE))
    wanted = dict(re.findall(r'"([a-z-]+)==([0-9.]+)\.\*"', (ROOT / "pyproject.toml").read_text()))

    assert wanted
    for name, version in wanted.items():
        assert pins[name].startswith(f"{version}.")


def imported_packages() -> set[str]:
    """The names of all modules that the package imports anywhere, without what follows a dot."""
    names = []
    for path in (ROOT / "qarl_trl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.append(node.module)
    return {name.split(".")[0] for name in names}


def declared_packages() -> set[str]:
    """The names of the dependencies and of the extras, as modules are called."""
    requirements = list(PROJECT["dependencies"])
    for extra in PROJECT["optional-dependencies"].values():
        requirements += extra
    return {re.match(r"[\w-]+", requirement)[0].lower().replace("-", "_") for requirement in requirements}


def test_what_the_package_imports_is_declared():
    """Otherwise a clean installation lacks what vLLM happens to bring: `requests` was one."""
    packages = {
        "yaml": "pyyaml",  # its package has another name
        "starlette": "vllm",  # it comes with the server
        "triton": "torch",  # it comes with torch for CUDA
    }
    imported = imported_packages() - set(sys.stdlib_module_names) - {"qarl_trl"}

    undeclared = {packages.get(name, name) for name in imported} - declared_packages()

    assert not undeclared
    assert {"torch", "requests"} <= imported  # control
