"""The command `qarl-trl plan`: what a recipe needs of each GPU, whether that fits, and what is largest."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any


# Only the standard library above, so that --help is instant.

if TYPE_CHECKING:
    from .items import Run

OPTIONS = (
    "vllm_gpu_memory_utilization, vllm_enable_sleep_mode, gradient_checkpointing, max_tokens_per_pass, use_peft, a smaller "
    "per_device_train_batch_size with more gradient_accumulation_steps and steps_per_generation, or more --gpus with fsdp2"
)


def main(argv: Sequence[str]) -> None:
    """`qarl-trl plan`. A run that does not fit exits with 1. `ValueError` for settings that cannot run."""
    args, overrides = make_parser().parse_known_args(argv)  # `--help` ends here
    from ...rollout.gemm import in_words
    from ...train import parse
    from .model import plan_run

    _, settings, model_args = parse(["--config", args.config, *overrides], any_device=True)
    run = plan_run(settings, model_args, args.gpus, args.memory, args.sharding, args.tokens)
    found = {"model": model_args.model_name_or_path, "scheme": settings.quant_name, "gemm": ""} | report(run)
    plan = settings.quant_plan() if settings.quantize_learner else None
    if plan is not None:
        found["gemm"] = "; ".join(sorted({in_words(settings.quant_kernel, s) for s in plan.config_groups.values()}))
    print(json.dumps(found, indent=2) if args.json else table(found, run))
    if not found["fits"]:
        raise SystemExit(1)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command; what it does not know goes to the recipe, as in `qarl-trl train`."""
    parser = argparse.ArgumentParser(
        prog="qarl-trl plan",
        description="Estimate the memory of each GPU from a recipe, without loading a model. Other options override the recipe.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="recipe (.yaml), as of qarl-trl train")
    parser.add_argument("--gpus", type=int, default=1, help="processes, one GPU each (default: 1)")
    parser.add_argument("--memory", type=float, default=79, help="GiB of each (default: 79, a card of 80 GB)")
    parser.add_argument("--sharding", help="with several GPUs: fsdp2 (default) or ddp")
    parser.add_argument("--tokens", type=int, help="of prompt and completion together (default: the longest allowed)")
    parser.add_argument("--json", action="store_true", help="all numbers, in bytes")
    return parser


def report(run: Run) -> dict[str, Any]:
    """What is found of a run, in bytes and tokens."""
    from . import items

    peaks = items.peaks(run)
    over = [moment for moment, size in peaks.items() if size > run.memory]
    cache = items.cache_tokens(run) if run.engine else run.tokens
    return {
        "moments": items.moments(run),
        "peaks": peaks,
        "over": over,
        "fits": not over and cache >= run.tokens,
        "host": items.host_bytes(run),
        "engine_weights": items.engine_weights(run),
        "cache_bytes": items.cache_bytes(run),
        "cache_tokens": cache,
        "sync": items.synced_bytes(run),
        "best_utilization": items.best_utilization(run) if run.engine == "colocate" else 0.0,
    }


def table(found: dict[str, Any], run: Run) -> str:
    """The report for people, in GiB."""
    gib, moments, peaks = 2**30, found["moments"], found["peaks"]
    lines = [
        f"{found['model']}: {sum(p.entries for p in run.parameters) / 1e9:.2f} billion parameters, {found['scheme']}",
        f"{run.ranks} x {run.memory / gib:.0f} GiB, {'FSDP2' if run.fsdp2 else 'DDP' if run.ranks > 1 else 'one GPU'}",
        f"micro-batch: {run.rows} rows of {run.tokens} tokens; max_tokens_per_pass: {run.budget}",
        *([f"learner: {found['gemm']}"] if found["gemm"] else []),
        f"host memory of a machine while the model loads: {found['host'] / gib:.0f} GiB",
        "",
        f"{'GiB on each GPU (estimated)':30}" + "".join(f"{moment:>16}" for moment in moments),
    ]
    for name in dict.fromkeys(name for items in moments.values() for name in items):
        cells = (f"{items[name] / gib:.1f}" if name in items else "" for items in moments.values())
        lines.append((f"{name:30}" + "".join(f"{cell:>16}" for cell in cells)).rstrip())
    lines += [f"{'sum':30}" + "".join(f"{size / gib:16.1f}" for size in peaks.values()), ""]
    if run.engine:
        cache = f"{found['cache_bytes'] / gib:.1f} GiB for {found['cache_tokens']:,} tokens"
        share = f"; vllm_gpu_memory_utilization: at most {found['best_utilization']:g} would fit"
        lines += [
            f"engine: weights {found['engine_weights'] / gib:.1f} GiB on each of {run.engine_ranks}, key-value cache {cache}",
            f"a weight sync moves {found['sync'] / gib:.1f} GiB{share if run.engine == 'colocate' else ''}",
        ]
    for moment in found["over"]:
        largest = sorted(moments[moment].items(), key=lambda item: -item[1])[:3]
        items = ", ".join(f"{name} {size / gib:.1f}" for name, size in largest)
        lines.append(f"It does not fit: {moment} {peaks[moment] / gib:.1f} GiB, mostly {items}.")
    if found["cache_tokens"] < run.tokens:
        lines.append("The engine has no room for one row: raise vllm_tensor_parallel_size or its share of the memory.")
    return "\n".join([*lines, "It fits." if found["fits"] else f"Change {OPTIONS}."])
