"""Post-training quantization by llm-compressor: the baseline without RL, and a checkpoint to start RL from."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from .calibration import calibration_set, read_plan, run_oneshot


def modifiers(method: str, plan: QuantizationConfig) -> list[Any]:
    """llm-compressor's modifiers for `"rtn"` (round-to-nearest, no data), `"gptq"` or `"awq"`, by `plan`."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform import AWQModifier

    settings = {"config_groups": plan.model_copy(deep=True).config_groups, "ignore": list(plan.ignore or [])}
    if method == "gptq":
        return [GPTQModifier(**settings)]
    before = {"rtn": [], "awq": [AWQModifier()]}[method]
    return [*before, QuantizationModifier(**settings)]


def run(args: argparse.Namespace) -> None:
    """`qarl-trl ptq`, with the options of `command.py`."""
    plan = read_plan(args)
    if args.method != "rtn" and args.dataset is None:
        raise ValueError(f"--method {args.method} needs texts to calibrate on: --dataset.")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = None if args.method == "rtn" else calibration_set(args, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    run_oneshot(model, modifiers(args.method, plan), rows, tokenizer=tokenizer, output=args.output)
    print(f"{args.method} checkpoint written to {args.output}")
