"""What `make dist` builds: its files, its size, and that the wheel works where nothing else of the project is."""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import save_chat_model
from lines import write_rows

import qarl_trl


ROOT = Path(qarl_trl.__file__).parents[1]
# 614 and 470 today: of code alone, since all other files of the package are named below.
WHEEL_KIB = 620
SOURCE_KIB = 472
NO_PYTHON = {
    "qarl_trl/py.typed",
    "qarl_trl/export/card.md",
    "qarl_trl/tools/doctor/rule.json",
    "qarl_trl/tools/plan/models.json",
    "qarl_trl/tools/report/page.html",
}


def run(folder, *command):
    """The output of a command in `folder`, in the environment of the tests but without this tree."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": programs}
    # With it the tests would import this tree, and find what the wheel lacks.
    environment.pop("PYTHONPATH", None)
    words = list(map(str, command))

    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment)

    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder with wheel and source archive, built of a copy of this tree by what CI has, without the index."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    # With tests and docs, which must not get into an archive.
    for name in ("qarl_trl", "tests", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)

    build = ["uv", "build", "--quiet", "--offline", "--no-build-isolation"]
    run(folder, *build, "--python", sys.executable, "--out-dir", folder, source)
    return folder


@pytest.fixture(scope="module")
def wheel(dist):
    (wheel,) = dist.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def metadata(wheel):
    """What the index is told."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        return email.message_from_bytes(archive.read(name))


# Contents -----------------------------------------------------------------------------------------------------------


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    assert wheel.name == f"qarl_trl-{qarl_trl.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < WHEEL_KIB * 1024

    packaged = set()
    described = set()
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            folder, _, rest = name.partition(".dist-info/")
            if rest:
                described.add(rest)
            else:
                packaged.add(folder)

    here = set()
    for path in (ROOT / "qarl_trl").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            here.add(str(path.relative_to(ROOT)))
    assert packaged == here
    assert "qarl_trl/tools/report/page.py" in packaged
    # A picture, a result or a checkpoint in the package's folder would be one more, however small.
    assert {name for name in packaged if not name.endswith(".py")} == NO_PYTHON
    assert "licenses/LICENSE" in described


def test_the_page_of_the_index_has_links_that_work_there(metadata):
    """It is README.md, whose links lead into the repository."""
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL"))
    assert urls.keys() == {"Repository", "Documentation", "Issues", "Changelog", "Paper"}

    assert metadata["Description-Content-Type"] == "text/markdown"
    page = metadata.get_payload(decode=True).decode()
    targets = re.findall(r"\]\(([^)]+)\)", page)
    # Control: links were found.
    assert len(targets) > 15
    for target in targets:
        assert target.startswith(("https://", "#"))

    assert f"{urls['Repository']}/blob/main/docs/README.md" in targets
    pictures = re.findall(r"!\[[^\]]*\]\((?!https:)([^)]+)\)", (ROOT / "README.md").read_text())
    assert pictures
    for picture in pictures:
        assert f"{urls['Repository']}/raw/main/{picture}" in targets


def test_the_source_archive_builds_the_wheel_and_brings_no_tests(dist):
    (source,) = dist.glob("*.tar.gz")
    assert source.stat().st_size < SOURCE_KIB * 1024

    with tarfile.open(source) as archive:
        # Below the archive's one folder.
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "qarl_trl/trainer.py"} <= names
    for name in names:
        assert not name.startswith(("tests", "docs", "benchmarks"))
        if name.startswith("qarl_trl/") and Path(name).suffix not in ("", ".py"):
            assert name in NO_PYTHON


# Installed ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clean(dist, wheel):
    """The Python of an environment with the wheel and, from that of the tests, its dependencies, but not this tree."""
    run(dist, "uv", "venv", "--quiet", "--offline", "--python", sys.executable, "clean")
    install = ["uv", "pip", "install", "--quiet", "--offline", "--no-deps"]
    run(dist, *install, "--python", "clean/bin/python", wheel)

    # As a path alone: files that make editable installs are read only where they lie first.
    site = next((dist / "clean" / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return dist / "clean" / "bin" / "python"


def test_the_installed_wheel_has_its_commands(clean, dist):
    place = run(dist, clean, "-c", "import qarl_trl; print(qarl_trl.__file__)")

    # Not this tree: the test would say nothing about the wheel.
    assert Path(place.strip()).is_relative_to(dist / "clean"), place
    assert "W4A16" in run(dist, clean.with_name("qarl-trl"), "schemes")


def readme_python() -> str:
    """The Python of the README: its `python` blocks, and what is left of its `diff` blocks when they are applied."""
    fences = re.findall(r"```(python|diff)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = []
    for kind, text in fences:
        for line in text.splitlines():
            if kind == "python":
                lines.append(line)
            elif not line.startswith("-"):
                lines.append(line[1:])
    return "\n".join(lines)


# A toy on a CPU, without an engine. What the README says comes first.
SMALL = """
import qarl_trl
small = {"use_cpu": True, "use_vllm": False, "max_steps": 1, "max_completion_length": 8, "report_to": "none"}
config = qarl_trl.QaRLConfig
qarl_trl.QaRLConfig = lambda **settings: config(**settings | small)
"""


def test_the_readmes_lines_run_from_the_wheel(clean, dist):
    """In a folder where each Hub id that they name is a folder with a toy."""
    lines = readme_python()
    model = re.search(r'QaRLTrainer\(.*?"([\w.-]+/[\w.-]+)"', lines, re.DOTALL)[1]
    dataset = re.search(r'load_dataset\("([\w.-]+/[\w.-]+)"', lines)[1]
    place = dist / "readme"
    save_chat_model(place / model)
    rows = []
    for number in range(10, 74):
        question = [{"role": "user", "content": f"{number}+{number}="}]
        rows.append({"prompt": question, "solution": str(2 * number)})
    (place / dataset).mkdir(parents=True)
    write_rows(place / dataset / "train.jsonl", rows)
    (place / "lines.py").write_text(SMALL + lines)

    run(place, clean, "lines.py")

    # What the lines end in: a low-bit model in the folder that they name.
    config = next(place.glob("*/config.json")).read_text()
    assert '"quant_method": "compressed-tensors"' in config
