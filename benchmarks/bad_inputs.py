"""
Gives some 350 wrong inputs to all commands, and counts how they end: in one line that says what is wrong, in a
traceback, or accepted.

A third are wrong types and numbers of fields, drawn from all fields of a recipe; the others are unknown keys, files
that are missing or damaged, folders that cannot be written, settings that contradict each other, and wrong options.
Each runs as `qarl-trl` would, in this process. What is accepted is trained for one update without an engine, written,
or printed.
"""

import io
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import common
import yaml


sys.path.insert(0, str(common.ROOT / "tests"))
from slow.toys import save_model

from qarl_trl import cli, methods
from qarl_trl.tools.evaluate import sample


# Kind, what is wrong, and command line of an input.
Case = tuple[str, Any, list[str]]

# What a field takes, by its type. Fields of other types get no wrong value.
KINDS = {
    int: "number",
    int | None: "number",
    float: "number",
    float | None: "number",
    bool: "switch",
    str: "text",
}
# Values that it does not take.
WRONG = {
    "number": ["many", [1], {"a": 1}, float("nan"), float("inf"), "1,5", "0x", True],
    "switch": ["perhaps", 7, [True], {"on": 1}],
    "text": [[["a"]], {"a": {"b": 1}}],
}
RECIPE = """
max_steps: 1, save_steps: 1, logging_steps: 1, use_cpu: on, bf16: off, use_vllm: off, report_to: none,
num_generations: 4, per_device_train_batch_size: 4, max_completion_length: 4, conversational: off
"""
# Changes of the recipe, each within bars.
CONTRADICTIONS = """
max_steps: 0 | num_iterations: 0 | per_device_train_batch_size: 0 | num_generations: 3 | steps_per_generation: 99
temperature: 0 | gradient_accumulation_steps: 0 | learning_rate: -1 | num_train_epochs: 0, max_steps: -1
quant_scheme: W2A2 | quant_group_size: 7 | quant_scheme: checkpoint | lora_base: frozen | fp16: on | bf16: on, fp16: on
use_liger_kernel: on | delta: 1.5 | top_p: 2 | tbpo_delta_high: 0 | tbpo_epsilon_high: -0.5 | tbpo_mismatch_cap: 0.5
max_tokens_per_pass: 2 | mismatch_abort_threshold: 0.1 | verify_sync: sometimes | loss_type: ppo | load_in_4bit: on
use_peft: on | use_peft: on, lora_dropout: 0, optim_muon: on | beta: -1 | push_to_hub: on, export_low_bit: off
push_to_hub: on, hub_strategy: checkpoint | eval_strategy: steps | system_prompt: Think. | system_prompt: None
quant_group_size: none | max_steps: null | prompt_template: no slot | problem_column: x | answer_column: x
dataset_split: "train[" | answer_column: 5 | reward_funcs: os.path | reward_funcs: nothing | reward_funcs: json.nothing
reward_funcs: [] | reward_funcs: [math_reward, 3] | resume_from_checkpoint: on, output_dir: nowhere
resume_from_checkpoint: nowhere | enable_jit_checkpoint: on | optim: sgdd | lr_scheduler_type: wavy
save_strategy: sometimes | learner_ops: engines | quant_kernel: engine, quant_scheme: NVFP4A16
quant_recipe: nowhere.yaml | quant_ignore: ["re:["] | env: {HF_TOKEN: a} | env: [1] | base: nowhere.yaml | base: 3
lora_base: int4 | model_init_kwargs: {device_map: balanced} | model_init_kwargs: {token: hf_abc}
model_init_kwargs: {dtype: int7} | warmup_steps: -5 | generation_kwargs: {nothing: 1} | chat_template_path: nowhere
max_completion_length: 0 | deepspeed: nowhere.json | report_to: nobody | accelerator_config: nowhere.json
model_name_or_path: "" | dataset_name_or_path: "" | dataloader_num_workers: -1
"""
# Commands without their name, after it; {} are files that are there.
OPTIONS = """
: | trian | schemes now | schemes --all | train --config | train --max_steps | train --max_steps null
: train --quant_group_size none | train --nothing | doctor --nothing 1
export: | a | {data} {out} | user/a/b {out} | {empty} {out} | {model} {model} | {model} {data} | {model} /proc/nowhere
export {model} {out}: --scheme W2A2 | --group_size 7 | --group_size x | --targets Conv9 | --ignore re:[
push: | a | nowhere user/model | {model} user/model | {model} a/b/c
eval: | {model} | {model} --suite nothing | {model} --suite {empty} | {model} --suite a=nowhere.jsonl
eval: {empty} --suite {data}
eval {model} --max_new_tokens 8 --suite {data}: --suite {data} | --k 0 | --k x | --temperature -1 | --temperature nan
eval {model} --max_new_tokens 8 --suite {data}: --top_p 2 | --limit 0 | --limit -3
eval {model} --suite {data}: --max_new_tokens 0 | --max_new_tokens 99999 | --engine_kwargs [1] | --engine_kwargs {{
eval {model} --suite {data}: --pass_at 9
eval {model} --max_new_tokens 8 --suite {data}: --output_dir {data}/x | --tensor_parallel_size 0 | --problem_column x
eval {model} --max_new_tokens 8 --suite {data}: --nothing
report: | nowhere | {empty} | {model} | {data} | a={empty} b={empty} | --output_dir
plan: | --config nowhere.yaml
plan --config {recipe}: --gpus 0 | --gpus -2 | --gpus x | --memory nan | --memory -1 | --memory 1e308
plan --config {recipe}: --sharding zero9 | --replicas 0
plan --config {recipe}: --gpus 3 --replicas 2
doctor --config: nowhere.yaml | {recipe} --probe_prompts x
serve: | --config nowhere.yaml
serve --dry_run --config {recipe}: --host 0.0.0.0 | --vllm_server_port x | --vllm_server_port 99999999
serve --dry_run --config {recipe}: --sync_folder {data}/x
serve --dry_run --config {recipe}: --vllm_server_base_url nonsense:x | --vllm_tensor_parallel_size 0
"""
CONFIGS = """
hidden_size: big | num_hidden_layers: two | vocab_size: [1] | rms_norm_eps: x | architectures: 5 | model_type: 7
model_type: nothing | quantization_config: x | quantization_config: {quant_method: compressed-tensors}
num_key_value_heads: 0 | hidden_size: -1 | head_dim: 0 | num_hidden_layers: null | intermediate_size: 3
"""
RECIPES = [
    "a: [1, 2",
    "a: b: c",
    "\t- x",
    "- 1\n- 2",
    "just text",
    "",
    "a: !!python/name:os.system",
    "*a",
    "{",
    "\0",
    "a: 1\n b: 2",
]
DATA = """
{"problem": "1", "ans | [1, 2] | 7 | {"a": 1} | {"problem": {"a": 1}} | \ufeff | {} | {"problem": null, "answer": null}
{"prompt": [{"role": "user"}], "answer": "1"} | {"prompt": [{"role": "system", "content": "x"}], "answer": "1"}
"""
# What `prepare` makes, and `out`, which is new.
FILES = {
    "model": "model",
    "data": "data.jsonl",
    "empty": "empty",
    "recipe": "recipe.yaml",
    "out": "out",
    "run": "run",
    "checkpoint": "run/checkpoint-1",
}
# Without one of these a run goes on.
OPTIONAL = ("generation_config.json", "tokenizer_config.json", "manifest.json")
# That read a recipe: one is drawn, `train` twice as often as another.
COMMANDS = ("train", "train", "plan", "doctor", "serve")
# Options with which a command tries nothing that takes long.
DRY = {"doctor": ["--probe_prompts=0"], "serve": ["--dry_run"]}
ENDS = ("one line", "other", "traceback", "accepted")
LIMIT_S = 120  # for one input


