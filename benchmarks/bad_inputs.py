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


NUMBERS = {kind for number in (int, float) for kind in (number, number | None)}
WRONG = {  # by what a field takes
    "number": ["many", [1], {"a": 1}, float("nan"), float("inf"), "1,5", "0x", True],
    "switch": ["perhaps", 7, [True], {"on": 1}],
    "text": [[["a"]], {"a": {"b": 1}}],
}
RECIPE = """max_steps: 1, save_steps: 1, logging_steps: 1, use_cpu: on, bf16: off, use_vllm: off, report_to: none, num_generations: 4,
per_device_train_batch_size: 4, max_completion_length: 4, conversational: off"""
# Changes of the recipe, each within bars.
CONTRADICTIONS = """
max_steps: 0 | num_iterations: 0 | per_device_train_batch_size: 0 | num_generations: 3 | steps_per_generation: 99 | temperature: 0
gradient_accumulation_steps: 0 | learning_rate: -1 | num_train_epochs: 0, max_steps: -1 | quant_scheme: W2A2 | quant_group_size: 7
quant_scheme: checkpoint | lora_base: frozen | fp16: on | bf16: on, fp16: on | use_liger_kernel: on | delta: 1.5 | top_p: 2
tbpo_delta_high: 0 | tbpo_epsilon_high: -0.5 | tbpo_mismatch_cap: 0.5 | max_tokens_per_pass: 2 | mismatch_abort_threshold: 0.1
verify_sync: sometimes | loss_type: ppo | load_in_4bit: on | use_peft: on | use_peft: on, lora_dropout: 0, optim_muon: on | beta: -1
push_to_hub: on, export_low_bit: off | push_to_hub: on, hub_strategy: checkpoint | eval_strategy: steps | system_prompt: Think.
system_prompt: None | quant_group_size: none | max_steps: null
prompt_template: no slot | problem_column: x | answer_column: x | dataset_split: "train[" | answer_column: 5
reward_funcs: os.path | reward_funcs: nothing | reward_funcs: json.nothing | reward_funcs: [] | reward_funcs: [math_reward, 3]
resume_from_checkpoint: on, output_dir: nowhere | resume_from_checkpoint: nowhere | enable_jit_checkpoint: on | optim: sgdd
lr_scheduler_type: wavy | save_strategy: sometimes | learner_ops: engines | quant_kernel: engine, quant_scheme: NVFP4A16
quant_recipe: nowhere.yaml | quant_ignore: ["re:["] | env: {HF_TOKEN: a} | env: [1] | base: nowhere.yaml | base: 3 | lora_base: int4
model_init_kwargs: {device_map: balanced} | model_init_kwargs: {token: hf_abc} | model_init_kwargs: {dtype: int7} | warmup_steps: -5
generation_kwargs: {nothing: 1} | chat_template_path: nowhere | max_completion_length: 0 | deepspeed: nowhere.json | report_to: nobody
accelerator_config: nowhere.json | model_name_or_path: "" | dataset_name_or_path: "" | dataloader_num_workers: -1
"""
# Commands without their name, after it; {} are files that are there.
OPTIONS = """
: | trian | schemes now | schemes --all | train --config | train --max_steps | train --max_steps null | train --quant_group_size none | train --nothing | doctor --nothing 1
export: | a | {data} {out} | user/a/b {out} | {empty} {out} | {model} {model} | {model} {data} | {model} /proc/nowhere
export {model} {out}: --scheme W2A2 | --group_size 7 | --group_size x | --targets Conv9 | --ignore re:[
push: | a | nowhere user/model | {model} user/model | {model} a/b/c
eval: | {model} | {model} --suite nothing | {model} --suite {empty} | {model} --suite a=nowhere.jsonl | {empty} --suite {data}
eval {model} --max_new_tokens 8 --suite {data}: --suite {data} | --k 0 | --k x | --temperature -1 | --temperature nan | --top_p 2 | --limit 0 | --limit -3
eval {model} --suite {data}: --max_new_tokens 0 | --max_new_tokens 99999 | --engine_kwargs [1] | --engine_kwargs {{ | --pass_at 9
eval {model} --max_new_tokens 8 --suite {data}: --output_dir {data}/x | --tensor_parallel_size 0 | --problem_column x | --nothing
report: | nowhere | {empty} | {model} | {data} | a={empty} b={empty} | --output_dir
plan: | --config nowhere.yaml
plan --config {recipe}: --gpus 0 | --gpus -2 | --gpus x | --memory nan | --memory -1 | --memory 1e308 | --sharding zero9 | --replicas 0
plan --config {recipe}: --gpus 3 --replicas 2
doctor --config: nowhere.yaml | {recipe} --probe_prompts x
serve: | --config nowhere.yaml
serve --dry_run --config {recipe}: --host 0.0.0.0 | --vllm_server_port x | --vllm_server_port 99999999 | --sync_folder {data}/x
serve --dry_run --config {recipe}: --vllm_server_base_url nonsense:x | --vllm_tensor_parallel_size 0
"""
CONFIGS = """
hidden_size: big | num_hidden_layers: two | vocab_size: [1] | rms_norm_eps: x | architectures: 5 | model_type: 7 | model_type: nothing
quantization_config: x | quantization_config: {quant_method: compressed-tensors} | num_key_value_heads: 0 | hidden_size: -1 | head_dim: 0
num_hidden_layers: null | intermediate_size: 3
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
DATA = """{"problem": "1", "ans | [1, 2] | 7 | {"a": 1} | {"problem": {"a": 1}} | \ufeff | {} | {"problem": null, "answer": null}
{"prompt": [{"role": "user"}], "answer": "1"} | {"prompt": [{"role": "system", "content": "x"}], "answer": "1"}"""
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
OPTIONAL = ("generation_config.json", "tokenizer_config.json", "manifest.json")  # without it a run goes on


def parts(table: str) -> list[str]:
    return [part for line in table.strip().splitlines() for part in line.split(" | ")]


def inputs(place: Path, recipe: dict[str, Any], rng: random.Random) -> Iterator[tuple[str, Any, list[str]]]:
    """Kind, what is wrong, and command line of each input. Its files are made when it is its turn."""
    model, data, empty, checkpoint = (place / name for name in ("model", "data.jsonl", "empty", "run/checkpoint-1"))
    names = {"model": model, "data": data, "empty": empty, "recipe": place / "recipe.yaml", "out": place / "out"}
    file, copy = place / "wrong.yaml", place / "copy"

    def command(changes: dict[str, Any], *commands: str) -> list[str]:
        file.write_text(yaml.safe_dump(recipe | changes))
        one = rng.choice(commands or ("train", "train", "plan", "doctor", "serve"))
        return [one, "--config", str(file), *{"doctor": ["--probe_prompts=0"], "serve": ["--dry_run"]}.get(one, [])]

    takes = [(f.name, get_type_hints(group)[f.name]) for group in methods.groups_of() for f in fields(group)]
    kinds = {
        n: "number" if t in NUMBERS else "switch" if t is bool else "text"
        for n, t in takes
        if t in {*NUMBERS, bool, str}
    }
    for name, kind in rng.sample(sorted(kinds.items()), 100):
        yield "wrong type or number", (changes := {name: rng.choice(WRONG[kind])}), command(changes)
    for name in rng.sample(sorted(kinds), 20):
        yield "unknown key", (changes := {name[:3] + rng.choice("xyz") + name[3:]: 1}), command(changes)
    for part in parts(CONTRADICTIONS):
        yield "settings", part, command(yaml.safe_load(f"{{{part}}}"), "train")
    for line in OPTIONS.strip().splitlines():
        head, _, rest = line.partition(":")
        for part in rest.split(" |"):
            yield "options", f"{head} {part}", [word.format(**names) for word in f"{head} {part}".split()]
    for text in RECIPES:
        file.write_text(text)
        yield "recipe", text, ["train", "--config", str(file)]
    for text in parts(DATA):
        (place / "wrong.jsonl").write_text(text)
        yield "data", text, command({"dataset_name_or_path": str(place / "wrong.jsonl")}, "train", "doctor")
    for folder in (f"{data}/x", "/proc/x", str(data)):
        yield "unwritable folder", folder, command({"output_dir": folder}, "train")
        yield "unwritable folder", folder, command({"sync_folder": folder}, "train")
        yield "unwritable folder", folder, ["report", str(place / "run"), "--output_dir", folder]
        yield "unwritable folder", folder, ["export", str(model), folder]
    with_copy = [
        lambda: command({"model_name_or_path": str(copy)}, "train"),
        lambda: ["export", str(copy), str(names["out"])],
        lambda: ["eval", str(copy), "--suite", str(data), "--max_new_tokens", "8"],
    ]
    for part in parts(CONFIGS):
        shutil.copytree(model, copy, dirs_exist_ok=True)
        config = json.loads((model / "config.json").read_text()) | yaml.safe_load(f"{{{part}}}")
        (copy / "config.json").write_text(json.dumps(config))
        yield "model: config.json", part, rng.choice(with_copy)()
    resumes = lambda: command({"resume_from_checkpoint": str(copy)}, "train")  # noqa: E731
    for source, argv in [*((model, argv) for argv in with_copy), (checkpoint, resumes)]:
        for path in sorted(
            path for path in source.iterdir() if path.suffix in (".json", ".safetensors", ".pt", ".pth")
        ):
            for cut in (True, False) if path.name not in OPTIONAL else (True,):
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(source, copy)
                content = path.read_bytes()
                (copy / path.name).write_bytes(content[: rng.randrange(len(content) - 1)]) if cut else (
                    copy / path.name
                ).unlink()
                kind = f"{'checkpoint' if source == checkpoint else 'model'}: file {'cut off' if cut else 'missing'}"
                yield kind, path.name, argv()


def outcome(argv: list[str]) -> tuple[str, str]:
    """How a command ends, and what it said."""
    said = io.StringIO()
    signal.alarm(120)
    try:
        with redirect_stdout(said), redirect_stderr(said):
            cli.main(argv)
    except SystemExit as end:
        text = said.getvalue() + (f"\n{end.code}" if isinstance(end.code, str) else "")
        lines = [
            line
            for line in text.splitlines()
            if line.startswith("qarl-trl ") or ": error: " in line or " FAIL" in line
        ]
        if end.code:
            return ("one line" if len(lines) == 1 or ("doctor" in argv and lines) else "other"), " | ".join(
                lines
            ) or text[-300:]
    except BaseException as error:
        return "traceback", f"{type(error).__name__}: {error} {traceback.format_tb(error.__traceback__)[-1]}"
    finally:
        signal.alarm(0)
    return "accepted", said.getvalue()[-300:]


def too_long(*_: Any) -> None:
    raise TimeoutError("120 s")


def stop_before_engines() -> None:
    """What `eval` accepts up to its engine counts as accepted; what takes two minutes as a traceback."""
    sample.start_engine = lambda *_, **__: sys.exit()
    signal.signal(signal.SIGALRM, too_long)


def prepare(place: Path) -> dict[str, Any]:
    """Make a model, data, and a run with a checkpoint; returns a recipe in which nothing is wrong."""
    model, data = save_model(place / "model", layers=1), place / "data.jsonl"
    os.chdir(place)
    Path("empty").mkdir()
    data.write_text("".join(f'{{"problem": "{i}+1", "answer": "{i + 1}"}}\n' for i in range(8)))
    recipe = yaml.safe_load(f"{{{RECIPE}}}") | {"model_name_or_path": model, "dataset_name_or_path": str(data)}
    recipe["output_dir"] = str(place / "run")
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    good = outcome(["train", "--config", str(place / "recipe.yaml")])
    assert good[0] == "accepted", good  # control, and it makes the checkpoint that is damaged later

    # A run beside the checkpoints of another is refused, whatever else is wrong.
    recipe["output_dir"] = str(place / "next")
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return recipe


def tried(place: Path, kind: str, wrong: Any, argv: list[str]) -> tuple[str, str, str]:
    """Kind, end and words of one input."""
    os.chdir(place)
    for folder in ("next", "out", "page"):
        shutil.rmtree(place / folder, ignore_errors=True)
    ended, said = outcome(argv)
    row = (kind, ended, f"{' '.join(argv[:1])}, {wrong!r}: {' '.join(said.split())}".replace(str(place), ""))
    if ended != "one line":
        print(*row, flush=True)
    return row


def report(name: str, args: Any, found: list[tuple[str, str, str]]) -> None:
    """Write how many inputs of each kind ended how, and what was said."""
    counts = Counter((kind, ended) for kind, ended, _ in found)
    ends = ("one line", "other", "traceback", "accepted")
    rows = [
        {"wrong": kind} | {end: counts[kind, end] for end in ends} for kind in dict.fromkeys(row[0] for row in found)
    ]
    total = ", ".join(f"{sum(ended == end for _, ended, _ in found)} {end}" for end in ends)
    said = [" | ".join(row)[:400] for row in found]
    common.report(name, args, [f"{len(found)} inputs: {total}"], rows, start_load=0.0, inputs=said)


def main() -> None:
    args = common.arguments(__doc__, seed=(0, 0, "of the draws"), every=(1, 3, "take each Nth input alone"))
    stop_before_engines()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        recipe = prepare(place)
        cases = inputs(place, recipe, random.Random(args.seed))
        found = [tried(place, *case) for case in itertools.islice(cases, 0, None, args.every)]
    report("bad_inputs", args, found)


if __name__ == "__main__":
    main()
