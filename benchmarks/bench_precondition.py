"""Preconditioning: what SmoothQuant, AWQ's scaling and a rotation do to a trained model before it is quantized.

Claim: `qarl-trl precondition` leaves the function unchanged. Whether the quantized model then lies closer to the model
depends on the model: both a trained toy without outliers and the same one with planted outlier channels are measured,
so that a method that does not help is seen not to.

Three figures for each scheme, model and method: the largest change of a log-prob by the transform (float32, before
quantization), the mean relative weight error, and the mean absolute log-prob mismatch between the quantized model and the model
on held-out completions, with the learner's own forward.
"""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import common
import torch


SCHEMES = (("W4A16", 128), ("W8A8", None), ("FP8_DYNAMIC", None))
# Log-probs of the prompt "17+5+8=", which the toy was never taught to write.
PROMPT = 6
OUTLIER_CHANNELS = 4
OUTLIER_FACTOR = 30.0


def trained_model(steps: int) -> tuple[Any, Any]:
    """The quickstart's model after its supervised phase, and its tokenizer."""
    from sums import make_model, make_tokenizer
    from warm_start import warm_start

    model, tokenizer = make_model(seed=0), make_tokenizer()
    warm_start(model, tokenizer, seed=0, steps=steps)
    return model.eval(), tokenizer


@torch.no_grad()
def with_outliers(model: Any) -> Any:
    """The same function with a few channels behind each norm made large, as trained language models have them."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            channels = torch.randperm(norm.weight.numel(), generator=generator)[:OUTLIER_CHANNELS]
            norm.weight[channels] *= OUTLIER_FACTOR
            for reader in readers:
                reader.weight[:, channels] /= OUTLIER_FACTOR
    return model


def texts(tokenizer: Any, samples: int, probes: int) -> tuple[Any, list[torch.Tensor]]:
    """Prompts with the working as the model was taught it, tokenized: a calibration set, and held-out rows `(1, T)`."""
    from datasets import Dataset
    from sums import problems

    def rows(number: int, held_out: bool) -> list[list[int]]:
        chosen = islice(problems(seed=11, held_out=held_out), number)
        return [tokenizer.encode(row["prompt"] + row["demonstration"]) for row in chosen]

    calibration = rows(samples, held_out=False)
    masks = [[1] * len(row) for row in calibration]
    dataset = Dataset.from_dict({"input_ids": calibration, "attention_mask": masks})
    return dataset, [torch.tensor([row]) for row in rows(probes, held_out=True)]


def main() -> None:
    load = os.getloadavg()[0]
    args = common.arguments(
        __doc__,
        steps=(420, 20, "supervised updates of the toy"),
        samples=(128, 8, "calibration rows"),
        probes=(128, 8, "held-out rows that are measured"),
    )
    from qarl_trl.quant.scheme import DEFAULT_IGNORE, resolve_scheme, single_group
    from qarl_trl.tools.llmcompressor.precondition import log_probs, quantization_error

    model, tokenizer = trained_model(args.steps)
    dataset, probe = texts(tokenizer, args.samples, args.probes)
    rows_out: list[dict[str, Any]] = []
    headlines: list[str] = []
    plans = {_name(*scheme): single_group(resolve_scheme(*scheme), ["Linear"], DEFAULT_IGNORE) for scheme in SCHEMES}
    for kind, start in (("trained", model), ("planted outliers", with_outliers(model))):
        reference = [log_probs(start, ids) for ids in probe]
        # Two of the transforms do not look at the scheme.
        arms = {"none": start}
        for method in ("smoothquant", "rotation"):
            arms[method] = _transformed(start, method, next(iter(plans.values())), dataset, probe)
        for scheme, plan in plans.items():
            arms["awq"] = _transformed(start, "awq", plan, dataset, probe)
            logp_diffs = {}
            for method, arm in arms.items():
                change = max((log_probs(arm, i) - r).abs().max().item() for i, r in zip(probe, reference, strict=True))
                error = quantization_error(arm, plan, probe, skip=PROMPT)
                rows_out.append({"model": kind, "scheme": scheme, "method": method, "change": change, **asdict(error)})
                logp_diffs[method] = error.logp_diff
            headlines += [
                f"{kind}, {scheme}: {method} mismatch x{logp_diff / logp_diffs['none']:.2f}"
                for method, logp_diff in logp_diffs.items()
                if method != "none"
            ]
    common.report(
        "bench_precondition", args, headlines, rows_out, load, tokens=sum(i.numel() - 1 - PROMPT for i in probe)
    )


def _name(scheme: str, group_size: int | None) -> str:
    return f"{scheme} group {group_size}" if group_size else scheme


def _transformed(start: Any, method: str, plan: Any, dataset: Any, probe: list) -> Any:
    from qarl_trl.tools.llmcompressor.precondition import precondition, transforms

    # Saved and loaded, because llm-compressor wants a model that has a folder; its logs go into the current one.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        start.save_pretrained(folder)
        model = type(start).from_pretrained(Path(folder), dtype=torch.float32)
        return precondition(model, transforms(method, plan), None if method == "rotation" else dataset, probe)


if __name__ == "__main__":
    main()