# Inputs --------------------------------------------------------------------------------------------------------------


def parts(table: str) -> list[str]:
    """The parts of a table: what stands between bars and line ends."""
    texts = []
    for line in table.strip().splitlines():
        texts += line.split(" | ")
    return texts


def read_settings(text: str) -> dict[str, Any]:
    """Settings of a recipe that stand in a line."""
    return yaml.safe_load(f"{{{text}}}")


class Inputs:
    """
    Wrong inputs. Their files are made, and their random parts drawn, when it is their turn.

    Args:
        place: A folder with what `prepare` makes.
        recipe: What it returns.
        rng: By which everything is drawn, in one order.
    """

    def __init__(self, place: Path, recipe: dict[str, Any], rng: random.Random) -> None:
        self.place = place
        self.recipe = recipe
        self.rng = rng
        self.names = {name: place / path for name, path in FILES.items()}
        # The recipe of an input, and the model or checkpoint of one.
        self.file = place / "wrong.yaml"
        self.copy = place / "copy"

    def command(self, changes: dict[str, Any], *commands: str) -> list[str]:
        """Write the recipe with some changes. Returns the line of one of `commands` that reads it (default: any)."""
        self.file.write_text(yaml.safe_dump(self.recipe | changes))
        # Also drawn where there is one command alone: the draws that follow depend on it.
        name = self.rng.choice(commands or COMMANDS)
        return [name, "--config", str(self.file), *DRY.get(name, [])]

    def reading_copy(self, command: str) -> list[str]:
        """The line of a command that reads the copy of a model, or of a checkpoint ("resume")."""
        if command == "train":
            return self.command({"model_name_or_path": str(self.copy)}, "train")
        if command == "resume":
            return self.command({"resume_from_checkpoint": str(self.copy)}, "train")
        if command == "export":
            return ["export", str(self.copy), str(self.names["out"])]
        return ["eval", str(self.copy), "--suite", str(self.names["data"]), "--max_new_tokens", "8"]

    def recipe_fields(self) -> Iterator[Case]:
        """Fields of a recipe with a wrong value, and with a wrong name."""
        kinds = kinds_of_fields()
        for name, kind in self.rng.sample(sorted(kinds.items()), 100):
            changes = {name: self.rng.choice(WRONG[kind])}
            yield "wrong type or number", changes, self.command(changes)

        for name in self.rng.sample(sorted(kinds), 20):
            misspelt = name[:3] + self.rng.choice("xyz") + name[3:]
            changes = {misspelt: 1}
            yield "unknown key", changes, self.command(changes)

    def settings(self) -> Iterator[Case]:
        """Settings that contradict each other, or the data."""
        for part in parts(CONTRADICTIONS):
            yield "settings", part, self.command(read_settings(part), "train")

    def options(self) -> Iterator[Case]:
        """Command lines."""
        for line in OPTIONS.strip().splitlines():
            head, _, rest = line.partition(":")
            for part in rest.split(" |"):
                words = f"{head} {part}".split()
                yield "options", f"{head} {part}", [word.format(**self.names) for word in words]

    def files(self) -> Iterator[Case]:
        """Recipes and data sets."""
        for text in RECIPES:
            self.file.write_text(text)
            yield "recipe", text, ["train", "--config", str(self.file)]

        data = self.place / "wrong.jsonl"
        for text in parts(DATA):
            data.write_text(text)
            yield "data", text, self.command({"dataset_name_or_path": str(data)}, "train", "doctor")

    def folders(self) -> Iterator[Case]:
        """Folders that cannot be written."""
        kind = "unwritable folder"
        data = self.names["data"]
        for folder in (f"{data}/x", "/proc/x", str(data)):
            yield kind, folder, self.command({"output_dir": folder}, "train")
            yield kind, folder, self.command({"sync_folder": folder}, "train")
            yield kind, folder, ["report", str(self.names["run"]), "--output_dir", folder]
            yield kind, folder, ["export", str(self.names["model"]), folder]

    def configs(self) -> Iterator[Case]:
        """A model with a wrong `config.json`."""
        model = self.names["model"]
        config = json.loads((model / "config.json").read_text())
        for part in parts(CONFIGS):
            shutil.copytree(model, self.copy, dirs_exist_ok=True)
            changed = config | read_settings(part)
            (self.copy / "config.json").write_text(json.dumps(changed))
            command = self.rng.choice(("train", "export", "eval"))
            yield "model: config.json", part, self.reading_copy(command)

    def damaged(self, what: str, source: Path, command: str) -> Iterator[Case]:
        """A model or a checkpoint, each of whose files is cut off, and missing."""
        for path in sorted(source.iterdir()):
            if path.suffix not in (".json", ".safetensors", ".pt", ".pth"):
                continue

            self._copy(source)
            content = path.read_bytes()
            (self.copy / path.name).write_bytes(content[: self.rng.randrange(len(content) - 1)])
            yield f"{what}: file cut off", path.name, self.reading_copy(command)

            if path.name not in OPTIONAL:
                self._copy(source)
                (self.copy / path.name).unlink()
                yield f"{what}: file missing", path.name, self.reading_copy(command)

    def _copy(self, source: Path) -> None:
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(source, self.copy)


