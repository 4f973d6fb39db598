"""Starting from a 4-bit checkpoint: what frozen and free scales do to the first sync and to the quantized values afterwards.

Claim: with frozen scales the first sync is the checkpoint, byte for byte. With free ones it is another model. A trained
toy is quantized by GPTQ, loaded as master weights, and trained further on worked sums through its 4-bit forward (straight-through
gradients, as in RL, but supervised, so that a step costs a second and not a rollout).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import common
import torch
from bench_precondition import PROMPT, texts, trained_model


START = {"frozen": "GPTQ checkpoint", "free": "GPTQ checkpoint", "unquantized": "the model before GPTQ"}


def saturated(model: Any) -> float:
    """Share of the 4-bit quantized values that stand at the end of the range although the weight lies half a step beyond it."""
    from qarl_trl.quant import quantized_modules

    outside = total = 0
    for _, module in quantized_modules(model):
        scale = module.low_bit().scale.float().unsqueeze(-1)
        steps = module.weight.detach().float().unflatten(-1, (-1, module.scheme.weights.group_size)) / scale
        outside += ((steps < -8.5) | (steps > 7.5)).sum().item()
        total += steps.numel()
    return outside / total


def quantized(model: Any) -> torch.Tensor:
    """All 4-bit quantized values, one byte each."""
    from qarl_trl.quant import quantized_modules

    packed = [m.low_bit().quantized.reshape(-1).clone().view(torch.uint8) for _, m in quantized_modules(model)]
    return torch.cat([torch.stack((p & 15, p >> 4), -1).flatten() for p in packed])


def values(model: Any) -> torch.Tensor:
    """All dequantized weights."""
    from qarl_trl.quant import quantized_modules
    from qarl_trl.quant.gemm import dequantize

    return torch.cat([dequantize(m.low_bit()).float().flatten() for _, m in quantized_modules(model)])


def step(model: Any, optimizer: Any, tokenizer: Any, stream: Any) -> None:
    """One supervised update on correctly worked sums."""
    from warm_start import completion_loss

    optimizer.zero_grad()
    completion_loss(model, tokenizer, [(row["prompt"], row["solution"]) for row in islice(stream, 32)]).backward()
    optimizer.step()


def baselines(plain: str, plan: Any, dataset: Any, probe: list) -> dict[str, float]:
    """Held-out loss after post-training quantization by each method of `qarl-trl ptq`, and without."""
    from transformers import AutoModelForCausalLM

    from qarl_trl.quant.start import load_master_weights
    from qarl_trl.tools.llmcompressor.calibration import run_oneshot
    from qarl_trl.tools.llmcompressor.command import PTQ_METHODS
    from qarl_trl.tools.llmcompressor.precondition import log_probs
    from qarl_trl.tools.llmcompressor.ptq import modifiers

    losses = {}
    for method in ("bf16", *PTQ_METHODS):
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        if method != "bf16":
            run_oneshot(model, modifiers(method, plan), None if method == "rtn" else dataset, output=f"ptq-{method}")
            model = load_master_weights(f"ptq-{method}", dtype=torch.bfloat16)
        losses[method] = -torch.cat([log_probs(model, ids)[0, PROMPT:] for ids in probe]).mean().item()
    return losses


def main() -> None:
    load = os.getloadavg()[0]
    args = common.arguments(
        __doc__,
        warm=(420, 20, "supervised updates of the toy before it is quantized"),
        steps=(50, 4, "updates afterwards"),
        probes=(128, 8, "held-out rows"),
    )
    from sums import problems

    from qarl_trl.quant import apply_quantization
    from qarl_trl.quant.scheme import DEFAULT_IGNORE, resolve_scheme, single_group
    from qarl_trl.quant.start import load_master_weights, quantized_source
    from qarl_trl.tools.llmcompressor.calibration import run_oneshot
    from qarl_trl.tools.llmcompressor.precondition import log_probs
    from qarl_trl.tools.llmcompressor.ptq import modifiers

    model, tokenizer = trained_model(args.warm)
    dataset, probe = texts(tokenizer, 128, args.probes)
    plan = single_group(resolve_scheme("W4A16"), ["Linear"], DEFAULT_IGNORE)
    table, headlines = [], []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        plain, path = str(Path(folder) / "plain"), str(Path(folder) / "gptq")
        model.to(torch.bfloat16).save_pretrained(plain)
        bf16 = type(model).from_pretrained(plain, dtype=torch.bfloat16)
        run_oneshot(bf16, modifiers("gptq", plan), dataset, output=path)
        source = quantized_source(path)
        headlines += [
            f"held-out loss, {arm}: {value:.5f}" for arm, value in baselines(plain, plan, dataset, probe).items()
        ]

        def start(arm: str) -> Any:
            if arm == "unquantized":
                return apply_quantization(type(model).from_pretrained(plain, dtype=torch.float32), plan)
            frozen = source.qparams() if arm == "frozen" else None
            return apply_quantization(load_master_weights(path), source.plan(), qparams=frozen)

        reference = start("frozen")
        first_quantized, first_values = quantized(reference), values(reference)
        first_logps = torch.cat([log_probs(reference, ids)[0, PROMPT:] for ids in probe])
        for arm in START:
            begun = start(arm)
            logps = torch.cat([log_probs(begun, ids)[0, PROMPT:] for ids in probe])
            headlines.append(
                f"first sync, {arm} ({START[arm]}): "
                f"{(quantized(begun) != first_quantized).float().mean().item():.2%} of the quantized values differ from the checkpoint's, "
                f"weights by {((values(begun) - first_values).norm() / first_values.norm()).item():.2%}, "
                f"log-probs by {(logps - first_logps).abs().mean().item():.5f} nats; loss {-logps.mean().item():.5f}"
            )
            for rate in (1e-6, 1e-5, 1e-4, 1e-3):
                model_in_training = start(arm).train()
                before = quantized(model_in_training)
                optimizer = torch.optim.AdamW(model_in_training.parameters(), lr=rate, weight_decay=0.0)
                stream = problems(seed=5)
                for _ in range(args.steps):
                    step(model_in_training, optimizer, tokenizer, stream)
                model_in_training.eval()
                loss = -torch.cat([log_probs(model_in_training, ids)[0, PROMPT:] for ids in probe]).mean().item()
                table.append(
                    {
                        "start": arm,
                        "learning rate": f"{rate:g}",
                        "quantized values changed": (quantized(model_in_training) != before).float().mean().item(),
                        "saturated": saturated(model_in_training),
                        "loss": loss,
                    }
                )
                print(table[-1], flush=True)
    common.report("bench_quantized_start", args, headlines, table, load, tokens=first_logps.numel())


if __name__ == "__main__":
    main()
