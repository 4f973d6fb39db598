"""What the pages say can be followed: links and anchors lead somewhere, commands, recipes and scripts are accepted."""

import ast
import json
import re
import shlex
import subprocess
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from tools.report.folders import log, write_run

from qarl_trl import QaRLConfig, cli
from qarl_trl.recipe import check_keys
from qarl_trl.train import _groups, parse


ROOT = Path(__file__).parents[1]
FILES = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
HISTORY = ("CHANGELOG.md", "dev/log.md", "benchmarks/results/", "tests/test_docs.py")
PAGES = [name for name in FILES if name.endswith(".md") and name not in (*HISTORY, "qarl_trl/export/card.md")]
KEYS = [field.name for group in _groups() for field in fields(group)]
TAKES_KEYS = ("train", "doctor", "plan", "serve")


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """Those that GitHub makes of headings."""
    titles = re.findall(r"^#+ (.*)", without_code((ROOT / page).read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def broken(page, text):
    """Links of a page to files or headings that are not there."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        path, _, anchor = target.partition("#")
        if re.match(r"https?:", target):
            continue
        whole = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        if not whole.exists() or (anchor and anchor not in anchors(whole.relative_to(ROOT))):
            found.append(target)
    return found


def blocks(kind):
    """Fenced blocks of the pages for users, as `(page, text)`."""
    pages = [page for page in PAGES if page.startswith("docs/") or page == "README.md"]
    fence = re.compile(rf"^```{kind}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [(page, text) for page in pages for text in fence.findall((ROOT / page).read_text())]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    assert broken(page, (ROOT / page).read_text()) == []


def test_a_broken_link_is_found():
    text = "[a](no_page.md) [b](metrics.md#two-runs) [c](metrics.md#three-runs) [d](../recipes) [e](#no-heading)"
    assert broken("docs/troubleshooting.md", text) == ["no_page.md", "metrics.md#three-runs", "#no-heading"]


def test_pages_that_the_code_names_exist():
    named = {}
    for name in FILES:
        if not name.startswith(HISTORY) and name.endswith((".py", ".yaml", ".yml", ".md", "Makefile")):
            for page in re.findall(r"(?<![\w/])(?:docs|dev)/\w+\.md", (ROOT / name).read_text()):
                named.setdefault(page, []).append(name)
    assert "docs/metrics.md" in named  # control
    assert {page: names for page, names in named.items() if not (ROOT / page).is_file()} == {}


def commands():
    lines = [(page, line) for page, text in blocks("bash") for line in text.replace("\\\n", " ").splitlines()]
    found = [
        (page, shlex.split(line, comments=True))
        for page, line in lines
        if "qarl-trl " in line or "-m qarl_trl" in line
    ]
    return [(page, words) for page, words in found if words]


def wrong_options(words, capsys):
    start = next(i for i, word in enumerate(words) if word in ("qarl-trl", "qarl_trl.train"))
    name, options = ("train", words[start:]) if words[start] == "qarl_trl.train" else (words[start + 1], words[start:])
    with suppress(SystemExit):
        cli.main([name, "--help"])
    known = set(re.findall(r"--\w+", capsys.readouterr().out)) | (
        {f"--{key}" for key in KEYS} if name in TAKES_KEYS else set()
    )
    config = options[options.index("--config") + 1] if "--config" in options else ""
    files = [config] if "/" in config and not (ROOT / config).is_file() else []
    return [word for word in options if word.startswith("--") and word not in known] + files


def test_commands_have_options_that_exist(capsys):
    found = commands()
    assert {words[1] for _, words in found if words[0] == "qarl-trl"} >= set(cli.COMMANDS)  # each is shown once
    assert [(page, wrong) for page, words in found if (wrong := wrong_options(words, capsys))] == []
    assert wrong_options(["qarl-trl", "eval", "m", "--suites", "gsm8k"], capsys) == ["--suites"]  # control


def test_the_readmes_commands_run(tmp_path, monkeypatch, capsys):
    """As they stand, in a folder with data and a run; of the training only what `--dry_run` does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    rows = [json.dumps({"problem": f"What is {i} + 1?", "answer": str(i + 1)}) for i in range(64)]
    (tmp_path / "my_problems.jsonl").write_text("\n".join(rows))
    write_run(tmp_path / "runs" / "mine", log())
    found = [words for page, words in commands() if page == "README.md"]
    assert {words[1] for words in found} == {"plan", "doctor", "train", "report"}
    for words in found:
        cli.main([*words[1:], *(["--dry_run"] if words[1] == "train" else [])])
    said = capsys.readouterr().out
    assert "It fits: 21.8 GiB of 23.5" in said  # the README names both
    assert "0 failed" in said and "told apart in 32 of 32 rows" in said
    assert "QaRLConfig.hub_model_id: 'me/my-model'" in said and (tmp_path / "runs/mine/report.html").is_file()


def test_recipes_have_keys_that_exist():
    found = blocks("yaml")
    assert len(found) > 5
    for _, text in found:
        check_keys(yaml.safe_load(text), KEYS)


def test_the_recipe_of_get_started_is_accepted(tmp_path):
    (text,) = (text for page, text in blocks("yaml") if page == "docs/get_started.md")
    (tmp_path / "recipe.yaml").write_text(text)
    options = ["--output_dir", str(tmp_path), "--dry_run"]
    _, args, _ = parse(["--config", str(tmp_path / "recipe.yaml"), *options])
    assert args.steps_per_generation / args.gradient_accumulation_steps == 8


def test_scripts_compile_and_their_settings_are_accepted(tmp_path):
    settings = []
    for _, text in blocks("python"):
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "QaRLConfig":
                settings.append({part.arg: ast.literal_eval(part.value) for part in call.keywords})
    assert len(settings) >= 2
    for values in settings:
        QaRLConfig(**values | {"output_dir": str(tmp_path), "use_cpu": True})
