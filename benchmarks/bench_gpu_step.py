"""Training steps in the shape of a published model, with random weights, on one GPU: bf16, rollout-only and QaRL.

Claim: low bits shorten the rollout where an engine is bound by its weights, and cost the learner a quantizer. The
ratios of the parts say how much, in a shape, on a card.

A process trains one arm: rollout batches of 64 answers of one length (`--tokens`), each one update. Times are those
of the batches behind the first, which starts kernels and graphs. Nothing is downloaded. `--dry` runs toys on a CPU.

    python benchmarks/bench_gpu_step.py --shape qwen3-8b --arms "bf16, LoRA;QaRL W4A16, frozen LoRA" --out out.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch


# Graphs of decoding alone: compiling a model takes a minute that is not spent on what is measured.
GRAPHS = {
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 48, 64],
    }
}
ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "family": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "qwen2.5-1.5b": {
        "family": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "toy": {
        "family": "qwen3",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
}
# Neighbours differ in one thing.
ARMS: dict[str, dict[str, Any]] = {
    "bf16": {"quant_scheme": "none"},
    "rollout-only W4A16": {"quant_scheme": "W4A16", "quantize_learner": False},
    "QaRL W4A16": {"quant_scheme": "W4A16"},
    "rollout-only FP8": {"quant_scheme": "FP8_DYNAMIC", "quantize_learner": False},
    "QaRL FP8": {"quant_scheme": "FP8_DYNAMIC"},
}
for name, settings in list(ARMS.items()):
    ARMS[f"{name}, LoRA"] = settings | {"lora": True}
    ARMS[f"{name}, kept matrices"] = settings | {"quant_keep_matrices": True}
    ARMS[f"{name}, LoRA, kept matrices"] = settings | {"lora": True, "quant_keep_matrices": True}
ARMS["QaRL W4A16, frozen LoRA"] = {"quant_scheme": "W4A16", "lora": True, "lora_base": "frozen"}
# Rows of a micro-batch.
MICRO = 8


# In the process of one arm ------------------------------------------------------------------------------------------


def distinct(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that the samples of a group disagree on."""
    return [float(sum(ids) % 97) for ids in completion_ids]


def configuration(args: argparse.Namespace, changes: dict[str, Any], lora: bool, folder: str) -> Any:
    """
    The trainer's configuration.

    Args:
        args: The command line.
        changes: The arm's options.
        lora: Whether the arm trains an adapter.
        folder: The output folder.
    """
    from qarl_trl import QaRLConfig

    return QaRLConfig(
        output_dir=folder,
        use_cpu=args.dry,
        model_init_kwargs={"dtype": "bfloat16" if lora else "float32"},
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.4,
        vllm_max_model_length=args.tokens + 64,
        vllm_engine_kwargs={"enforce_eager": True} if args.dry else GRAPHS,
        max_completion_length=args.tokens,
        generation_kwargs={"ignore_eos": True},
        num_generations=8,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=args.answers // MICRO,
        max_steps=args.batches,
        learning_rate=1e-5,
        optim="adamw_torch" if lora else "sgd",
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        **changes,
    )


