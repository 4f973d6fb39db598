"""Experts: forward and backward of low-bit experts against transformers' `grouped_mm` experts under bf16 autocast.

Claim: 64 experts of two layers, hidden 512, cost at most 1.15x the time and 1.3x the calls of the unquantized ones.

"float32 master weights" is what transformers runs under autocast: its grouped GEMM multiplies in the dtype of the
parameters. "bf16 master weights" has parameters of half the size, and the GEMMs that ours has. Quantized values exist
already, as in every micro-batch after the first. Calls are what Python asks of torch's dispatcher: on a CPU each
grouped GEMM is a loop inside one call. Launches of a GPU are more, by a factor that is the same for every arm's GEMMs.
"""

from __future__ import annotations

import argparse
import copy
import os
from typing import Any

import common
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from qarl_trl.quant import apply_quantization, low_bit_store
from qarl_trl.quant.scheme import DEFAULT_IGNORE


BASE = "bf16 master weights"
# Of each arm: the dtype of its master weights, and its scheme.
ARMS = {
    BASE: (torch.bfloat16, None),
    "float32 master weights": (torch.float32, None),
    "W4A16": (torch.float32, "W4A16"),
    "W8A16": (torch.float32, "W8A16"),
}
GOAL_TIME = 1.15
GOAL_CALLS = 1.3


class Calls(TorchDispatchMode):
    """Counts what reaches the dispatcher."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class Arm:
    """
    Mixture blocks, routers included, in one dtype and scheme.

    Args:
        blocks: Copied.
        x: What the first block gets, and the gradient of what the last one returns, `(1, tokens, hidden)`.
        dtype: Of the master weights.
        scheme: `None` quantizes nothing.
    """

    def __init__(self, blocks: nn.ModuleDict, x: Tensor, dtype: torch.dtype, scheme: str | None) -> None:
        self.blocks = copy.deepcopy(blocks).to(dtype)
        self.x = x
        if scheme is not None:
            apply_quantization(self.blocks, scheme, ignore=(*DEFAULT_IGNORE, r"re:.*\.gate$"))
            # Of optimizer steps, which there are none of: so quantized values are made once.
            low_bit_store(self.blocks).will_be_told()

    def run(self) -> None:
        """One forward and backward."""
        self.blocks.zero_grad()
        y = self.x.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            for block in self.blocks.values():
                y = y + block(y)
        y.backward(self.x)

    def calls(self) -> int:
        """The number of calls that reach the dispatcher in one `run`."""
        with Calls() as calls:
            self.run()
        return calls.count


def make_blocks(args: argparse.Namespace) -> nn.ModuleDict:
    """Two mixture blocks with random weights, in float32."""
    config = Qwen3MoeConfig(
        hidden_size=args.hidden,
        moe_intermediate_size=args.inner,
        num_experts=args.experts,
        num_experts_per_tok=min(8, args.experts),
        experts_implementation="grouped_mm",
    )
    blocks = nn.ModuleDict({str(layer): Qwen3MoeSparseMoeBlock(config) for layer in range(2)})
    for parameter in blocks.parameters():
        nn.init.normal_(parameter, std=0.02)
    return blocks


def rows_of(calls: dict[str, int], times: common.Times) -> list[dict[str, Any]]:
    """The table: a line for each arm."""
    rows = []
    for name in ARMS:
        timed = common.ratio(times, name, BASE)
        rows.append({"arm": name, "calls": calls[name], "of base": calls[name] / calls[BASE], **timed})
    return rows


def headlines_of(rows: list[dict[str, Any]], times: common.Times) -> list[str]:
    """The claims: each quantized arm against the base, and W4A16 against what transformers runs."""
    headlines = []
    for row in rows:
        _, scheme = ARMS[row["arm"]]
        if scheme is not None:
            headlines.append(
                f"{row['arm']} against {BASE}: time {row['ratio']:.2f}x {common.verdict(row['ratio'], GOAL_TIME)}, "
                f"calls {row['of base']:.2f}x {common.verdict(row['of base'], GOAL_CALLS)}"
            )

    against_float32 = common.ratio(times, "W4A16", "float32 master weights")
    headlines.append(f"W4A16 against float32 master weights: time {against_float32['ratio']:.2f}x")
    return headlines


def main() -> None:
    args = common.arguments(
        __doc__,
        rounds=(5, 2, "rounds"),
        tokens=(2048, 64, "tokens of the batch"),
        experts=(64, 8, "experts of a layer"),
        hidden=(512, 128, "hidden size"),
        inner=(256, 128, "intermediate size of an expert"),
    )
    start_load = os.getloadavg()[0]

    torch.manual_seed(0)
    blocks = make_blocks(args)
    x = torch.randn(1, args.tokens, args.hidden)
    arms = {name: Arm(blocks, x, dtype, scheme) for name, (dtype, scheme) in ARMS.items()}

    # Makes the quantized values, which are neither counted nor timed.
    for arm in arms.values():
        arm.run()
    calls = {name: arm.calls() for name, arm in arms.items()}
    times = common.interleave({name: arm.run for name, arm in arms.items()}, args.rounds)

    rows = rows_of(calls, times)
    common.report("bench_experts", args, headlines_of(rows, times), rows, start_load)


if __name__ == "__main__":
    main()
