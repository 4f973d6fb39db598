"""Weight sync: streaming packed low-bit tensors into the engine against a plain bf16 reload of the same model.

Claim: a low-bit sync takes at most 1.0x the time of a bf16 reload of the same model through the same code path.

Three engines live at once, each in its own process, and take turns. "cached" syncs quantized values that exist
already; "after a step" has to quantize every layer first, as the sync after an optimizer step does. The forward that
follows uses these quantized values, so quantization is not paid twice: bench_learner counts it once more, on the
learner's side.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

import common
import torch


BASE = "bf16"
# The scheme of each arm.
ARMS = {BASE: None, "W4A16": "W4A16", "FP8_DYNAMIC": "FP8_DYNAMIC"}
KINDS = ("cached", "after a step")
GOAL = 1.0


# In the process of one engine ---------------------------------------------------------------------------------------


def serve(tick: Any, path: str, scheme: str | None) -> None:
    """An engine that syncs on request: `"cached"` or `"after a step"`."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from qarl_trl.export import quantization_config
    from qarl_trl.quant import apply_quantization
    from qarl_trl.rollout.engine import LowBitVLLMGeneration

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if scheme is not None:
        apply_quantization(model, scheme)
    engine = LowBitVLLMGeneration(
        model,
        accelerator=Accelerator(cpu=True),
        processing_class=AutoTokenizer.from_pretrained(path),
        quantization_config=quantization_config(model),
        engine_kwargs={"enforce_eager": True},
        max_model_length=64,
        max_num_seqs=8,
    )

    request = tick()
    while True:
        sync(engine, model, request)
        request = tick((engine.sync_seconds, engine.synced_bytes))


def sync(engine: Any, model: Any, request: str) -> None:
    """Sync once, and check that quantized values were made anew after a step, and only then."""
    from qarl_trl.quant import quantized_modules

    layers = [layer for _, layer in quantized_modules(model)]
    # Not by `id`, which could come again.
    before = [weakref.ref(layer.low_bit()) for layer in layers]
    if request == "after a step":
        with torch.no_grad():
            for parameter in model.parameters():
                # Counts as a change: the quantized values are made anew, from the same values.
                parameter.add_(0)

    engine.reset_clock()
    engine.sync_weights()

    kept = sum(former() is layer.low_bit() for former, layer in zip(before, layers, strict=True))
    expected = len(layers) if request == "cached" else 0
    if kept != expected:
        raise RuntimeError(f"{kept} of {len(layers)} layers kept their quantized values in a weight sync {request!r}")


# Here ---------------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> tuple[common.Times, dict[str, int]]:
    """Seconds of each kind of sync of each engine, and the bytes that each moves."""
    workers: dict[str, common.Worker] = {}
    moved: dict[str, int] = {}

    def timed_sync(name: str, kind: str) -> float:
        seconds, size = workers[name].step(kind)
        moved[name] = size
        return seconds

    try:
        with tempfile.TemporaryDirectory() as folder:
            path = common.save_model(Path(folder) / "model", args.hidden, args.layers, args.inner, args.vocabulary)
            for name, scheme in ARMS.items():
                workers[name] = common.Worker(serve, path, scheme)
                workers[name].wait()

            arms = {}
            for kind in KINDS:
                for name in ARMS:
                    arms[f"{name}, {kind}"] = functools.partial(timed_sync, name, kind)
            times = common.interleave(arms, args.rounds, warmup=2)
    finally:
        for worker in workers.values():
            worker.close()
    return times, moved


def share_of_step(quick: bool) -> dict[str, float]:
    """Weight sync as a share of a training step, as bench_step measured it (another model, the same machine)."""
    file = common.result_file("bench_step", quick)
    if not file.exists():
        return {}

    rows = json.loads(file.read_text())["rows"]
    return {row["arm"]: row["sync"] for row in rows}


def row_of(name: str, times: common.Times, moved: dict[str, int], shares: dict[str, float]) -> dict[str, Any]:
    """
    The line of one engine.

    Args:
        name: Of the arm.
        times: Seconds of each kind of sync of each engine.
        moved: Bytes of a sync of each engine.
        shares: What `share_of_step` returned.
    """
    cached = common.ratio(times, f"{name}, cached", f"{BASE}, cached")
    after_a_step = common.ratio(times, f"{name}, after a step", f"{BASE}, after a step")
    return {
        "arm": name,
        "cached": cached["ratio"],
        "after a step": after_a_step["ratio"],
        "bytes": moved[name],
        "bytes ratio": moved[name] / moved[BASE],
        "share of a step": shares.get(name),
        "cached s": cached["seconds"],
        "after a step s": after_a_step["seconds"],
    }


def headline_of(row: dict[str, Any]) -> str:
    """The claim for one engine."""
    share = "share of a step: bench_step"
    if row["share of a step"] is not None:
        share = f"{row['share of a step']:.1%} of a step (bench_step)"
    return (
        f"{row['arm']} / bf16 reload: {row['cached']:.2f}x {common.verdict(row['cached'], GOAL)}; after an "
        f"optimizer step, with quantization, {row['after a step']:.2f}x {common.verdict(row['after a step'], GOAL)}; "
        f"{row['bytes ratio']:.2f}x the bytes; {share}"
    )


def main() -> None:
    args = common.arguments(
        __doc__,
        hidden=(1024, 256, "model width"),
        layers=(4, 2, "decoder layers"),
        inner=(2816, 512, "width of the MLP"),
        vocabulary=(4096, 256, "tokens in the vocabulary"),
        rounds=(15, 3, "syncs of each kind and engine"),
    )
    load = os.getloadavg()[0]

    times, moved = measure(args)
    shares = share_of_step(args.quick)

    rows = [row_of(name, times, moved, shares) for name in ARMS]
    headlines = [headline_of(row) for row in rows if row["arm"] != BASE]
    common.report("bench_sync", args, headlines, rows, load, times=times)


if __name__ == "__main__":
    main()
