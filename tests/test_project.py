"""What GitHub reads: workflows call targets that exist and hold no right they do not need; pins agree with each other."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml


ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
# Rights beyond reading the code, by workflow and job.
RIGHTS = {("release", "publish"): {"id-token": "write"}, ("docs", "publish"): {"contents": "write"}}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_the_rights_that_it_needs(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job.get("permissions", {}) == RIGHTS.get((path.stem, name), {}), name
        assert job["runs-on"] == "ubuntu-latest"


def test_every_target_that_is_called_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    texts = [path.read_text() for path in [*GITHUB.rglob("*.yml"), ROOT / ".ci" / "run", ROOT / "CONTRIBUTING.md"]]
    called = {target for text in texts for target in re.findall(r"(?:^|run: |`)make ([a-z-]+)", text, re.MULTILINE)}
    assert {"install", "coverage", "test-latest", "dist", "docs"} <= called  # control
    assert called <= targets, called - targets


def test_the_owner_is_named_where_pyproject_says():
    """Elsewhere addresses come from `[project.urls]`."""
    named = subprocess.run(["git", "grep", "-l", "<owner>"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    told = {"pyproject.toml", "examples/quickstart.ipynb"}
    about = {".github/workflows/release.yml", "dev/log.md", "tests/test_project.py"}  # name the word itself
    assert set(named) - about in (told, set())


def test_pinned_tools_are_those_that_the_extras_ask_for():
    pins = dict(re.findall(r"^([a-z-]+)==([0-9.]+)", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE))
    wanted = dict(re.findall(r'"([a-z-]+)==([0-9.]+)\.\*"', (ROOT / "pyproject.toml").read_text()))
    assert wanted and all(pins[name].startswith(f"{version}.") for name, version in wanted.items()), wanted


@pytest.mark.parametrize("path", sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.stem)
def test_an_issue_form_asks_for_what_is_needed(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"]
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in fields}) == len(fields) > 1
    assert any(part.get("validations", {}).get("required") for part in fields)


def test_what_the_package_imports_is_declared():
    """Else a clean installation lacks what vLLM happens to bring: `requests` was one."""
    imported = set()
    for path in (ROOT / "qarl_trl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            imported |= {name.split(".")[0] for name in names}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    declared = {re.match(r"[\w-]+", one)[0].lower().replace("-", "_") for one in wanted}
    renamed = {"yaml": "pyyaml", "starlette": "vllm"}  # by its package's name; by what it comes with
    missing = {renamed.get(name, name) for name in imported - set(sys.stdlib_module_names)} - declared
    assert not missing - {"qarl_trl"}
    assert {"torch", "requests"} <= imported  # control
