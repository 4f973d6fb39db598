"""Weight sync: streaming packed low-bit tensors into the engine against a plain bf16 reload of the same model.

Claim: a low-bit sync takes at most 1.0x the time of a bf16 reload of the same model through the same code path.

Three engines live at once, each in its own process, and take turns. "cached" syncs quantized values that exist
already; "after a step" has to quantize every layer first, as the sync after an optimizer step does. The forward that
follows uses these quantized values, so quantization is not paid twice: bench_learner counts it once more, on the
learner's side.
"""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

import common
import torch


ARMS = {"bf16": None, "W4A16": "W4A16", "FP8_DYNAMIC": "FP8_DYNAMIC"}
BASE = "bf16"
GOAL = 1.0


def serve(tick: Any, path: str, scheme: str | None) -> None:
    """An engine that syncs on request: `"cached"` or `"after a step"`."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from qarl_trl.export import quantization_config
    from qarl_trl.quant import apply_quantization, quantized_modules
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
        before = [weakref.ref(layer.low_bit()) for _, layer in quantized_modules(model)]  # an id could come again
        if request == "after a step":
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0)  # counts as a change: the quantized values are made anew, from the same values
        engine.reset_clock()
        engine.sync_weights()
        layers = [layer for _, layer in quantized_modules(model)]
        kept = sum(former() is layer.low_bit() for former, layer in zip(before, layers, strict=True))
        if kept != (len(before) if request == "cached" else 0):
            raise RuntimeError(
                f"{kept} of {len(before)} layers kept their quantized values in a weight sync {request!r}"
            )
        request = tick((engine.sync_seconds, engine.synced_bytes))


def share_of_step(quick: bool) -> dict[str, float]:
    """Weight sync as a share of a training step, as bench_step found it (another model, the same machine)."""
    file = common.result_file("bench_step", quick)
    return {row["arm"]: row["sync"] for row in json.loads(file.read_text())["rows"]} if file.exists() else {}


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
    workers: dict[str, common.Worker] = {}
    moved: dict[str, int] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = common.save_model(Path(folder) / "model", args.hidden, args.layers, args.inner, args.vocabulary)
            for name, scheme in ARMS.items():
                workers[name] = common.Worker(serve, path, scheme)
                workers[name].wait()

            def sync(name: str, kind: str) -> float:
                seconds, moved[name] = workers[name].step(kind)
                return seconds

            arms = {
                f"{name}, {kind}": (lambda name=name, kind=kind: sync(name, kind))
                for kind in ("cached", "after a step")
                for name in ARMS
            }
            times = common.interleave(arms, args.rounds, warmup=2)
    finally:
        for worker in workers.values():
            worker.close()
    shares = share_of_step(args.quick)
    rows, headlines = [], []
    for name in ARMS:
        cached = common.ratio(times, f"{name}, cached", f"{BASE}, cached")
        anew = common.ratio(times, f"{name}, after a step", f"{BASE}, after a step")
        rows.append(
            {
                "arm": name,
                "cached": cached["ratio"],
                "after a step": anew["ratio"],
                "bytes": moved[name],
                "bytes ratio": moved[name] / moved[BASE],
                "share of a step": shares.get(name),
                "cached s": cached["seconds"],
                "after a step s": anew["seconds"],
            }
        )
        if name != BASE:
            headlines.append(
                f"{name} / bf16 reload: {cached['ratio']:.2f}x {common.verdict(cached['ratio'], GOAL)}; after an "
                f"optimizer step, with quantization, {anew['ratio']:.2f}x {common.verdict(anew['ratio'], GOAL)}; "
                f"{rows[-1]['bytes ratio']:.2f}x the bytes; "
                + (f"{shares[name]:.1%} of a step (bench_step)" if name in shares else "share of a step: bench_step")
            )
    common.report("bench_sync", args, headlines, rows, load, times=times)


if __name__ == "__main__":
    main()
