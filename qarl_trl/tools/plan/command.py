"""The command `qarl-trl plan`: what a recipe needs of each GPU, whether that fits, and which field to change."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any


# Only the standard library above, so that --help is instant.

if TYPE_CHECKING:
    from .rank import Run

CODES = "quantized values (whole)"  # as `rank.resident` calls them


def main(argv: Sequence[str] | None = None) -> None:
    """`qarl-trl plan`. A run that does not fit exits with 1. `ValueError` for settings that cannot run."""
    args, overrides = make_parser().parse_known_args(argv)
    run, facts = read_run(args, overrides)
    found = report(run) | facts
    print(json.dumps(found, indent=2) if args.json else table(found))
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
    parser.add_argument("--sharding", choices=("ddp", "fsdp2", "zero3"), help="with several GPUs (default: fsdp2)")
    parser.add_argument(
        "--replicas", type=int, default=1, help="whole copies over the GPUs: nodes under HSDP (default: 1)"
    )
    parser.add_argument("--tokens", type=int, help="of prompt and completion together (default: the longest allowed)")
    parser.add_argument("--json", action="store_true", help="all numbers, in bytes")
    return parser


def read_run(args: argparse.Namespace, overrides: Sequence[str]) -> tuple[Run, dict[str, Any]]:
    """The run that a recipe and the command line describe, and what the table says of it. `ValueError` for what cannot run."""
    from ...quant.start import quantized_source
    from ...rollout.support import check_shards
    from ...train import parse
    from . import model as meta
    from .rank import GIB

    numbers = {"gpus": args.gpus, "memory": args.memory, "replicas": args.replicas, "tokens": args.tokens}
    for name, value in numbers.items():
        if value is not None and not 0 < value < 1e9:
            raise ValueError(f"--{name} must be a number above 0, got {value:g}; the most is 1e9.")
    _, settings, model_args = parse(["--config", args.config, *overrides], any_device=True)
    name = model_args.model_name_or_path
    config, source = meta.read_config(name), quantized_source(name) if settings.from_checkpoint else None
    check_gpus(args, settings)
    plan = settings.quant_plan(None if source is None else source.plan())
    ranks = args.gpus // args.replicas
    sharded = ranks > 1 and args.sharding != "ddp"
    if settings.use_vllm:
        check_kernels(plan)
        check_shards(config, plan, settings)
    run = meta.run_of(
        settings,
        model_args,
        config,
        source,
        ranks=ranks,
        sharded=sharded,
        zero3=sharded and args.sharding == "zero3",
        replicas=args.replicas,
        memory=int(args.memory * GIB),
        tokens=args.tokens or meta.longest_row(settings),
    )
    facts = {"model": name, "parameters": sum(p.entries for p in run.parameters), "scheme": settings.quant_name}
    return run, facts | {"use_peft": model_args.use_peft}


def check_gpus(args: argparse.Namespace, settings: Any) -> None:
    """Refuse (`ValueError`) GPUs that the engine's ranks or the copies of the model do not divide, and ZeRO-3 with Muon."""
    engine = settings.vllm_tensor_parallel_size
    if settings.use_vllm and settings.vllm_mode == "colocate" and args.gpus % max(engine, 1):
        raise ValueError(
            f"vllm_tensor_parallel_size={engine} must divide the GPUs, which share engines of so many, got --gpus {args.gpus}."
        )
    copies, plain = args.replicas, args.sharding in ("ddp", "zero3")
    if args.gpus % copies or (copies > 1 and (plain or copies == args.gpus)):
        raise ValueError(
            f"--replicas {copies} must divide --gpus {args.gpus} into copies of two GPUs and more, with FSDP2 (HSDP), got --sharding "
            f"{args.sharding or 'fsdp2'}."
        )
    if args.sharding == "zero3" and settings.optim_muon:
        raise ValueError("--sharding zero3 needs --optim_muon false: ZeRO leaves Muon no whole matrix.")


def check_kernels(plan: Any) -> None:
    """Refuse (`ValueError`) schemes that vLLM runs on no GPU; `plan` is a `QuantizationConfig` or `None`."""
    from ...quant.scheme import support_of

    for scheme in [] if plan is None else map(support_of, plan.config_groups.values()):
        if not scheme.gpus:
            raise ValueError(f"vLLM has no GPU kernel for {scheme.name}. Choose another scheme (`qarl-trl schemes`).")


