"""What `make dist` builds: its files, its size, and that the wheel works where nothing else of the project is."""

import email
import json
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

import qarl_trl


ROOT = Path(qarl_trl.__file__).parents[1]
# In KiB: 218 and 207 today. A picture, a result or a checkpoint that slips in is larger than the difference.
WHEEL_KIB, SOURCE_KIB = 300, 300


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder with wheel and source archive, built of a copy of this tree by what CI has, without the index."""
    folder = tmp_path_factory.mktemp("dist")
    for name in ("qarl_trl", "tests", "docs"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    build = [
        "uv",
        "build",
        "--quiet",
        "--offline",
        "--no-build-isolation",
        "--python",
        sys.executable,
        "--out-dir",
        folder,
    ]
    run(folder, *build, folder / "source")
    return folder


def run(folder, *command):
    """The output of a command, of the environment of the tests, in `folder`."""
    scripts = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | scripts
    command = [str(word) for word in command]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_wheel_holds_the_package_and_nothing_else(dist):
    (wheel,) = dist.glob("*.whl")
    assert wheel.name == f"qarl_trl-{qarl_trl.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (archive.read(name) for name in archive.namelist() if name.endswith("/METADATA"))
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
    here = {str(path.relative_to(ROOT)) for path in (ROOT / "qarl_trl").rglob("*") if path.is_file()}
    assert names == {name for name in here if "__pycache__" not in name}
    assert {"qarl_trl/py.typed", "qarl_trl/export/card.md", "qarl_trl/tools/report/page.py"} <= names  # control
    assert wheel.stat().st_size < WHEEL_KIB * 1024
    told = email.message_from_bytes(metadata)
    urls = dict(url.split(", ") for url in told.get_all("Project-URL"))
    assert {"Repository", "Documentation", "Issues", "Changelog", "Paper"} == urls.keys()
    # The page on PyPI: README.md, whose links lead into the repository.
    targets = re.findall(r"\]\(([^)]+)\)", told.get_payload(decode=True).decode())
    assert told["Description-Content-Type"] == "text/markdown" and len(targets) > 15
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    relative = re.findall(r"!\[[^\]]*\]\((?!https:)([^)]+)\)", (ROOT / "README.md").read_text())
    assert relative and {f"{urls['Repository']}/raw/main/{name}" for name in relative} <= set(targets)
    assert f"{urls['Repository']}/blob/main/docs/README.md" in targets


def test_the_source_archive_builds_the_wheel_and_brings_no_tests(dist):
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "qarl_trl/trainer.py"} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks"))]
    assert source.stat().st_size < SOURCE_KIB * 1024


@pytest.fixture(scope="module")
def clean(dist):
    """The Python of an environment with the wheel and, from that of the tests, its dependencies, but not this tree."""
    (wheel,) = dist.glob("*.whl")
    run(dist, "uv", "venv", "--quiet", "--offline", "--python", sys.executable, "clean")
    run(dist, "uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--python", "clean/bin/python", wheel)
    # As a path alone: files that make editable installs are read only where they lie first.
    site = next((dist / "clean" / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return dist / "clean" / "bin" / "python"


def test_the_installed_wheel_has_its_commands(clean, dist):
    place = run(dist, clean, "-c", "import qarl_trl; print(qarl_trl.__file__)")
    assert Path(place.strip()).is_relative_to(dist / "clean"), place
    assert "W4A16" in run(dist, clean.with_name("qarl-trl"), "schemes")


def readme_python() -> str:
    """The Python of the README: its `python` blocks, and what is left of its `diff` blocks when they are applied."""
    found = []
    for kind, text in re.findall(r"```(python|diff)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        lines = text.splitlines()
        found += lines if kind == "python" else [line[1:] for line in lines if not line.startswith("-")]
    return "\n".join(found)


# A toy on a CPU, without an engine. What the README says comes first.
SMALL = """
import qarl_trl
small = {"use_cpu": True, "use_vllm": False, "max_steps": 1, "max_completion_length": 8, "report_to": "none"}
config, qarl_trl.QaRLConfig = qarl_trl.QaRLConfig, lambda **given: config(**given | small)
"""


def test_the_readmes_lines_run_from_the_wheel(clean, dist):
    """In a folder where each Hub id that they name is a folder with a toy."""
    lines = readme_python()
    model = re.search(r'QaRLTrainer\(.*?"([\w.-]+/[\w.-]+)"', lines, re.DOTALL)[1]
    dataset = re.search(r'load_dataset\("([\w.-]+/[\w.-]+)"', lines)[1]
    place = dist / "readme"
    save_chat_model(place / model)
    (place / dataset).mkdir(parents=True)
    rows = [{"prompt": [{"role": "user", "content": f"{i}+{i}="}], "solution": str(2 * i)} for i in range(10, 74)]
    (place / dataset / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (place / "lines.py").write_text(SMALL + lines)
    run(place, clean, "lines.py")
    saved = next(place.glob("*/config.json"))
    assert '"quant_method": "compressed-tensors"' in saved.read_text()
