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

import argparse
import functools
import math
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from qarl_trl.learner.logps import PackedPasses
from qarl_trl.quant import apply_quantization, low_bit_store
from qarl_trl.rollout.engine_gemm import GEMMS


SCALE = 16
# In tokens: of a completion in the mean and at most, and of a packed pass at most.
MEAN = 2048 // SCALE
LONGEST = 16384 // SCALE
BUDGET = 22528 // SCALE
# The range of the tokens of a prompt.
PROMPTS = (8, 64)
# Of a process of the recipes in a rollout batch, which TRL pads to the longest of them.
COMPLETIONS = 512
# Of each arm: whether it packs, and its scheme.
ARMS = {
    "padded": (False, None),
    "packed": (True, None),
    "packed W4A16": (True, "W4A16"),
    "packed FP8_DYNAMIC": (True, "FP8_DYNAMIC"),
}
GOAL_TOKENS = 1.02
GOAL_SPEED = 3.0
GOAL_QUANTIZED = 1.10


# The batch and the arms ---------------------------------------------------------------------------------------------


def rollout_batch(rows: int, spread: float, seed: int) -> dict[str, Any]:
    """
    `rows` of a rollout batch: prompts padded on the left, completions of log-normal length on the right, as TRL pads
    them.

    Args:
        rows: Number of rows, every n-th by length of the whole rollout batch.
        spread: Standard deviation of the logarithm of a completion's length.
        seed: Of everything that is drawn.

    Returns:
        `input_ids` and `attention_mask` `(rows, L)`, int64, and `logits_to_keep`, the columns of completions.
    """
    generator = torch.Generator().manual_seed(seed)
    logarithms = torch.randn(COMPLETIONS, generator=generator) * spread + math.log(MEAN) - spread**2 / 2
    completions, _ = logarithms.exp().round().clamp(1, LONGEST).long().sort()
    prompts = torch.randint(*PROMPTS, (COMPLETIONS,), generator=generator)
    # All 512 decide how wide the batch is.
    keep = int(completions.max())
    left = int(prompts.max())

    every = COMPLETIONS // rows
    order = torch.randperm(rows, generator=generator)
    chosen = torch.arange(every // 2, COMPLETIONS, every)[order]
    first = left - prompts[chosen, None]
    last = left + completions[chosen, None]

    columns = torch.arange(left + keep)
    mask = (columns >= first) & (columns < last)
    ids = torch.randint(2, 64, mask.shape, generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask.long(), "logits_to_keep": keep}


_padded: Callable[..., Any] = GRPOTrainer._get_per_token_logps_and_entropies.__wrapped__


def _autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


class Arm:
    """
    A model and one way to its log-probs.

    Args:
        folder: Of the model.
        packed: Whether rows are packed, or padded as by TRL.
        scheme: `None` quantizes nothing.
    """

    def __init__(self, folder: str, packed: bool, scheme: str | None) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        if scheme is not None:
            apply_quantization(self.model, scheme, gemm=GEMMS["auto"])
        add_fused_lm_head(self.model, outputs=("log_probs", "entropy"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        if scheme is not None:
            low_bit_store(self.model).follow(self.optimizer)

        # Tokens that the last update computed.
        self.computed = 0
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)

        self.passes: PackedPasses | None = None
        if packed:
            self.passes = PackedPasses(BUDGET, _autocast, gather=lambda tensor: tensor, unwrap=lambda model: model)
            assert self.passes.packs(self.model)

    def _count(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        self.computed += kwargs["input_ids"].numel()

    def logps(self, **batch: Any) -> Tensor:
        """Log-probs of the completions of a batch, `(rows, logits_to_keep)`."""
        if self.passes is None:
            trainer = SimpleNamespace(accelerator=SimpleNamespace(autocast=_autocast))
            return _padded(trainer, self.model, **batch)[0]
        return self.passes.run({"model": self.model, **batch})[0]

    def update(self, batch: dict[str, Any], micro: int) -> None:
        """Make one update on a rollout batch, in micro-batches of `micro` rows."""
        ids = batch["input_ids"]
        mask = batch["attention_mask"]
        keep = batch["logits_to_keep"]
        self.computed = 0
        with torch.no_grad():
            old = self.logps(**batch, batch_size=micro)

        for rows in torch.arange(len(ids)).split(micro):
            logps = self.logps(input_ids=ids[rows], attention_mask=mask[rows], logits_to_keep=keep)
            kept = mask[rows, -keep:]
            mean_change = (logps - old[rows]).mul(kept).sum(1).div(kept.sum(1))
            loss = -mean_change.exp().mean()
            loss.backward()

        self.optimizer.step()
        self.optimizer.zero_grad()


# Memory -------------------------------------------------------------------------------------------------------------


def resident_peak() -> int:
    """The largest resident size of this process so far, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak(tick: Callable[..., Any], folder: str, name: str, batch: dict[str, Any], micro: int) -> None:
    """MiB that one update of an arm adds to the peak of its process."""
    arm = Arm(folder, *ARMS[name])

    # An update on a few tokens makes the optimizer's state and loads the kernels.
    ids = batch["input_ids"][:micro, -8:]
    short = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "logits_to_keep": 4}
    arm.update(short, micro)

    before = resident_peak()
    arm.update(batch, micro)
    tick((resident_peak() - before) / 1024)


def measure_memory(folder: str, batch: dict[str, Any], micro: int) -> dict[str, float]:
    """What `peak` says of each arm, in a process of its own."""
    memory = {}
    for name in ARMS:
        worker = common.Worker(peak, folder, name, batch, micro)
        memory[name] = worker.wait()
        worker.close()
    return memory


# Report -------------------------------------------------------------------------------------------------------------


def rows_of(
    computed: dict[str, int], real: int, times: common.Times, memory: dict[str, float]
) -> list[dict[str, Any]]:
    """
    The table: a line for each arm.

    Args:
        computed: Tokens that an update of each arm computes.
        real: Real tokens of an update.
        times: Seconds of its updates.
        memory: What an update adds to the peak, in MiB.
    """
    rows = []
    for name in ARMS:
        rows.append(
            {
                "arm": name,
                "tokens/real": computed[name] / real,
                "padded/arm": common.ratio(times, "padded", name)["ratio"],
                "seconds": common.ratio(times, name, "padded")["seconds"],
                "peak MiB": memory[name],
            }
        )
    return rows


def headlines_of(rows: list[dict[str, Any]], times: common.Times, memory: dict[str, float]) -> list[str]:
    """The claims: tokens, speed and memory of packing, and what quantization adds."""
    tokens = {row["arm"]: row["tokens/real"] for row in rows}
    faster = common.ratio(times, "padded", "packed")
    spread = f"{faster['quartile_low']:.2f} to {faster['quartile_high']:.2f}"
    quantized = common.ratio(times, "packed W4A16", "packed")
    emulated = common.ratio(times, "packed FP8_DYNAMIC", "packed")
    memory_ratio = memory["packed"] / memory["padded"]
    quantized_memory_ratio = memory["packed W4A16"] / memory["packed"]

    return [
        f"tokens computed / real: padded {tokens['padded']:.2f}, packed {tokens['packed']:.3f} "
        f"{common.verdict(tokens['packed'], GOAL_TOKENS)}",
        f"update, padded / packed: {faster['ratio']:.2f}x ({spread}) "
        f"{common.verdict(faster['ratio'], GOAL_SPEED, at_most=False)}",
        f"update, packed W4A16 / packed: {quantized['ratio']:.2f}x "
        f"{common.verdict(quantized['ratio'], GOAL_QUANTIZED)}",
        f"peak memory, packed / padded: {memory_ratio:.2f} "
        f"{common.verdict(memory_ratio, 1.0)}; packed W4A16 / packed: {quantized_memory_ratio:.2f}",
        f"update, packed FP8_DYNAMIC / packed, whose product a CPU emulates: {emulated['ratio']:.2f}x",
    ]


def run(args: argparse.Namespace, folder: str, load: float) -> None:
    """Measure all arms with the model of a folder, and report."""
    batch = rollout_batch(args.rows, args.spread, seed=0)
    lengths = batch["attention_mask"].sum(1).tolist()
    # Once for `old`, once for the loss.
    real = 2 * sum(lengths)

    memory = measure_memory(folder, batch, args.micro)
    arms = {name: Arm(folder, *settings) for name, settings in ARMS.items()}
    updates = {name: functools.partial(arm.update, batch, args.micro) for name, arm in arms.items()}
    times = common.interleave(updates, args.rounds)
    computed = {name: arm.computed for name, arm in arms.items()}

    rows = rows_of(computed, real, times, memory)
    headlines = headlines_of(rows, times, memory)
    common.report("bench_packing", args, headlines, rows, load, times=times, lengths=lengths)


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
        path = common.save_model(Path(folder), args.hidden, args.layers, args.inner)
        run(args, path, load)


if __name__ == "__main__":
    main()