def measure(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Train an arm, and return the seconds of its parts, its memory and its mismatch."""
    from datasets import Dataset
    from peft import LoraConfig

    from qarl_trl import QaRLTrainer

    changes = dict(ARMS[args.arm])
    lora = changes.pop("lora", False)
    adapter = None
    if lora:
        adapter = LoraConfig(task_type="CAUSAL_LM", r=32, lora_alpha=64, target_modules=LAYERS)
    prompts = [{"prompt": f"{1000 + number}+{9999 - number}=" * 4} for number in range(512)]

    with tempfile.TemporaryDirectory() as folder:
        config = configuration(args, changes, lora, folder)
        start = time.perf_counter()
        trainer = QaRLTrainer(model, distinct, config, train_dataset=Dataset.from_list(prompts), peft_config=adapter)
        started = time.perf_counter() - start
        trainer.train()

    result = {
        "shape": args.shape,
        "arm": args.arm,
        "answers": args.answers,
        "tokens": args.tokens,
        "start s": round(started, 1),
        **figures_of(trainer.state.log_history),
    }
    if not args.dry:
        # While the trainer has all of its memory.
        result |= device_memory()
    return result


def figures_of(log: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Seconds of the parts of each update, and its mismatch."""
    rows = [row for row in log if "time/update" in row]
    figures: dict[str, list[Any]] = {}
    for part in ("rollout", "sync", "update", "step"):
        figures[f"{part} s"] = [round(row[f"time/{part}"], 3) for row in rows if f"time/{part}" in row]
    figures["step_time"] = [round(row["step_time"], 3) for row in rows if "step_time" in row]
    figures["mismatch"] = [row.get("mismatch/logp_diff_mean") for row in rows]
    return figures


def device_memory() -> dict[str, Any]:
    """The name of the GPU, and its memory: what torch had at most, and what is used now, by the engine, too."""
    free, total = torch.cuda.mem_get_info()
    return {
        "device": torch.cuda.get_device_name(),
        "peak allocated GiB": round(torch.cuda.max_memory_allocated() / GIB, 1),
        "used at the end GiB": round((total - free) / GIB, 1),
    }


# Here ---------------------------------------------------------------------------------------------------------------


def save_shape(shape: str, folder: str, dry: bool) -> None:
    """A model with random weights and a tokenizer of a few characters."""
    sys.path.insert(0, str(ROOT / "tests"))
    from slow.toys import make_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(SHAPES[shape])
    family = sizes.pop("family")
    config = AutoConfig.for_model(
        family,
        **sizes,
        vocab_size=64 if dry else 151936,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.device("cpu" if dry else "cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    make_tokenizer("0123456789+=").save_pretrained(folder)


def run_arm(args: argparse.Namespace, arm: str, model: str) -> None:
    """One arm in a process of its own; its figures go to `args.out`, the end of its output is printed if it fails."""
    command = [sys.executable, __file__, "--shape", args.shape, "--arm", arm, "--model", model, "--out", str(args.out)]
    for option in ("tokens", "answers", "batches"):
        command += [f"--{option}", str(getattr(args, option))]
    if args.dry:
        command.append("--dry")

    start = time.monotonic()
    code: int | str
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=args.limit, env=environment())
        code = result.returncode
        output = result.stdout + result.stderr
    except subprocess.TimeoutExpired as error:
        code = "limit"
        output = str(error.stdout or b"") + str(error.stderr or b"")

    print(f"{arm}: {code} after {time.monotonic() - start:.0f} s", flush=True)
    if code == 0:
        print(args.out.read_text().splitlines()[-1], flush=True)
    else:
        print(output[-3000:], flush=True)


def environment() -> dict[str, str]:
    """The environment of the process of an arm."""
    paths = [str(ROOT), str(ROOT / "tests")]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def read_options() -> argparse.Namespace:
    """The command line; `--dry` sets the sizes of a toy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument(
        "--arms", default="bf16;rollout-only W4A16;QaRL W4A16;QaRL FP8", help="separated by semicolons"
    )
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--answers", type=int, default=64, help="of a rollout batch")
    parser.add_argument("--batches", type=int, default=3, help="rollout batches; the first is not counted")
    parser.add_argument("--limit", type=int, default=240, help="seconds of one arm")
    parser.add_argument("--out", type=Path, default=Path("bench_gpu_step.jsonl"))
    parser.add_argument("--dry", action="store_true", help="a toy on the CPU")
    # For the process of one arm.
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()

    if args.dry:
        args.shape = "toy"
        args.tokens = 16
        args.answers = 16
    return args


def main() -> None:
    args = read_options()
    if args.arm:
        result = measure(args, args.model)
        with open(args.out, "a") as file:
            file.write(json.dumps(result) + "\n")
        sys.stdout.flush()
        # Whatever the engine has left running.
        os._exit(0)

    # In memory if it can be: a disk would take long for the larger shapes.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        start = time.monotonic()
        save_shape(args.shape, folder, args.dry)
        print(f"{args.shape}: random weights in {time.monotonic() - start:.0f} s", flush=True)
        for arm in args.arms.split(";"):
            run_arm(args, arm.strip(), folder)


if __name__ == "__main__":
    main()
