"""The commands `qarl-trl precondition` and `qarl-trl ptq`: their options. Libraries load after these."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


TRANSFORM_METHODS = ("smoothquant", "awq", "rotation")
PTQ_METHODS = ("rtn", "gptq", "awq")


def precondition(argv: Sequence[str] | None = None) -> None:
    """Fold transforms into a model that keep its function and help quantization; measure what --scheme costs."""
    parser = _make_parser("precondition", precondition.__doc__, rows=128, tokens=512, needs_dataset=True)
    parser.add_argument("--method", choices=TRANSFORM_METHODS, default="awq", help="which transform (default: awq)")
    parser.add_argument("--recipe", help="recipe of transforms, in place of --method")
    text = "rows that the function is compared on (default: 16)"
    parser.add_argument("--num_probes", "--num-probes", type=int, default=16, help=text)
    args = parser.parse_args(argv)
    from .precondition import run

    run(args)


def ptq(argv: Sequence[str] | None = None) -> None:
    """Quantize a model after training, with llm-compressor."""
    parser = _make_parser("ptq", ptq.__doc__, rows=512, tokens=2048, needs_dataset=False)
    text = "rtn rounds to nearest, without data (default: gptq)"
    parser.add_argument("--method", choices=PTQ_METHODS, default="gptq", help=text)
    args = parser.parse_args(argv)
    from .ptq import run

    run(args)


def _make_parser(command: str, text: str, rows: int, tokens: int, needs_dataset: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"qarl-trl {command}", description=text, allow_abbrev=False)
    add = parser.add_argument
    add("--model", required=True, help="model folder or Hub id, not quantized")
    add("--output", required=True, help="folder to write, new or empty")
    add("--scheme", default="W4A16", help="as quant_scheme (default: W4A16)")
    add("--group_size", "--group-size", type=int, help="weights per scale, -1: per channel (default: the scheme's)")
    add("--quant_recipe", "--quant-recipe", help="llm-compressor recipe, in place of --scheme")
    add("--dataset", required=needs_dataset, help="texts to calibrate on: Hub id or file")
    add("--split", default="train", help="split of a Hub dataset (default: train)")
    add("--num_samples", "--num-samples", type=int, default=rows, help=f"calibration rows (default: {rows})")
    add("--max_length", "--max-length", type=int, default=tokens, help=f"tokens of a row (default: {tokens})")
    return parser
