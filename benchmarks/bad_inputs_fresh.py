"""
Gives 300 more wrong inputs to all commands, written by somebody who had not seen those of `bad_inputs.py`.

They are mostly content: rows of a data set, text of a recipe, files of a model, of a checkpoint and of a run. Each
runs as `qarl-trl` would, in this process.
"""

import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bad_inputs
import common
import yaml
from bad_inputs import FILES, Case, parts, read_settings


# Files with a data set, each line of a file within bars.
ROWS = r"""
{"problem": "1+1", "answer": "2"} {"problem" | {"problem": ["a", "b"], "answer": "1"} | {"problem": "", "answer": "1"}
{"problem": "1", "answer": ""} | {"problem": "1", "answer": []} | {"question": null, "answer": "1"}
{"problem": "1", "solution": null}
{"prompt": [], "answer": "1"} | {"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}
{"prompt": [{"role": "user", "content": null}], "answer": "1"} | {"prompt": [{"content": "x"}], "answer": "1"}
{"text": "1", "label": "2"}
{"prompt": ["x"], "answer": "1"} | {"problem": "1", "answer": {"a": null}} | nonsense | "text" | null | [[]]
[{"problem": "1"}] | {"a": 1} {"b": 2}
{"Problem": "1", "Answer": "2"} | <html></html> | problem,answer | {"problem": "1" "answer": "2"}
{'problem': '1', 'answer': '2'}
"""
SPLITS = [
    "train[:0]",
    "train[5:2]",
    "train[:200%]",
    "train[a:b]",
    "train+test",
    "train[",
    "train[:-99]",
    "",
    "a b",
    "train][",
]
# Recipes as they stand in a file.
TEXTS = [
    "max_steps: 1\nmax_steps: 2",
    "Max_Steps: 1",
    "max-steps: 1",
    "'max_steps ': 1",
    "1: 2",
    "null: 1",
    "[1]: 2",
    "--- \nmax_steps: 1\n---\nmax_steps: 2",
    "%TAG ! tag:x\n---\na: 1",
    "a: &x 1\nmax_steps: *x",
    "<<: {max_steps: 1}",
    "learning_rate: 2026-01-01",
    "learning_rate: 1:30",
    "learning_rate: 1e",
    "learning_rate: .inf",
    "max_steps: 1.5",
    "max_steps: 1e3x",
    "max_steps: !!str 1x",
    "output_dir: !!binary aGk=",
    "output_dir: null",
    "output_dir: ''",
    "output_dir: [a]",
    "base: [a, b]",
    "base: .",
    "base: /dev/null",
    "base: wrong.yaml",
    "base: {a: 1}",
    "base: ''",
    "env:\n  A: 1",
    "- max_steps: 1",
    "max_steps:\n- 1\n- 2",
    "max_steps: {a: 1",
    'max_steps: "1',
    "hub_token: hf_secret\nmax_steps: {",
    "reward_funcs:\n  math_reward: 1",
    "quant_ignore: lm_head: x",
    "---",
    "true",
    "3",
    "ключ: 1",
    "max_steps: 1 2",
    "max_steps: '\u0661x'",
    "max_steps: ~x",
    "? max_steps\n: - 1",
]
BYTES = [b"\xff\xfea\x00:\x00", b"max_steps: \xe4", b"\x1f\x8b\x08\x00", b"a: \x00", b"\xef\xbb\xbf{"]
# Changes of the recipe, each within bars.
SETTINGS = """
num_generations: 1 | generation_batch_size: 6 | generation_batch_size: 4, steps_per_generation: 2
per_device_train_batch_size: 6 | top_k: -5
min_p: 2 | min_p: -1 | repetition_penalty: 0 | repetition_penalty: -1 | temperature: -1 | top_p: 0 | top_p: -0.1
max_completion_length: -4
use_vllm: on, vllm_max_model_length: 1 | use_vllm: on, vllm_max_model_length: 0
use_vllm: on, vllm_gpu_memory_utilization: 2
use_vllm: on, vllm_gpu_memory_utilization: 0 | use_vllm: on, vllm_tensor_parallel_size: 3
use_vllm: on, vllm_mode: colo
use_vllm: on, vllm_engine_kwargs: [1] | use_vllm: on, vllm_engine_kwargs: {model: x}
use_vllm: on, vllm_engine_kwargs: {load_format: auto}
use_vllm: on, vllm_engine_kwargs: {seed: 1} | use_vllm: on, vllm_engine_kwargs: {quantization: awq}
use_vllm: on, vllm_mode: server
use_vllm: on, vllm_mode: server, sync_folder: {a: 1}
use_vllm: on, vllm_mode: server, sync_folder: s, vllm_server_port: 0
use_vllm: on, generation_kwargs: {seed: 3} | use_vllm: on, generation_kwargs: {n: 4}
use_vllm: on, generation_kwargs: {stop: [";"]}, mask_truncated_completions: on
use_vllm: on, generation_kwargs: [1] | reward_weights: [1, 2] | reward_weights: [x] | reward_weights: [0]
reward_timeout: 0 | reward_timeout: -1
reward_timeout: nan | scale_rewards: x | epsilon: -1 | epsilon_high: x | tbpo_delta_low: -0.1 | tbpo_delta_low: 1.5
tbpo_mismatch_cap: 0
advantage_filter: most | optim_muon: 3 | learning_rate: nan | learning_rate: inf | weight_decay: -1 | adam_beta1: 2
adam_epsilon: -1
max_grad_norm: -1 | warmup_ratio: 2 | warmup_ratio: -1 | logging_steps: 0 | save_steps: 0 | save_steps: -3
eval_steps: 0, eval_strategy: steps
eval_strategy: steps, eval_dataset_name_or_path: nowhere.jsonl | quant_group_size: 0 | quant_group_size: -2
quant_group_size: 48 | quant_group_size: 1.5
quant_ignore: ["re:.*"] | quant_ignore: ["re:("] | quant_ignore: [5] | quant_ignore: [nothing_of_this]
quant_ignore: {} | quant_ignore: [] | quant_targets: [Conv2d]
quant_scheme: [W4A16] | quant_scheme: w4a16x | quant_scheme: "" | quant_kernel: fast
learner_ops: engine, use_vllm: off
quant_scheme: none, lora_base: frozen, use_peft: on | quant_scheme: none, quantize_learner: on, quant_group_size: 64
quant_keep_matrices: maybe
use_peft: on, lora_r: 0 | use_peft: on, lora_r: -1 | use_peft: on, lora_r: x
use_peft: on, lora_dropout: 0, lora_target_modules: [nothing]
use_peft: on, lora_dropout: 2 | use_peft: on, lora_dropout: 0, lora_modules_to_save: [nothing]
use_peft: on, lora_dropout: 0, lora_alpha: x
use_peft: on, lora_dropout: 0, lora_task_type: SOMETHING | use_peft: on, lora_dropout: 0, use_dora: on
lora_base: frozen, use_peft: off
use_peft: on, lora_dropout: 0, lora_base: frozen, optim_muon: on
use_peft: on, lora_dropout: 0, lora_target_parameters: [a.b] | load_in_8bit: on
seed: -1 | seed: x | seed: 99999999999999999999 | data_seed: x | dataloader_num_workers: x
dataloader_drop_last: maybe | report_to: [nobody]
hub_model_id: a/b/c, push_to_hub: on | hub_strategy: sometimes | push_to_hub: on, hub_model_id: "bad name!"
output_dir: {model} | output_dir: {data} | output_dir: {model}/x/../
sync_folder: {model} | chat_template_kwargs: [1] | chat_template_kwargs: "{" | chat_template_path: {data}
attn_implementation: flash_attention_9
model_revision: no-such-branch, model_name_or_path: nobody/nothing | trust_remote_code: maybe | dtype: int7
dtype: int8 | dtype: float16 | model_init_kwargs: {nothing: 1}
model_init_kwargs: {max_position_embeddings: 4} | model_init_kwargs: [1] | model_init_kwargs: "{"
model_name_or_path: {data} | model_name_or_path: {empty}
model_name_or_path: [a] | model_name_or_path: a/b/c/d | model_name_or_path: /proc | dataset_name_or_path: /dev/null
dataset_name_or_path: {empty} | dataset_name_or_path: {model}
dataset_name_or_path: x.csv | dataset_name_or_path: nobody/nothing | dataset_config: nothing
resume_from_checkpoint: {model} | resume_from_checkpoint: {data}
resume_from_checkpoint: 3 | gradient_checkpointing_kwargs: [1]
torch_compile: on, torch_compile_backend: nothing
max_tokens_per_pass: 0 | max_tokens_per_pass: -5 | mismatch_abort_threshold: -1 | mismatch_abort_threshold: nan
verify_sync: 0 | verify_sync: -1 | verify_sync: 1.5
export_low_bit: maybe | fsdp: full_shard | deepspeed: {data}
accelerator_config: [1] | optim_args: x | lr_scheduler_kwargs: "{"
beta: nan | num_iterations: -1 | sync_ref_model: on, beta: 0 | log_completions: maybe | max_steps: -5
num_train_epochs: nan, max_steps: -1 | problem_column: [a]
system_prompt: {a: 1} | prompt_template: "{problem" | prompt_template: "{}" | prompt_template: "" | env: x
config: other.yaml | dry_run: maybe | quant_recipe: {data} | quant_recipe: {model}
"""
# Recipes of llm-compressor.
MODIFIERS = [
    "",
    "a: 1",
    "- 1",
    "quant_stage: 3",
    "quant_stage: {quant_modifiers: {}}",
    "quant_stage: {quant_modifiers: {NoSuchModifier: {}}}",
    "quant_stage: {quant_modifiers: {QuantizationModifier: {scheme: W3A3, targets: [Linear]}}}",
    "quant_stage: {quant_modifiers: {QuantizationModifier: {targets: [Linear]}}}",
    "quant_stage: {quant_modifiers: {QuantizationModifier: {scheme: W4A16, targets: [Nothing]}}}",
    "quant_stage: {quant_modifiers: {QuantizationModifier: {scheme: W4A16, targets: 5}}}",
    "quant_stage: {quant_modifiers: {QuantizationModifier: {scheme: W4A16, targets: [Linear], ignore: ['re:[']}}}",
    "quant_stage: {quant_modifiers: {QuantizationModifier: {config_groups: {g: {weights: {num_bits: 99}}}}}}",
    "quant_stage: {quant_modifiers: {GPTQModifier: {scheme: W4A16, targets: [Linear], actorder: up}}}",
    "a: &a [*a]",
]
# Commands without their name; {} are files that are there.
OPTIONS = """
train: x | --config | --config {recipe} extra | --config {recipe} --max_steps | --config {recipe} --max_steps=
train: --config {recipe} --max_steps=x | --config {empty}
train: --config {model} | --config {recipe} --config nowhere.yaml | --config {recipe} --max_step 3
train: --config {recipe} --learning-rate x | --config {recipe} -x | --config {recipe} --quant_ignore
eval {model} --suite {data} --max_new_tokens 8: --reward_funcs nothing | --reward_funcs os.nothing
eval {model} --suite {data} --max_new_tokens 8: --reward_funcs os.path | --conversational maybe
eval {model} --suite {data} --max_new_tokens 8: --conversational true
eval {model} --suite {data} --max_new_tokens 8: --problem_column x | --answer_column x
eval {model} --suite {data} --max_new_tokens 8: --vllm_gpu_memory_utilization x | --prompt_template x
eval {model} --suite {data} --max_new_tokens 8: --chat_template_kwargs x
eval {model} --suite {data} --max_new_tokens 8: --chat_template_kwargs [] | --seed x | --pass_at 0 | --pass_at x
eval {model} --suite {data} --max_new_tokens 8: --top_p 0 | --temperature inf | --k 0.5 | --k 99999999999999999999
eval {model} --suite {data} --max_new_tokens 8: --output_dir {model} | --output_dir {data} | --engine_kwargs "x"
eval {model} --suite {data} --max_new_tokens 8: --limit x | --system_prompt a --conversational false
eval: {data} --suite {data} | {model} --suite | {model} --suite {model} | nobody/nothing --suite {data}
export: {model} | {model} {out} --scheme | {checkpoint} {out} --scheme x | {run} {out} | nobody/nothing {out}
export: {model} {out} --nothing | {model} {data}/x | {model} {model}/../model
export {model} {out}: --ignore | --targets | --group_size 0 | --group_size -7 | --group_size 1e3 | --scheme none
export {model} {out}: --scheme checkpoint | --recipe nowhere.yaml | --recipe {data}
push: {run} | {empty} user/model | {data} user/model | {run} not-a-name/ | {run} "user/mo del"
push: {run} user/model --nothing | {checkpoint} user/model
report: {data} --output_dir {out} | {run} {run} | {run} --nothing | x= | ={run} | {checkpoint}/nowhere
plan --config {recipe}: --gpu nothing | --gpus 1e3 | --gpu h100 --gpus 0 | --memory x | --sharding | --from nowhere
plan --config {recipe}: --from {data} | --replicas x | --replicas -1
doctor --config {recipe} --probe_prompts=0: --nothing | --max_steps=x | --dataset_name_or_path=nowhere.jsonl
doctor --config {recipe} --probe_prompts=0: --reward_funcs=nothing
doctor: --config {model} | --config nowhere.yaml | x
serve --dry_run --config {recipe}: --port x | --host | --nothing 1 | --vllm_mode=colo | --vllm_max_model_length=x
schemes: --x | x
"""
CONFIGS = """
num_attention_heads: 3 | num_attention_heads: 0 | num_attention_heads: x | hidden_act: nothing | hidden_act: 3
rope_parameters: {rope_type: nothing} | rope_parameters: x
max_position_embeddings: 0 | max_position_embeddings: x | dtype: nothing | vocab_size: 3 | vocab_size: 0
vocab_size: -1 | tie_word_embeddings: perhaps | eos_token_id: x
layer_types: [nothing] | layer_types: 3 | num_key_value_heads: 3 | rms_norm_eps: -1 | attention_dropout: x
architectures: [Nothing]
model_type: qwen9 | model_type: null | model_type: bert | auto_map: x | transformers_version: 3 | initializer_range: x
quantization_config: [] | quantization_config: {quant_method: awq} | quantization_config: {quant_method: nothing}
quantization_config: {quant_method: 3}
quantization_config: {quant_method: compressed-tensors, config_groups: {}}
quantization_config: {quant_method: compressed-tensors, config_groups: {g: 3}}
quantization_config: {quant_method: compressed-tensors, config_groups: {g: {targets: [Linear]}}, format: nothing}
quantization_config: {quant_method: compressed-tensors, ignore: 3}
quantization_config: {quant_method: compressed-tensors, config_groups: {g: {targets: Linear}}}
"""
# Content of a JSON file.
JSONS = [
    "",
    "[]",
    "null",
    "3",
    "{",
    '{"a": NaN}',
    "\x00",
    '{"weight_map": 3}',
    '{"weight_map": {"lm_head.weight": "../../etc/passwd"}}',
    '{"weight_map": {"lm_head.weight": 3}}',
]
TEMPLATES = [
    "{% for %}",
    "{{ nothing.of.this }}",
    "{{ raise_exception('no') }}",
    "{% include 'x' %}",
    "{{ 1 / 0 }}",
    "{{ messages[7].content }}",
    "{% endfor %}",
]
LOGS = [
    "",
    "[]",
    "null",
    "{",
    '{"log_history": 3}',
    '{"log_history": [3]}',
    '{"log_history": [{"step": "x"}]}',
    '{"log_history": [{"step": 1, "loss": "x"}]}',
    '{"log_history": null, "global_step": []}',
    "\x00",
]
MANIFESTS = [
    "[]",
    "null",
    "{}",
    '{"files": 3}',
    '{"files": {"a": "x"}}',
    '{"files": {}, "processes": "x"}',
    '{"files": {"../../x": 3}}',
    '{"files": {"model.safetensors": -1}}',
]


