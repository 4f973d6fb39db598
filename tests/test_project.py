"""Files that nothing else runs here: workflows, the Makefile, pins and dependencies agree with each other."""

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version


ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("path", sorted((GITHUB / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_a_workflow_gives_its_jobs_no_right_but_reading(path):
    """What a job needs beyond that, it says itself; a workflow without this line gives rights to write."""
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}


def test_every_make_target_that_is_called_exists():
    # A workflow runs on the host of the repository alone: a target that was renamed would fail there.
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = set()
    for path in (*GITHUB.rglob("*.yml"), ROOT / ".ci" / "run", ROOT / "CONTRIBUTING.md"):
        called |= set(re.findall(r"(?:^|run: |`)make ([a-z-]+)", path.read_text(), re.MULTILINE))

    # Control: calls are found in each of the files.
    assert {"install", "coverage", "test-latest", "dist", "docs"} <= called
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
                for alias in node.names:
                    names.append(alias.name)
            # A relative import has a level, and is of this package.
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.append(node.module)
    return {name.split(".")[0] for name in names}


def declared_packages() -> set[str]:
    """The names of the dependencies and of the extras, as modules are called."""
    requirements = list(PROJECT["dependencies"])
    for extra in PROJECT["optional-dependencies"].values():
        requirements += extra
    names = [Requirement(requirement).name for requirement in requirements]
    # A package may have a dash where its module has an underscore.
    return {name.lower().replace("-", "_") for name in names}


def test_what_the_package_imports_is_declared():
    """Otherwise a clean installation lacks what vLLM happens to bring: `requests` was one."""
    # The package of `yaml` has another name. The others come with vLLM's server, and with torch for CUDA.
    packages = {"yaml": "pyyaml", "starlette": "vllm", "triton": "torch"}
    imported = imported_packages() - set(sys.stdlib_module_names) - {"qarl_trl"}

    undeclared = {packages.get(name, name) for name in imported} - declared_packages()

    assert not undeclared
    # Control: imports at the top of a file are read, and those inside of functions.
    assert {"torch", "requests"} <= imported


# Versions -----------------------------------------------------------------------------------------------------------


def needed() -> dict[str, Requirement]:
    """What a user's installation on a GPU takes, by name: the dependencies, and the extras in requirements/gpu.txt."""
    lines = list(PROJECT["dependencies"])
    for extra in ("vllm", "math", "peft", "report"):
        lines += PROJECT["optional-dependencies"][extra]
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def pins_of(name: str) -> dict[str, Requirement]:
    """The lines of a list in requirements/, by name."""
    pins = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        # The others are comments.
        if line and line[0] not in "# ":
            requirement = Requirement(line)
            pins[requirement.name] = requirement
    return pins


def outside_of_their_windows(pins: dict[str, Requirement]) -> list[str]:
    """The dependencies that are not pinned, or to a version that pyproject.toml does not accept."""
    wrong = []
    for name, requirement in needed().items():
        # `==` one version: a list that leaves a choice is no list of what ran.
        (pin,) = pins[name].specifier if name in pins else (None,)
        if pin is None or pin.operator != "==" or not requirement.specifier.contains(pin.version):
            wrong.append(name)
    return wrong


def test_the_list_for_gpus_pins_every_dependency_inside_of_its_window():
    pins = pins_of("gpu.txt")

    assert outside_of_their_windows(pins) == []

    # Controls: a version that the window excludes in its middle, and a missing line.
    assert outside_of_their_windows(pins | {"vllm": Requirement("vllm==0.27.0")}) == ["vllm"]
    del pins["trl"]
    assert outside_of_their_windows(pins) == ["trl"]


def test_the_list_for_gpus_is_one_for_all_versions_of_python():
    """No line is for one version alone, and `make check-gpu` resolves it for each that the package names."""
    names = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    resolved = re.search(r"^PYTHONS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()

    assert names == resolved
    assert Version(names[0]) in Requirement(f"python{PROJECT['requires-python']}").specifier
    for pin in pins_of("gpu.txt").values():
        assert pin.marker is None, pin


def rows_of_versions() -> dict[str, list[str]]:
    """CONTRIBUTING's table of versions: by software the other cells."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    table = page[page.index("| software | accepted | run |") :].split("\n\n")[0]

    rows = {}
    # Below the header and the line under it.
    for line in table.splitlines()[2:]:
        name, *cells = map(str.strip, line.strip("|").split("|"))
        rows[name] = cells
    return rows


def minor_versions(cell: str) -> list[str]:
    """Of the first sentence of a cell: "0.26, 0.31" and "5.17 to 5.19" as lists."""
    first, _, last = cell.partition(" to ")
    if not last:
        return re.findall(r"\d+\.\d+", cell)
    major, start = first.split(".")
    return [f"{major}.{minor}" for minor in range(int(start), int(last.split(".")[1]) + 1)]


@pytest.mark.parametrize(
    ("software", "package", "major"),
    [
        ("TRL", "trl", 1),
        ("vLLM", "vllm", 0),
        ("transformers", "transformers", 5),
        ("accelerate", "accelerate", 1),
        ("peft", "peft", 0),
        ("compressed-tensors", "compressed-tensors", 0),
        ("torch", "torch", 2),
    ],
)
def test_the_table_of_versions_says_what_the_package_accepts(software, package, major):
    window = needed()[package].specifier
    # A window that excludes 0.27.* accepts no patch of it. 60 is beyond all that these packages have.
    accepted = [f"{major}.{minor}" for minor in range(60) if window.contains(f"{major}.{minor}.99")]

    said, run = rows_of_versions()[software]

    assert minor_versions(said) == accepted
    # Both ends ran; of vLLM, whose private parts we use, every version.
    ran = set(minor_versions(run.split(".0.")[0] if " to " in run else run))
    assert {accepted[0], accepted[-1]} <= ran
    if package == "vllm":
        assert set(accepted) <= ran


def test_both_builds_of_vllm_have_one_window():
    extras = PROJECT["optional-dependencies"]
    for_gpus = Requirement(extras["vllm"][0]).specifier
    for_cpus = Requirement(extras["cpu"][0]).specifier

    assert for_gpus == for_cpus
    assert "0.27.1" not in for_gpus
    # Control: it is no window that accepts nothing.
    assert "0.31.0" in for_gpus


def test_the_owner_of_the_repository_is_named_by_one_command(tmp_path):
    """The placeholder stands in one file that users click links of; `make owner` leaves none."""
    shown = ["git", "grep", "-l", "--fixed-strings", "<owner>", "--", ":!tests", ":!.github", ":!Makefile"]
    with_placeholder = subprocess.run(shown, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert with_placeholder == ["pyproject.toml"]

    (tmp_path / "examples").mkdir()
    for name in ("Makefile", "pyproject.toml", "examples/quickstart.ipynb"):
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run(["make", "owner", "NAME=ada"], cwd=tmp_path, check=True, capture_output=True)

    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Repository"] == "https://github.com/ada/qarl_trl"
    assert "<owner>" not in (tmp_path / "pyproject.toml").read_text()
    # As text: a notebook is JSON, in which quotes have a backslash.
    notebook = json.loads((tmp_path / "examples" / "quickstart.ipynb").read_text())
    code = ""
    for cell in notebook["cells"]:
        code += "".join(cell["source"])
    assert 'REPOSITORY = "https://github.com/ada/qarl_trl"' in code