def inputs(place: Path, recipe: dict[str, Any], rng: random.Random) -> Iterator[Case]:
    """All wrong inputs; see `Inputs`."""
    wrong = Inputs(place, recipe, rng)
    yield from wrong.recipe_fields()
    yield from wrong.settings()
    yield from wrong.options()
    yield from wrong.files()
    yield from wrong.folders()
    yield from wrong.configs()
    for command in ("train", "export", "eval"):
        yield from wrong.damaged("model", wrong.names["model"], command)
    yield from wrong.damaged("checkpoint", wrong.names["checkpoint"], "resume")


def kinds_of_fields() -> dict[str, str]:
    """What each field of a recipe takes, a key of `WRONG`, by its name."""
    kinds = {}
    for group in methods.groups_of():
        types = get_type_hints(group)
        for field in fields(group):
            kind = KINDS.get(types[field.name])
            if kind is not None:
                kinds[field.name] = kind
    return kinds


# How they end --------------------------------------------------------------------------------------------------------


def outcome(argv: list[str]) -> tuple[str, str]:
    """How a command ends, one of `ENDS`, and what it said."""
    said = io.StringIO()
    signal.alarm(LIMIT_S)
    try:
        with redirect_stdout(said), redirect_stderr(said):
            cli.main(argv)
    except SystemExit as end:
        if end.code:
            return refusal(argv, said.getvalue(), end.code)
    except BaseException as error:
        last_line = traceback.format_tb(error.__traceback__)[-1]
        return "traceback", f"{type(error).__name__}: {error} {last_line}"
    finally:
        signal.alarm(0)
    return "accepted", said.getvalue()[-300:]


