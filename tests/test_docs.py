"""What the pages say can be followed: links and anchors lead somewhere, commands, recipes and scripts are accepted."""

import ast
import re
import shlex
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from configs import field_names
from lines import lines_that_begin, write_rows
from tools.report.folders import log, write_run

from qarl_trl import QaRLConfig, cli
from qarl_trl.methods import DISTILL, QARL, RLOO, SFT, groups_of
from qarl_trl.recipe import check_keys
from qarl_trl.train import parse


ROOT = Path(__file__).parents[1]
FILES = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
# They tell of files that are gone, or that never were.
HISTORY = ("CHANGELOG.md", "tests/test_docs.py")
# Without the template of a model card too: its links are of a repository on the Hub.
PAGES = sorted({name for name in FILES if name.endswith(".md")} - {*HISTORY, "qarl_trl/export/card.md"})
# The keys of a recipe, which are options of these commands too.
METHODS = {"train": QARL, "doctor": QARL, "plan": QARL, "serve": QARL, "sft": SFT, "rloo": RLOO, "distill": DISTILL}
KEYS = {name: field_names(*groups_of(method)) for name, method in METHODS.items()}


def without_code(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> list[tuple[str, str]]:
    """Fenced blocks of the pages for users, as `(page, text)`."""
    fence = re.compile(rf"^```{kind}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    texts = []
    for page in PAGES:
        if page.startswith("docs/") or page == "README.md":
            for text in fence.findall((ROOT / page).read_text()):
                texts.append((page, text))
    return texts


# Links --------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Those that GitHub makes of the headings of a page."""
    titles = re.findall(r"^#+ (.*)", without_code((ROOT / page).read_text()), re.MULTILINE)
    names = set()
    for title in titles:
        # Of a link its words.
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
        names.add(re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-"))
    return names


def leads_somewhere(target: str, page: str) -> bool:
    """Whether a link of a page is an address, or a file and a heading that are there."""
    # Addresses are not followed: the tests have no network.
    if re.match(r"https?:", target):
        return True

    path, _, anchor = target.partition("#")
    file = ((ROOT / page).parent / path).resolve() if path else ROOT / page
    if not file.exists():
        return False
    return not anchor or anchor in anchors(file.relative_to(ROOT))


def broken_links(page: str, text: str) -> list[str]:
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(text))
    return [target for target in targets if not leads_somewhere(target, page)]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    assert broken_links(page, (ROOT / page).read_text()) == []


def test_a_broken_link_is_found():
    text = "[a](no_page.md) [b](metrics.md#two-runs) [c](metrics.md#three-runs) [d](../recipes) [e](#no-heading)"

    broken = broken_links("docs/troubleshooting.md", text)

    assert broken == ["no_page.md", "metrics.md#three-runs", "#no-heading"]


def test_pages_that_the_code_names_exist():
    users_of_pages: dict[str, list[str]] = {}
    for name in FILES:
        if name.startswith(HISTORY) or not name.endswith((".py", ".yaml", ".yml", ".md", "Makefile")):
            continue
        # Not after a slash: `shared/docs/x.md` is another page.
        for page in re.findall(r"(?<![\w/])(?:docs|dev)/\w+\.md", (ROOT / name).read_text()):
            users_of_pages.setdefault(page, []).append(name)

    # Control: the code names this one.
    assert "docs/metrics.md" in users_of_pages
    for page, users in users_of_pages.items():
        assert (ROOT / page).is_file(), f"{users} name {page}"


# Commands -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A line of a page: the subcommand of `qarl-trl`, and all of its words from the program on."""

    page: str
    name: str
    words: list[str]


def read_command(page: str, line: str) -> Command | None:
    """`None` for a line of another program."""
    words = shlex.split(line, comments=True)
    if "qarl-trl" in words:
        start = words.index("qarl-trl")
        return Command(page, words[start + 1], words[start:])
    # `python -m qarl_trl.cli`, which an accelerate launch needs.
    if "qarl_trl.cli" in words:
        start = words.index("qarl_trl.cli")
        return Command(page, words[start + 1], words[start:])
    return None


def test_the_module_to_launch_has_one_spelling():
    """`-m qarl_trl.cli COMMAND`, which every trainer has. `-m qarl_trl.train` works, but not for SFT."""
    launches: dict[str, list[str]] = {}
    for name in FILES:
        if name.startswith((*HISTORY, "tests/")) or not name.endswith((".py", ".yaml", ".md", ".sh", ".ipynb")):
            continue
        for module in re.findall(r"-m (qarl_trl[\w.]*( \{?\w+)?)", (ROOT / name).read_text()):
            launches.setdefault(module[0], []).append(name)

    assert len(launches["qarl_trl.cli train"]) > 20
    # `{command}` is in the help of each trainer.
    assert launches.keys() <= {
        f"qarl_trl.cli {command}" for command in ("train", "sft", "rloo", "distill", "{command")
    }


def commands() -> list[Command]:
    """Those of the pages for users."""
    read = []
    for page, text in blocks("bash"):
        # A command over several lines is one.
        for line in text.replace("\\\n", " ").splitlines():
            command = read_command(page, line)
            if command is not None:
                read.append(command)
    return read


def wrong_words(command: Command, capsys) -> list[str]:
    """The options that the command does not have, and a recipe that is not there."""
    with suppress(SystemExit):
        cli.main([command.name, "--help"])
    # The help of a command that trains has our fields alone: those of TRL are in `KEYS`.
    known = set(re.findall(r"--(\w+)", capsys.readouterr().out)) | KEYS.get(command.name, set())

    wrong = []
    for word in command.words:
        if word.startswith("--") and word.removeprefix("--") not in known:
            wrong.append(word)

    if "--config" in command.words:
        recipe = command.words[command.words.index("--config") + 1]
        if "/" in recipe and not (ROOT / recipe).is_file():
            wrong.append(recipe)
    return wrong


def test_commands_have_options_that_exist(capsys):
    shown = commands()

    named = set()
    for command in shown:
        assert wrong_words(command, capsys) == [], command
        if command.words[0] == "qarl-trl":
            named.add(command.name)
    # No command is without a page that shows it.
    assert named >= set(cli.COMMANDS)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("qarl-trl eval m --suites gsm8k", ["--suites"]),
        ("qarl-trl train --config recipes/no_recipe.yaml", ["recipes/no_recipe.yaml"]),
    ],
)
def test_a_wrong_command_is_found(line, wrong, capsys):
    assert wrong_words(read_command("page", line), capsys) == wrong


