"""Packing: an update of the learner by passes of real tokens against rows padded to the longest of the rollout batch.

Claim: at completions of 2k tokens in the mean and 16k at most (log-normal, all lengths a sixteenth here, so that it
runs on two cores; every n-th by length of the 512 completions that a process of the recipes has) at most 1.02 tokens
are computed for each real one, an update is at least 3x faster, in no more memory, and the W4A16 learner costs at most
1.10x of the unquantized one.

An update is what follows a rollout: `old` of the whole batch, forward and backward of its micro-batches, and a step of
AdamW. Both ways call the same model; "padded" is TRL's own method. Operations are transformers', the product is the
dequantized weight's. Memory is the peak of a process that makes one update, beyond what it had before.
"""

from __future__ import annotations


import common  # isort: skip
import argparse
import math
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from qarl_trl.learner.logps import PackedPasses
from qarl_trl.quant import apply_quantization, low_bit_store
from qarl_trl.rollout.engine_gemm import GEMMS


SCALE = 16
MEAN, LONGEST, BUDGET = 2048 // SCALE, 16384 // SCALE, 22528 // SCALE
PROMPTS = (8, 64)
COMPLETIONS = 512  # of a process of the recipes in a rollout batch, which TRL pads to the longest of them
ARMS = {
    **{"padded": (False, None), "packed": (True, None), "packed W4A16": (True, "W4A16")},
    "packed FP8_DYNAMIC": (True, "FP8_DYNAMIC"),
}
GOAL_TOKENS, GOAL_SPEED, GOAL_QUANTIZED = 1.02, 3.0, 1.10


