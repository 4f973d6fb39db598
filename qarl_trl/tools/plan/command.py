"""The command `qarl-trl plan`: what a recipe needs of each GPU, whether that fits, and which options help."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any


# Only the standard library above, so that --help is instant.

if TYPE_CHECKING:
    from .rank import Run

# An engine has room for few rows below this part of the sequences that it is given, and memory is idle from this utilization on.
FEW, IDLE = 0.25, 0.15


def main(argv: Sequence[str]) -> None:
    """`qarl-trl plan`. A run that does not fit exits with 1. `ValueError` for settings that cannot run."""
    run, facts = read_run(argv)
    found = report(run) | facts
    found["changes"] = list(helpful(argv, found)) if found["over"] else []
    as_json = make_parser().parse_known_args(argv)[0].json
    print(json.dumps(found, indent=2) if as_json else table(found))
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
    add_size(parser)
    parser.add_argument(
        "--replicas", type=int, default=1, help="whole copies over the GPUs: nodes under HSDP (default: 1)"
    )
    parser.add_argument("--tokens", type=int, help="of prompt and completion together (default: the longest allowed)")
    parser.add_argument("--json", action="store_true", help="all numbers, in bytes")
    return parser


def add_size(parser: argparse.ArgumentParser) -> None:
    """The options that say which GPUs there are."""
    parser.add_argument("--gpus", type=int, default=1, help="processes, one GPU each (default: 1)")
    parser.add_argument("--memory", type=float, default=79, help="GiB of each (default: 79, a card of 80 GB)")
    parser.add_argument("--sharding", choices=("ddp", "fsdp2", "zero3"), help="with several GPUs (default: fsdp2)")


def read_run(argv: Sequence[str]) -> tuple[Run, dict[str, Any]]:
    """The run that a recipe and the command line describe, and what the table says of it. `ValueError` for what cannot run."""
    args, overrides = make_parser().parse_known_args(argv)  # `--help` ends here

    from ...train import parse
    from .model import longest_row, plan_run

    _, settings, model_args = parse(["--config", args.config, *overrides], any_device=True)
    run = plan_run(settings, model_args, args.gpus, args.memory, args.sharding, args.replicas, args.tokens)
    facts = {"model": model_args.model_name_or_path, "scheme": settings.quant_name, "longest": longest_row(settings)}
    batch = {name: getattr(settings, name) for name in ("gradient_accumulation_steps", "steps_per_generation")}
    return run, facts | batch | {"use_peft": model_args.use_peft, "optim_muon": settings.optim_muon}


def report(run: Run) -> dict[str, Any]:
    """All numbers of the table, in bytes and tokens."""
    from . import rank

    peaks = rank.peaks(run)
    over = [name for name, size in peaks.items() if size > run.memory]
    cache = rank.cache_tokens(run) if run.utilization else run.tokens
    kind = "ZeRO-3 (coarse)" if run.zero3 else "FSDP2" if run.sharded else "DDP" if run.ranks > 1 else "one GPU"
    return {
        "parameters": sum(p.entries for p in run.parameters),
        "gpus": run.ranks * run.replicas,
        "sharding": f"HSDP, {run.replicas} copies" if run.replicas > 1 else kind,
        "memory": run.memory,
        "rows": run.rows,
        "tokens": run.tokens,
        "budget": run.budget,
        "tokens_per_pass": rank.pass_tokens(run),
        "moments": rank.moments(run),
        "peaks": peaks,
        "over": over,
        "fits": not over and cache >= run.tokens,
        "utilization": run.utilization,
        "best_utilization": rank.best_utilization(run) if run.beside else 0.0,
        "served": run.served,
        "sleep": run.sleep or not run.beside,
        "checkpointing": run.checkpointing,
        "engine_ranks": run.engine_ranks,
        "engine_weights": rank.engine_weights(run),
        "cache_tokens": cache,
        "sequences": run.sequences,
        "sync": run.synced,
        "host": rank.host_bytes(run),
    }


def options(found: dict[str, Any]) -> Iterator[str]:
    """What may save memory, each as options of `qarl-trl plan` that can be pasted as they are."""
    if not found["sleep"]:
        yield "--vllm_enable_sleep_mode true"
    if 0 < found["best_utilization"] < found["utilization"]:
        yield f"--vllm_gpu_memory_utilization {found['best_utilization']:g}"
    if not found["checkpointing"]:
        yield "--gradient_checkpointing true"
    if found["budget"] is None or found["budget"] > found["longest"]:
        yield f"--max_tokens_per_pass {found['longest']}"
    if (rows := found["rows"]) > 1:  # the same rollout batch and update in more, smaller micro-batches
        steps = ((name, found[name] * rows) for name in ("gradient_accumulation_steps", "steps_per_generation"))
        yield " ".join(["--per_device_train_batch_size 1", *(f"--{name} {value}" for name, value in steps)])
    if not found["use_peft"]:  # LoRA, with which Muon and dropout (0.05 by default) are refused
        yield "--use_peft true --lora_dropout 0" + " --optim_muon false" * found["optim_muon"]
    if found["sharding"] == "DDP":
        yield "--sharding fsdp2"
    if found["sharding"].startswith("HSDP"):
        yield "--replicas 1"
    elif found["sharding"] != "DDP":
        yield f"--gpus {2 * found['gpus']}"


def helpful(argv: Sequence[str], found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Those of [`options`] that make a moment smaller which does not fit, each read as if it had been given."""
    for change in options(found):
        try:
            after = report(read_run([*argv, *change.split()])[0])
        except ValueError:  # not with the other settings
            continue
        if any(after["peaks"].get(name, 0) < found["peaks"][name] for name in found["over"]):
            yield {"change": change, "peak": max(after["peaks"].values()), "fits": after["fits"]}