def test_the_readmes_commands_run(tmp_path, monkeypatch, capsys):
    """As they stand, in a folder with data and a run; of the training only what `--dry_run` does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    rows = []
    for number in range(64):
        rows.append({"problem": f"What is {number} + 1?", "answer": str(number + 1)})
    write_rows(tmp_path / "my_problems.jsonl", rows)
    write_run(tmp_path / "runs" / "mine", log())

    ran = set()
    for command in commands():
        if command.page != "README.md":
            continue
        ran.add(command.name)
        arguments = command.words[1:]
        if command.name == "train":
            arguments.append("--dry_run")
        cli.main(arguments)
    assert ran == {"plan", "train", "report"}

    said = capsys.readouterr().out
    # The README names both.
    assert "It fits: 21.8 GiB of 23.5" in said
    assert "QaRLConfig.lora_base: 'frozen'" in said
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()


# The rows of README's table: the options of `plan`.
ESTIMATES = {
    "Qwen2.5-7B, LoRA, frozen base": "--config recipes/one_gpu/qwen2.5-7b_frozen.yaml --gpu 4090",
    "Qwen3-8B, LoRA": "--config recipes/one_gpu/qwen3-8b.yaml --gpu h100 --answer_tokens 4000",
    "Qwen3-30B-A3B": (
        "--config recipes/qwen3-30b-a3b-base/w4a16_qarl_tbpo.yaml --gpu h200 --gpus 8 --answer_tokens 4000"
    ),
}


@pytest.mark.parametrize("model", ESTIMATES)
def test_the_readmes_estimates_are_those_of_plan(model, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    readme = (ROOT / "README.md").read_text()
    (row,) = lines_that_begin(readme, f"| {model} |")
    _, _, tokens, bf16, low_bit, speed = map(str.strip, row.strip("|").split("|"))

    cli.main(["plan", *ESTIMATES[model].split()])
    said = capsys.readouterr().out

    assert f"answers of {tokens.replace(',', '')} tokens" in said
    (arm,) = re.findall(r"^QaRL W4A16 +\d.*", said, re.MULTILINE)
    assert low_bit in arm.split()
    # No ratio to a run that does not fit.
    if speed == "-":
        assert f"bf16: needs {bf16} of" in said
        return

    assert bf16 in re.search("^bf16 .*", said, re.MULTILINE)[0].split()
    # The range alone: it holds 1, or nearly, so that the figure in it would say too much.
    assert f" ({speed}) " in arm


def test_the_readme_names_the_speeds_that_were_measured():
    page = (ROOT / "dev" / "plan.md").read_text()
    readme = (ROOT / "README.md").read_text()
    estimated_and_measured = re.findall(r"^\| qwen.* QaRL W4A16.* ([\d.]+) / ([\d.]+) \|$", page, re.MULTILINE)

    # The README has the measured ones, which are worse.
    assert estimated_and_measured == [("0.68", "0.64"), ("0.80", "0.78")]
    assert "0.64 times the speed at 1.5B, 0.78 at 8B with a frozen base" in readme


# Recipes and scripts ------------------------------------------------------------------------------------------------


def test_recipes_have_keys_that_exist():
    recipes = blocks("yaml")

    # Control: the pages were read.
    assert len(recipes) > 5
    for _, text in recipes:
        # A recipe of another command has it in a comment.
        command = re.search(r"qarl-trl (\w+)", text)
        check_keys(yaml.safe_load(text), KEYS[command[1] if command else "train"])


def test_the_recipe_of_get_started_is_accepted(tmp_path):
    (text,) = [text for page, text in blocks("yaml") if page == "docs/get_started.md"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)

    _, args, _ = parse(["--config", str(recipe), "--output_dir", str(tmp_path), "--dry_run"])

    # The updates of a rollout batch that the page speaks of.
    assert args.steps_per_generation / args.gradient_accumulation_steps == 8


def settings_in_scripts() -> list[dict]:
    """The arguments of each `QaRLConfig(...)` in the Python of the pages."""
    settings = []
    for _, text in blocks("python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "QaRLConfig":
                # `literal_eval` refuses what is no constant: the pages show settings, not code that makes them.
                settings.append({part.arg: ast.literal_eval(part.value) for part in node.keywords})
    return settings


def test_scripts_compile_and_their_settings_are_accepted(tmp_path):
    shown = settings_in_scripts()

    assert len(shown) >= 2
    for settings in shown:
        QaRLConfig(**settings | {"output_dir": str(tmp_path), "use_cpu": True})