class Inputs:
    """
    Wrong inputs, whose files are made when it is their turn.

    Args:
        place: A folder with what `bad_inputs.prepare` makes.
        recipe: What it returns.
    """

    def __init__(self, place: Path, recipe: dict[str, Any]) -> None:
        self.place = place
        self.recipe = recipe
        self.names = {name: str(place / path) for name, path in FILES.items()}
        # The recipe of an input, and the model of one.
        self.file = place / "wrong.yaml"
        self.copy = place / "copy"
        # The commands that read a model take turns.
        self.reading = itertools.cycle(("export", "eval", "train"))

    def command(self, changes: dict[str, Any]) -> list[str]:
        """Write the recipe with some changes. Returns the line that trains by it."""
        self.file.write_text(yaml.safe_dump(self.recipe | changes, allow_unicode=True))
        return ["train", "--config", str(self.file)]

    def data(self) -> Iterator[Case]:
        """Data sets."""
        rows = self.place / "rows.jsonl"
        for text in parts(ROWS):
            rows.write_text(text)
            yield "data: rows", text, self.command({"dataset_name_or_path": str(rows)})

        # Content of another kind than the name says.
        for name in ("rows.parquet", "rows.json", "rows.jsonl"):
            path = self.place / name
            for content in (b"", b"PAR1", b"\x00" * 50, b"\xff\xfe{\x00}\x00", b"\x1f\x8b\x08"):
                path.write_bytes(content)
                yield "data: rows", f"{name} {content!r}", self.command({"dataset_name_or_path": str(path)})

        for split in SPLITS:
            yield "data: split", split, self.command({"dataset_split": split})

        link = self.place / "gone.jsonl"
        link.symlink_to(self.place / "nowhere.jsonl")
        yield "data: rows", "a link to nothing", self.command({"dataset_name_or_path": str(link)})

    def recipes(self) -> Iterator[Case]:
        """Recipes: text, settings, and those of llm-compressor."""
        line = ["train", "--config", str(self.file)]
        good = yaml.safe_dump(yaml.safe_load((self.place / "recipe.yaml").read_text()))
        for text in TEXTS:
            # After a good recipe, so that only this is wrong; but for texts that are no lines of one.
            is_whole = text.startswith(("---", "%", "- ", "true", "3"))
            self.file.write_text(text if is_whole else f"{good}{text}\n")
            yield "recipe: text", text, line
        for content in BYTES:
            self.file.write_bytes(content)
            yield "recipe: text", repr(content), line

        for part in parts(SETTINGS):
            text = self._with_paths(part)
            yield "recipe: settings", text, self.command(read_settings(text))

        modifier = self.place / "modifier.yaml"
        for text in MODIFIERS:
            modifier.write_text(text)
            yield "recipe: quant_recipe", text, self.command({"quant_recipe": str(modifier)})

    def _with_paths(self, text: str) -> str:
        """A text with the paths of the files that it names in braces; other braces stay."""
        for name, path in self.names.items():
            text = text.replace(f"{{{name}}}", path)
        return text

    def options(self) -> Iterator[Case]:
        """Command lines."""
        for line in OPTIONS.strip().splitlines():
            head, _, rest = line.partition(": ")
            for part in rest.split(" | "):
                text = f"{head} {part}"
                yield "options", text, [word.format(**self.names) for word in text.split()]

    def models(self) -> Iterator[Case]:
        """Files of a model."""
        model = Path(self.names["model"])
        config = json.loads((model / "config.json").read_text())
        for part in parts(CONFIGS):
            changed = config | read_settings(part)
            yield "model: config.json", part, self.with_file("config.json", json.dumps(changed))
        for text in JSONS:
            for file in ("model.safetensors.index.json", "tokenizer.json", "config.json"):
                yield f"model: {file}", text, self.with_file(file, text)
        for text in ("", "\x00" * 8, "\xff" * 16, '{"a": 1}', "A" * 4000):
            yield "model: weights", text[:8], self.with_file("model.safetensors", text)

        # An export runs no template.
        self.reading = itertools.cycle(("eval", "train"))
        tokenizer = json.loads((model / "tokenizer_config.json").read_text())
        for text in TEMPLATES:
            content = json.dumps(tokenizer | {"chat_template": text})
            yield "model: chat template", text, self.with_file("tokenizer_config.json", content, conversational=True)

    def with_file(self, file: str, content: str, **settings: Any) -> list[str]:
        """Copy the model with another file. Returns the line of the next command; `settings` are for `train`."""
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.names["model"], self.copy)
        (self.copy / file).write_text(content)

        command = next(self.reading)
        if command == "train":
            return self.command({"model_name_or_path": str(self.copy), **settings})
        if command == "export":
            return ["export", str(self.copy), self.names["out"]]
        return ["eval", str(self.copy), "--suite", self.names["data"], "--max_new_tokens", "8"]

    def runs(self) -> Iterator[Case]:
        """Files of a run and its checkpoint."""
        run = self.place / "old"
        for text in LOGS:
            shutil.rmtree(run, ignore_errors=True)
            run.mkdir()
            (run / "trainer_state.json").write_text(text)
            yield "run: log", text, ["report", str(run), "--output_dir", str(self.place / "page")]

        checkpoint = run / "checkpoint-1"
        for text in (*MANIFESTS, *LOGS[:4]):
            # "[]" and "null" are in both lists: they are tried as a manifest twice, as in the committed figures.
            file = "manifest.json" if text in MANIFESTS else "trainer_state.json"
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(self.names["checkpoint"], checkpoint)
            (checkpoint / file).write_text(text)
            yield f"checkpoint: {file}", text, self.command({"resume_from_checkpoint": str(checkpoint)})


def inputs(place: Path, recipe: dict[str, Any]) -> Iterator[Case]:
    """All wrong inputs; see `Inputs`."""
    wrong = Inputs(place, recipe)
    yield from wrong.data()
    yield from wrong.recipes()
    yield from wrong.options()
    yield from wrong.models()
    yield from wrong.runs()


def main() -> None:
    args = common.arguments(__doc__, every=(1, 3, "take each Nth input alone"))
    bad_inputs.stop_before_engines()

    results = []
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        recipe = bad_inputs.prepare(place)
        for case in itertools.islice(inputs(place, recipe), 0, None, args.every):
            results.append(bad_inputs.tried(place, *case))
    bad_inputs.report("bad_inputs_fresh", args, results)


if __name__ == "__main__":
    main()