def table(found: dict[str, Any]) -> str:
    """The report for people, in GiB."""
    gib, moments = 2**30, found["moments"]
    rows = list(dict.fromkeys(name for items in moments.values() for name in items))
    lines = [
        f"{found['model']}: {found['parameters'] / 1e9:.2f} billion parameters, {found['scheme']}; {found['sharding']}, "
        f"{found['gpus']} x {found['memory'] / gib:.0f} GiB",
        f"micro-batch: {found['rows']} rows of {found['tokens']} tokens, {found['tokens_per_pass']} in a pass",
        f"host memory of a machine while the model loads: {found['host'] / gib:.0f} GiB" if found["host"] else "",
        "",
        f"{'GiB on each GPU (estimated)':30}" + "".join(f"{name:>16}" for name in moments),
    ]
    for row in rows:
        cells = (f"{items[row] / gib:16.1f}" if row in items else " " * 16 for items in moments.values())
        lines.append(f"{row:30}{''.join(cells)}".rstrip())
    marks = (f"{size / gib:.1f}{'!' if name in found['over'] else ' '}" for name, size in found["peaks"].items())
    lines += [f"{'sum':30}" + "".join(f"{mark:>16}" for mark in marks), "", *engine_lines(found)]
    if found["over"]:
        lines.append(f"It does not fit: {', '.join(found['over'])}. What helps, alone:")
    for change in found["changes"]:
        lines.append(f"  {change['change']}: {change['peak'] / gib:.1f} GiB{', fits' if change['fits'] else ''}")
    return "\n".join([*lines, "It fits."] if found["fits"] else lines)


def engine_lines(found: dict[str, Any]) -> Iterator[str]:
    """What is said of the engine, with a warning where it has room for few rows and memory is idle."""
    if not found["utilization"]:
        return
    gib, room, share = 2**30, found["cache_tokens"] / found["tokens"], found["best_utilization"]
    own = f"of the server's own {found['engine_ranks']} x {found['memory'] / gib:.0f} GiB"
    yield (
        f"engine: weights {found['engine_weights'] / gib:.1f} GiB, room for {found['cache_tokens']:,} tokens "
        f"({room:.1f} such rows); a weight sync moves {found['sync'] / gib:.1f} GiB"
    )
    fit = own if found["served"] else f"at most {share:g} would fit"
    yield f"vllm_gpu_memory_utilization: {found['utilization']:g}, {fit}"
    if room < 1:
        yield "The engine has no room for one row: vllm_tensor_parallel_size or vllm_gpu_memory_utilization up."
    elif room < FEW * found["sequences"] and share >= found["utilization"] + IDLE:
        idle = (found["memory"] - max(found["peaks"].values())) / gib
        yield (
            f"warning: room for {room:.0f} whole rows of {found['sequences']} sequences while {idle:.0f} GiB are idle: "
            f"--vllm_gpu_memory_utilization {share:g} would fit"
        )
