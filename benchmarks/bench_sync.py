"""Weight sync: streaming packed low-bit tensors into the engine against a plain bf16 reload of the same model.

Claim: a low-bit sync takes at most 1.0x the time of a bf16 reload of the same model through the same code path.

Three engines live at once, each in its own process, and take turns. A low-bit sync quantizes every layer. The forward
that follows uses these quantized values, so quantization is not paid twice: bench_learner counts it once more, on the
learner's side.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import common
import torch


BASE = "bf16"
# The scheme of each arm.
ARMS = {BASE: None, "W4A16": "W4A16", "FP8_DYNAMIC": "FP8_DYNAMIC"}
GOAL = 1.0


# In the process of one engine ---------------------------------------------------------------------------------------


def serve(tick: Any, path: str, scheme: str | None) -> None:
    """An engine that syncs on request."""
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

    tick()
    while True:
        engine.reset_clock()
        engine.sync_weights()
        tick((engine.sync_seconds, engine.synced_bytes))


# Here ---------------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> tuple[common.Times, dict[str, int]]:
    """Seconds of the syncs of each engine, and the bytes that each moves."""
    workers: dict[str, common.Worker] = {}
    moved: dict[str, int] = {}

    def timed_sync(name: str) -> float:
        seconds, size = workers[name].step()
        moved[name] = size
        return seconds

    try:
        with tempfile.TemporaryDirectory() as folder:
            path = common.save_model(Path(folder) / "model", args.hidden, args.layers, args.inner, args.vocabulary)
            for name, scheme in ARMS.items():
                workers[name] = common.Worker(serve, path, scheme)
                workers[name].wait()

            arms = {name: functools.partial(timed_sync, name) for name in ARMS}
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
        times: Seconds of the syncs of each engine.
        moved: Bytes of a sync of each engine.
        shares: What `share_of_step` returned.
    """
    ratio = common.ratio(times, name, BASE)
    return {
        "arm": name,
        "ratio": ratio["ratio"],
        "bytes": moved[name],
        "bytes ratio": moved[name] / moved[BASE],
        "share of a step": shares.get(name),
        "s": ratio["seconds"],
    }


def headline_of(row: dict[str, Any]) -> str:
    """The claim for one engine."""
    share = "share of a step: bench_step"
    if row["share of a step"] is not None:
        share = f"{row['share of a step']:.1%} of a step (bench_step)"
    return (
        f"{row['arm']} / bf16 reload: {row['ratio']:.2f}x {common.verdict(row['ratio'], GOAL)}; "
        f"{row['bytes ratio']:.2f}x the bytes; {share}"
    )


def main() -> None:
    args = common.arguments(
        __doc__,
        hidden=(1024, 256, "model width"),
        layers=(4, 2, "decoder layers"),
        inner=(2816, 512, "width of the MLP"),
        vocabulary=(4096, 256, "tokens in the vocabulary"),
        rounds=(15, 3, "syncs of each engine"),
    )
    load = os.getloadavg()[0]

    times, moved = measure(args)
    shares = share_of_step(args.quick)

    rows = [row_of(name, times, moved, shares) for name in ARMS]
    headlines = [headline_of(row) for row in rows if row["arm"] != BASE]
    common.report("bench_sync", args, headlines, rows, load, times=times)


if __name__ == "__main__":
    main()
