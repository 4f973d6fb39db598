"""Post-training quantization by llm-compressor: the baseline without RL, and a checkpoint to start RL from.

Invariant: the checkpoint is llm-compressor's own (`oneshot`); this module chooses the modifiers and the calibration texts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from .calibration import calibration_set, require_llmcompressor, run_oneshot
from .quant.recipe import read_recipe, single_group
from .quant.scheme import DEFAULT_IGNORE, resolve_scheme


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
    require_llmcompressor()
    output = Path(args.output)
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"--output {output} is not empty. Use a new folder.")
    if args.method != "rtn" and args.dataset is None:
        raise ValueError(f"--method {args.method} needs texts to calibrate on: --dataset.")
    if args.quant_recipe:
        plan = read_recipe(args.quant_recipe)
    else:
        plan = single_group(resolve_scheme(args.scheme, args.group_size), ["Linear"], DEFAULT_IGNORE)
    chosen = modifiers(args.method, plan)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = None
    if args.method != "rtn":
        rows = calibration_set(args.dataset, tokenizer, args.num_samples, args.max_length, args.split)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    run_oneshot(model, chosen, rows, tokenizer=tokenizer, output=str(output))
    print(f"{args.method} checkpoint written to {output}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qarl-trl ptq", description="Quantize a model after training, with llm-compressor.", allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="model folder or Hub id, not quantized")
    parser.add_argument("--output", required=True, help="folder to write, new or empty")
    parser.add_argument("--method", choices=METHODS, default="gptq", help="rtn needs no data (default: gptq)")
    parser.add_argument("--scheme", default="W4A16", help="as quant_scheme (default: W4A16)")
    parser.add_argument("--group-size", type=int, help="weights per scale, -1: per channel (default: the scheme's)")
    parser.add_argument("--quant-recipe", help="llm-compressor quantization recipe, in place of --scheme")
    parser.add_argument("--dataset", help="texts to calibrate on: Hub id or file")
    parser.add_argument("--split", default="train", help="split of a Hub dataset (default: train)")
    parser.add_argument("--num-samples", type=int, default=512, help="calibration rows (default: 512)")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of a row (default: 2048)")
    return parser
