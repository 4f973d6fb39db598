"""Post-training quantization by llm-compressor: the baseline without RL, and a checkpoint to start RL from.

Invariant: the checkpoint is llm-compressor's own (`oneshot`); this module chooses the modifiers and the calibration texts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from .calibration import calibration_set, make_parser, read_plan, run_oneshot


METHODS = ("rtn", "gptq", "awq")


def modifiers(method: str, plan: QuantizationConfig) -> list[Any]:
    """
    llm-compressor's modifiers for `method`.

    Args:
        method (`str`): `"rtn"` (round-to-nearest, no data), `"gptq"` or `"awq"`.
        plan (`QuantizationConfig`): Which layers, and how.
    """
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform import AWQModifier

    groups = {name: group.model_copy(deep=True) for name, group in plan.config_groups.items()}
    settings = {"config_groups": groups, "ignore": list(plan.ignore or [])}
    if method == "rtn":
        return [QuantizationModifier(**settings)]
    if method == "gptq":
        return [GPTQModifier(**settings)]
    if method == "awq":
        return [AWQModifier(), QuantizationModifier(**settings)]
    raise ValueError(f"--method {method!r} must be one of {METHODS}.")


def main(argv: Sequence[str] | None = None) -> None:
    """`qarl-trl ptq`."""
    args = _parser().parse_args(argv)
    plan = read_plan(args)
    if args.method != "rtn" and args.dataset is None:
        raise ValueError(f"--method {args.method} needs texts to calibrate on: --dataset.")
    chosen = modifiers(args.method, plan)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = None
    if args.method != "rtn":
        rows = calibration_set(args.dataset, tokenizer, args.num_samples, args.max_length, args.split)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    run_oneshot(model, chosen, rows, tokenizer=tokenizer, output=args.output)
    print(f"{args.method} checkpoint written to {args.output}")


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "ptq",
        "Quantize a model after training, with llm-compressor.",
        num_samples=512,
        max_length=2048,
        needs_dataset=False,
    )
    parser.add_argument("--method", choices=METHODS, default="gptq", help="rtn needs no data (default: gptq)")
    return parser