def refusal(argv: list[str], text: str, code: str | int) -> tuple[str, str]:
    """Whether a command that failed said so in one line, and that line."""
    # Python prints a text that is the exit code when the process ends.
    if isinstance(code, str):
        text += f"\n{code}"
    lines = []
    for line in text.splitlines():
        if line.startswith("qarl-trl ") or ": error: " in line or " FAIL" in line:
            lines.append(line)

    words = " | ".join(lines) or text[-300:]
    # The doctor has a line for each thing that is wrong.
    if len(lines) == 1 or (lines and "doctor" in argv):
        return "one line", words
    return "other", words


def too_long(*_: Any) -> None:
    raise TimeoutError(f"{LIMIT_S} s")


def stop_before_engines() -> None:
    """What `eval` accepts up to its engine counts as accepted; what takes two minutes as a traceback."""
    sample.start_engine = lambda *_, **__: sys.exit()
    signal.signal(signal.SIGALRM, too_long)


def prepare(place: Path) -> dict[str, Any]:
    """
    Make what inputs are made from: a model, data, and a run with a checkpoint.

    Args:
        place: An empty folder, in which the process is afterwards.

    Returns:
        A recipe in which nothing is wrong.
    """
    model = save_model(place / "model", layers=1)
    os.chdir(place)
    Path("empty").mkdir()
    data = place / "data.jsonl"
    lines = [f'{{"problem": "{number}+1", "answer": "{number + 1}"}}\n' for number in range(8)]
    data.write_text("".join(lines))

    file = place / "recipe.yaml"
    recipe = read_settings(RECIPE) | {"model_name_or_path": model, "dataset_name_or_path": str(data)}
    recipe["output_dir"] = str(place / "run")
    file.write_text(yaml.safe_dump(recipe))
    # A control. It makes the checkpoint that is damaged later.
    ended = outcome(["train", "--config", str(file)])
    assert ended[0] == "accepted", ended

    # A run beside the checkpoints of another is refused, whatever else is wrong.
    recipe["output_dir"] = str(place / "next")
    file.write_text(yaml.safe_dump(recipe))
    return recipe


def tried(place: Path, kind: str, wrong: Any, argv: list[str]) -> tuple[str, str, str]:
    """
    Try one input.

    Args:
        place: The folder of `prepare`.
        kind: Of the input.
        wrong: What is wrong with it.
        argv: The command line.

    Returns:
        The kind, how it ended, and what was said.
    """
    os.chdir(place)
    for folder in ("next", "out", "page"):
        shutil.rmtree(place / folder, ignore_errors=True)

    # An engine that begins writes its rank into the environment, and the next training would seem distributed.
    environment = dict(os.environ)
    ended, said = outcome(argv)
    os.environ.clear()
    os.environ.update(environment)

    command = " ".join(argv[:1])
    words = f"{command}, {wrong!r}: {' '.join(said.split())}"
    row = (kind, ended, words.replace(str(place), ""))
    if ended != "one line":
        print(*row, flush=True)
    return row


def report(name: str, args: Any, results: list[tuple[str, str, str]]) -> None:
    """
    Write how many inputs of each kind ended how, and what was said.

    Args:
        name: Of the script.
        args: Its settings.
        results: What `tried` returned.
    """
    counts = Counter((kind, ended) for kind, ended, _ in results)
    kinds = dict.fromkeys(kind for kind, _, _ in results)
    rows = []
    for kind in kinds:
        rows.append({"wrong": kind} | {end: counts[kind, end] for end in ENDS})

    totals = Counter(ended for _, ended, _ in results)
    total = ", ".join(f"{totals[end]} {end}" for end in ENDS)
    said = [" | ".join(row)[:400] for row in results]
    common.report(name, args, [f"{len(results)} inputs: {total}"], rows, start_load=0.0, inputs=said)


def main() -> None:
    args = common.arguments(__doc__, seed=(0, 0, "of the draws"), every=(1, 3, "take each Nth input alone"))
    stop_before_engines()

    results = []
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        recipe = prepare(place)
        cases = inputs(place, recipe, random.Random(args.seed))
        for case in itertools.islice(cases, 0, None, args.every):
            results.append(tried(place, *case))
    report("bad_inputs", args, results)


if __name__ == "__main__":
    main()
