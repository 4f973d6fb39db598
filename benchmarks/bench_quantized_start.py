"""Starting from a 4-bit checkpoint: how far the first sync is from it, and what happens to the quantized values
afterwards.

Claim: a frozen base is the checkpoint, byte for byte. Master weights whose scales follow them are another model. A
trained toy is quantized by GPTQ, loaded as master weights, and trained further on worked sums through its 4-bit
forward (straight-through gradients, as in RL, but supervised, so that a step costs a second and not a rollout).
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


# Log-probs of the prompt "17+5+8=", which the toy was never taught to write.
PROMPT = 6
START = {"free": "GPTQ checkpoint", "unquantized": "the model before GPTQ"}


def saturated(model: Any) -> float:
    """
    Share of the 4-bit quantized values that stand at the end of the range although the weight lies half a step beyond
    it.
    """
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
    from qarl_trl.quant.quantize import dequantize

    return torch.cat([dequantize(m.low_bit()).float().flatten() for _, m in quantized_modules(model)])


def step(model: Any, optimizer: Any, tokenizer: Any, stream: Any) -> None:
    """One supervised update on correctly worked sums."""
    from warm_start import completion_loss

    optimizer.zero_grad()
    completion_loss(model, tokenizer, [(row["prompt"], row["solution"]) for row in islice(stream, 32)]).backward()
    optimizer.step()


def trained_model(steps: int) -> tuple[Any, Any]:
    """The quickstart's model after its supervised phase, and its tokenizer."""
    from sums import make_model, make_tokenizer
    from warm_start import warm_start

    model, tokenizer = make_model(seed=0), make_tokenizer()
    warm_start(model, tokenizer, seed=0, steps=steps)
    return model.eval(), tokenizer


def texts(tokenizer: Any, samples: int, probes: int) -> tuple[Any, list[list[int]]]:
    """Prompts with the working as the model was taught it, tokenized: a calibration set, and held-out rows."""
    from datasets import Dataset
    from sums import problems

    def rows(number: int, held_out: bool) -> list[list[int]]:
        chosen = islice(problems(seed=11, held_out=held_out), number)
        return [tokenizer.encode(row["prompt"] + row["demonstration"]) for row in chosen]

    calibration = rows(samples, held_out=False)
    masks = [[1] * len(row) for row in calibration]
    return Dataset.from_dict({"input_ids": calibration, "attention_mask": masks}), rows(probes, held_out=True)


def log_probs(model: Any, probe: list[list[int]]) -> torch.Tensor:
    """Log-probs of the answers' tokens, in one row."""
    from precondition import log_probs

    return torch.cat([log_probs(model, [ids])[PROMPT:] for ids in probe])


def quantize(plain: str, method: str, dataset: Any, output: str) -> None:
    """Post-training quantization by a method of examples/llmcompressor/ptq.py, in W4A16."""
    from llmcompressor import oneshot
    from ptq import make_recipe
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    longest = max(map(len, dataset["input_ids"]))
    data = {"dataset": dataset, "num_calibration_samples": len(dataset), "max_seq_length": longest}
    oneshot(model=model, recipe=make_recipe(method, "W4A16"), output_dir=output, **({} if method == "rtn" else data))


def baselines(plain: str, dataset: Any, probe: list) -> dict[str, float]:
    """Held-out loss after post-training quantization by each method, and without."""
    from transformers import AutoModelForCausalLM

    from qarl_trl.quant.start import load_master_weights

    losses = {"bf16": -log_probs(AutoModelForCausalLM.from_pretrained(plain), probe).mean().item()}
    for method in ("rtn", "gptq", "awq"):
        quantize(plain, method, dataset, f"ptq-{method}")
        model = load_master_weights(f"ptq-{method}", dtype=torch.bfloat16)
        losses[method] = -log_probs(model, probe).mean().item()
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
    from qarl_trl.quant.scheme import DEFAULT_IGNORE, resolve_config, resolve_scheme, single_group
    from qarl_trl.quant.source import quantized_source
    from qarl_trl.quant.start import load_master_weights

    model, tokenizer = trained_model(args.warm)
    dataset, probe = texts(tokenizer, 128, args.probes)
    plan = single_group(resolve_scheme("W4A16"), ["Linear"], DEFAULT_IGNORE)
    table, headlines = [], []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        plain, path = str(Path(folder) / "plain"), str(Path(folder) / "gptq")
        model.to(torch.bfloat16).save_pretrained(plain)
        quantize(plain, "gptq", dataset, path)
        source = quantized_source(path)
        headlines += [f"held-out loss, {arm}: {value:.5f}" for arm, value in baselines(plain, dataset, probe).items()]

        def start(arm: str) -> Any:
            if arm == "unquantized":
                return apply_quantization(type(model).from_pretrained(plain, dtype=torch.float32), plan)
            return apply_quantization(load_master_weights(path), source.plan())

        reference = load_master_weights(path, freeze=resolve_config(source.plan()))
        first_quantized, first_values = quantized(reference), values(reference)
        first_logps = log_probs(reference, probe)
        for arm in START:
            begun = start(arm)
            logps = log_probs(begun, probe)
            headlines.append(
                f"first sync, {arm} ({START[arm]}): {(quantized(begun) != first_quantized).float().mean().item():.2%} "
                "of the quantized values differ from the checkpoint's, weights by "
                f"{((values(begun) - first_values).norm() / first_values.norm()).item():.2%}, log-probs by "
                f"{(logps - first_logps).abs().mean().item():.5f} nats; loss {-logps.mean().item():.5f}"
            )
            for rate in (1e-6, 1e-5, 1e-4, 1e-3):
                model_in_training = start(arm).train()
                before = quantized(model_in_training)
                optimizer = torch.optim.AdamW(model_in_training.parameters(), lr=rate, weight_decay=0.0)
                stream = problems(seed=5)
                for _ in range(args.steps):
                    step(model_in_training, optimizer, tokenizer, stream)
                model_in_training.eval()
                loss = -log_probs(model_in_training, probe).mean().item()
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