def rollout_batch(rows: int, spread: float, seed: int) -> dict[str, Any]:
    """
    `rows` of a rollout batch: prompts padded on the left, completions of log-normal length on the right, as TRL pads
    them.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(COMPLETIONS, generator=generator) * spread + math.log(MEAN) - spread**2 / 2
    completions, _ = drawn.exp().round().clamp(1, LONGEST).long().sort()
    prompts = torch.randint(*PROMPTS, (COMPLETIONS,), generator=generator)
    keep, left = int(completions.max()), int(prompts.max())
    every = COMPLETIONS // rows
    chosen = torch.arange(every // 2, COMPLETIONS, every)[torch.randperm(rows, generator=generator)]
    completions, prompts = completions[chosen], prompts[chosen]
    columns = torch.arange(left + keep)
    mask = (columns >= left - prompts[:, None]) & (columns < left + completions[:, None])
    ids = torch.randint(2, 64, mask.shape, generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask.long(), "logits_to_keep": keep}


class Arm:
    """A model and one way to its log-probs."""

    def __init__(self, folder: str, packed: bool, scheme: str | None) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        if scheme is not None:
            apply_quantization(self.model, scheme, gemm=GEMMS["auto"])
        add_fused_lm_head(self.model, outputs=("log_probs", "entropy"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        if scheme is not None:
            low_bit_store(self.model).follow(self.optimizer)
        self.computed = 0
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)
        self.passes = PackedPasses(BUDGET, _autocast, lambda t: t, lambda m: m) if packed else None
        if packed:
            assert self.passes.packs(self.model)

    def _count(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        self.computed += kwargs["input_ids"].numel()

    def logps(self, **given: Any) -> Tensor:
        if self.passes is None:
            trainer = SimpleNamespace(accelerator=SimpleNamespace(autocast=_autocast))
            return _padded(trainer, self.model, **given)[0]
        return self.passes.run({"model": self.model, **given})[0]

    def update(self, batch: dict[str, Any], micro: int) -> None:
        ids, mask, keep = batch["input_ids"], batch["attention_mask"], batch["logits_to_keep"]
        self.computed = 0
        with torch.no_grad():
            old = self.logps(**batch, batch_size=micro)
        for rows in torch.arange(len(ids)).split(micro):
            logps = self.logps(input_ids=ids[rows], attention_mask=mask[rows], logits_to_keep=keep)
            loss = -(logps - old[rows]).mul(mask[rows, -keep:]).sum(1).div(mask[rows, -keep:].sum(1)).exp().mean()
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


_padded: Callable[..., Any] = GRPOTrainer._get_per_token_logps_and_entropies.__wrapped__


def _autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def peak(tick: Callable[..., Any], folder: str, name: str, batch: dict[str, Any], micro: int) -> None:
    """MiB that one update of an arm adds to the peak of its process."""
    arm = Arm(folder, *ARMS[name])
    short = {**{key: batch[key][:micro, -8:] for key in ("input_ids", "attention_mask")}, "logits_to_keep": 4}
    short["attention_mask"] = torch.ones_like(short["attention_mask"])
    arm.update(short, micro)  # optimizer state and kernels
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arm.update(batch, micro)
    tick((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def measure_memory(folder: str, batch: dict[str, Any], micro: int) -> dict[str, float]:
    found = {}
    for name in ARMS:
        worker = common.Worker(peak, folder, name, batch, micro)
        found[name] = worker.wait()
        worker.close()
    return found


def main() -> None:
    args = common.arguments(
        __doc__,
        hidden=(256, 256, "model width"),
        layers=(2, 1, "decoder layers"),
        inner=(768, 256, "width of the MLP"),
        rows=(32, 8, "sequences of a rollout batch"),
        micro=(8, 4, "sequences of a micro-batch"),
        spread=(1.0, 1.0, "standard deviation of the logarithm of a length"),
        rounds=(7, 1, "updates of each arm"),
    )
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        run(args, common.save_model(Path(folder), args.hidden, args.layers, args.inner), load)


def run(args: argparse.Namespace, folder: str, load: float) -> None:
    batch = rollout_batch(args.rows, args.spread, seed=0)
    real = 2 * int(batch["attention_mask"].sum())  # once for `old`, once for the loss
    memory = measure_memory(folder, batch, args.micro)
    arms = {name: Arm(folder, *settings) for name, settings in ARMS.items()}
    times = common.interleave(
        {name: (lambda arm=arm: arm.update(batch, args.micro)) for name, arm in arms.items()}, args.rounds
    )
    rows = [
        {
            "arm": name,
            "tokens/real": arm.computed / real,
            "padded/arm": common.ratio(times, "padded", name)["ratio"],
            "seconds": common.ratio(times, name, "padded")["seconds"],
            "peak MiB": memory[name],
        }
        for name, arm in arms.items()
    ]
    padded, packed, *_ = rows
    faster = common.ratio(times, "padded", "packed")
    quantized = common.ratio(times, "packed W4A16", "packed")
    spread = f"{faster['quartile_low']:.2f} to {faster['quartile_high']:.2f}"
    headlines = [
        f"tokens computed / real: padded {padded['tokens/real']:.2f}, packed {packed['tokens/real']:.3f} "
        f"{common.verdict(packed['tokens/real'], GOAL_TOKENS)}",
        f"update, padded / packed: {faster['ratio']:.2f}x ({spread}) "
        f"{common.verdict(faster['ratio'], GOAL_SPEED, at_most=False)}",
        f"update, packed W4A16 / packed: {quantized['ratio']:.2f}x "
        f"{common.verdict(quantized['ratio'], GOAL_QUANTIZED)}",
        f"peak memory, packed / padded: {memory['packed'] / memory['padded']:.2f} "
        f"{common.verdict(memory['packed'] / memory['padded'], 1.0)}; packed W4A16 / packed: "
        f"{memory['packed W4A16'] / memory['packed']:.2f}",
        f"update, packed FP8_DYNAMIC / packed, whose product a CPU emulates: "
        f"{common.ratio(times, 'packed FP8_DYNAMIC', 'packed')['ratio']:.2f}x",
    ]
    lengths = batch["attention_mask"].sum(1).tolist()
    common.report("bench_packing", args, headlines, rows, load, times=times, lengths=lengths)


if __name__ == "__main__":
    main()