def report(run: Run) -> dict[str, Any]:
    """All numbers of the table, in bytes and tokens."""
    from . import rank

    peaks = rank.peaks(run)
    over = [name for name, size in peaks.items() if size > run.memory]
    cache = rank.cache_tokens(run) if run.utilization else run.tokens
    helps = []
    for words, changed in rank.changes(run) if over else ():
        after = rank.peaks(changed)
        if any(after[name] < peaks[name] for name in over):
            room = not changed.utilization or rank.cache_tokens(changed) >= changed.tokens
            peak = max(after.values())
            helps.append({"change": words, "peak": peak, "fits": peak <= run.memory and room})
    kind = "ZeRO-3" if run.zero3 else "FSDP2" if run.sharded else "DDP" if run.ranks > 1 else "one GPU"
    if run.replicas > 1:
        kind = f"HSDP, {run.replicas} copies"
    return {
        "gpus": run.ranks * run.replicas,
        "sharding": kind,
        "memory": run.memory,
        "rows": run.rows,
        "tokens": run.tokens,
        "tokens_per_pass": rank.pass_tokens(run),
        "moments": rank.moments(run),
        "peaks": peaks,
        "fits": not over and cache >= run.tokens,
        "over": over,
        "changes": helps,
        "utilization": run.utilization,
        "best_utilization": rank.best_utilization(run) if run.beside else 0.0,
        "served": run.served,
        "engine_ranks": run.engine_ranks,
        "cache_tokens": cache,
        "engine_weights": rank.engine_weights(run),
        "sync": run.synced,
    }


def table(found: dict[str, Any]) -> str:
    """The report for people, in GiB, at most 100 columns."""
    gib, moments = 2**30, found["moments"]
    rows = list(dict.fromkeys(name for items in moments.values() for name in items))
    lines = [
        f"{found['model']}: {found['parameters'] / 1e9:.2f} billion parameters, {found['scheme']}; {found['sharding']}, "
        f"{found['gpus']} x {found['memory'] / gib:.0f} GiB",
        f"micro-batch: {found['rows']} rows of {found['tokens']} tokens, {found['tokens_per_pass']} in a pass",
        "",
        f"{'GiB on each GPU (estimated)':30}" + "".join(f"{name:>16}" for name in moments),
    ]
    for row in rows:
        cells = (f"{items[row] / gib:16.1f}" if row in items else " " * 16 for items in moments.values())
        lines.append(f"{row:30}{''.join(cells)}".rstrip())
    marks = (f"{size / gib:.1f}{'!' if name in found['over'] else ' '}" for name, size in found["peaks"].items())
    lines += [f"{'sum':30}" + "".join(f"{mark:>16}" for mark in marks), ""]
    if found["utilization"]:
        longest = found["cache_tokens"] / found["tokens"]
        best = f"at most {found['best_utilization']:g} would fit"
        own = f"of the server's own {found['engine_ranks']} x {found['memory'] / gib:.0f} GiB"
        lines += [
            f"engine: weights {found['engine_weights'] / gib:.1f} GiB, room for {found['cache_tokens']:,} tokens "
            f"({longest:.1f} such rows); a weight sync moves {found['sync'] / gib:.1f} GiB",
            f"vllm_gpu_memory_utilization: {found['utilization']:g}, {own if found['served'] else best}",
        ]
    if found["fits"]:
        return "\n".join([*lines, "It fits."])
    if found["cache_tokens"] < found["tokens"]:
        lines.append(
            "The engine has no room for one row: vllm_tensor_parallel_size or vllm_gpu_memory_utilization up."
        )
    if found["over"]:
        lines.append(f"It does not fit: {', '.join(found['over'])}. What helps, alone:")
    for change in found["changes"]:
        lines.append(f"  {change['change']}: {change['peak'] / gib:.1f} GiB{', fits' if change['fits'] else ''}")
    if 2 * moments["backward"].get(CODES, 0) > found["memory"]:
        lines.append("  Quantized values are whole on every GPU, so that more GPUs do not shrink them.")
    if found["over"] and not found["use_peft"]:
        lines.append("  use_peft: true (LoRA: optimizer state and gradients of the adapter alone)")
    return "\n".join(lines)
