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
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import common
import torch


# Log-probs of the prompt "17+5+8=", which the toy was never taught to write.
PROMPT = 6
START = {"free": "GPTQ checkpoint", "unquantized": "the model before GPTQ"}
RATES = (1e-6, 1e-5, 1e-4, 1e-3)


# What is read off a quantized model ---------------------------------------------------------------------------------


def saturated(model: Any) -> float:
    """
    Share of the 4-bit quantized values that stand at the end of the range although the weight lies half a step beyond
    it.
    """
    from qarl_trl.quant import quantized_modules

    outside = 0
    total = 0
    for _, module in quantized_modules(model):
        scale = module.low_bit().scale.float().unsqueeze(-1)
        groups = module.weight.detach().float().unflatten(-1, (-1, module.scheme.weights.group_size))
        steps = groups / scale
        outside += ((steps < -8.5) | (steps > 7.5)).sum().item()
        total += steps.numel()
    return outside / total


def quantized(model: Any) -> torch.Tensor:
    """All 4-bit quantized values, one byte each."""
    from qarl_trl.quant import quantized_modules

    values_of_layers = []
    for _, module in quantized_modules(model):
        # Two values in a byte.
        packed = module.low_bit().quantized.reshape(-1).clone().view(torch.uint8)
        values_of_layers.append(torch.stack((packed & 15, packed >> 4), -1).flatten())
    return torch.cat(values_of_layers)


def values(model: Any) -> torch.Tensor:
    """All dequantized weights."""
    from qarl_trl.quant import quantized_modules
    from qarl_trl.quant.quantize import dequantize

    return torch.cat([dequantize(module.low_bit()).float().flatten() for _, module in quantized_modules(model)])


def log_probs(model: Any, probes: list[list[int]]) -> torch.Tensor:
    """Log-probs of the answers' tokens, in one row."""
    from precondition import log_probs

    return torch.cat([log_probs(model, [ids])[PROMPT:] for ids in probes])


def loss_of(model: Any, probes: list[list[int]]) -> float:
    """Mean loss of the answers' tokens, in nats."""
    return -log_probs(model, probes).mean().item()


# Models and texts ---------------------------------------------------------------------------------------------------


def trained_model(steps: int) -> tuple[Any, Any]:
    """The quickstart's model after its supervised phase, and its tokenizer."""
    from sums import make_model, make_tokenizer
    from warm_start import warm_start

    model = make_model(seed=0)
    tokenizer = make_tokenizer()
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
    dataset = Dataset.from_dict({"input_ids": calibration, "attention_mask": masks})
    return dataset, rows(probes, held_out=True)


def quantize(plain: str, method: str, dataset: Any, output: str) -> None:
    """Post-training quantization by a method of examples/llmcompressor/ptq.py, in W4A16."""
    from llmcompressor import oneshot
    from ptq import make_recipe
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    data: dict[str, Any] = {}
    # Rounding to the nearest needs no texts.
    if method != "rtn":
        longest = max(map(len, dataset["input_ids"]))
        data = {"dataset": dataset, "num_calibration_samples": len(dataset), "max_seq_length": longest}
    oneshot(model=model, recipe=make_recipe(method, "W4A16"), output_dir=output, **data)


def baselines(plain: str, dataset: Any, probes: list[list[int]]) -> dict[str, float]:
    """Held-out loss after post-training quantization by each method, and without."""
    from transformers import AutoModelForCausalLM

    from qarl_trl.quant.start import load_master_weights

    losses = {"bf16": loss_of(AutoModelForCausalLM.from_pretrained(plain), probes)}
    for method in ("rtn", "gptq", "awq"):
        quantize(plain, method, dataset, f"ptq-{method}")
        model = load_master_weights(f"ptq-{method}", dtype=torch.bfloat16)
        losses[method] = loss_of(model, probes)
    return losses


def start(arm: str, plain: str, checkpoint: str) -> Any:
    """
    The model that one arm starts from, with its master weights.

    Args:
        arm: One of `START`.
        plain: Folder of the model before GPTQ.
        checkpoint: Folder of the GPTQ checkpoint.
    """
    from transformers import AutoModelForCausalLM

    from qarl_trl.quant import apply_quantization
    from qarl_trl.quant.scheme import DEFAULT_IGNORE, resolve_scheme, single_group
    from qarl_trl.quant.source import quantized_source
    from qarl_trl.quant.start import load_master_weights

    if arm == "unquantized":
        plan = single_group(resolve_scheme("W4A16"), ["Linear"], DEFAULT_IGNORE)
        return apply_quantization(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32), plan)
    return apply_quantization(load_master_weights(checkpoint), quantized_source(checkpoint).plan())


# What is reported ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """
    The GPTQ checkpoint as it is, which a frozen base has.

    Attributes:
        quantized: Its 4-bit quantized values, one byte each, `(N,)`.
        values: Its dequantized weights, float32 `(N,)`.
        logps: Log-probs of the tokens of held-out answers, `(T,)`.
    """

    quantized: torch.Tensor
    values: torch.Tensor
    logps: torch.Tensor


def reference_of(checkpoint: str, probes: list[list[int]]) -> Reference:
    """Read a checkpoint whose quantized values are frozen."""
    from qarl_trl.quant.scheme import resolve_config
    from qarl_trl.quant.source import quantized_source
    from qarl_trl.quant.start import load_frozen_base

    model = load_frozen_base(checkpoint, resolve_config(quantized_source(checkpoint).plan()))
    return Reference(quantized(model), values(model), log_probs(model, probes))


def first_sync(arm: str, model: Any, reference: Reference, probes: list[list[int]]) -> str:
    """What the first sync of an arm would send, beside the checkpoint."""
    logps = log_probs(model, probes)
    differing = (quantized(model) != reference.quantized).float().mean().item()
    distance = ((values(model) - reference.values).norm() / reference.values.norm()).item()
    nats = (logps - reference.logps).abs().mean().item()
    return (
        f"first sync, {arm} ({START[arm]}): {differing:.2%} of the quantized values differ from the checkpoint's, "
        f"weights by {distance:.2%}, log-probs by {nats:.5f} nats; loss {-logps.mean().item():.5f}"
    )


def step(model: Any, optimizer: Any, tokenizer: Any, stream: Iterator[dict[str, Any]]) -> None:
    """One supervised update on correctly worked sums."""
    from warm_start import completion_loss

    optimizer.zero_grad()
    worked = [(row["prompt"], row["solution"]) for row in islice(stream, 32)]
    completion_loss(model, tokenizer, worked).backward()
    optimizer.step()


def train_further(model: Any, tokenizer: Any, rate: float, steps: int, probes: list[list[int]]) -> dict[str, float]:
    """
    Train a model that was started, and read off what became of it.

    Args:
        model: A quantized model with master weights.
        tokenizer: Of the model.
        rate: Learning rate.
        steps: Number of supervised updates.
        probes: Token ids of the held-out rows.
    """
    from sums import problems

    model.train()
    before = quantized(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    # The same sums for each arm and rate.
    stream = problems(seed=5)
    for _ in range(steps):
        step(model, optimizer, tokenizer, stream)

    model.eval()
    loss = loss_of(model, probes)
    changed = (quantized(model) != before).float().mean().item()
    return {"quantized values changed": changed, "saturated": saturated(model), "loss": loss}


def main() -> None:
    load = os.getloadavg()[0]
    args = common.arguments(
        __doc__,
        warm=(420, 20, "supervised updates of the toy before it is quantized"),
        steps=(50, 4, "updates afterwards"),
        probes=(128, 8, "held-out rows"),
    )

    model, tokenizer = trained_model(args.warm)
    dataset, probes = texts(tokenizer, 128, args.probes)

    rows: list[dict[str, Any]] = []
    headlines: list[str] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        plain = str(Path(folder) / "plain")
        checkpoint = str(Path(folder) / "gptq")
        model.to(torch.bfloat16).save_pretrained(plain)
        quantize(plain, "gptq", dataset, checkpoint)

        for method, loss in baselines(plain, dataset, probes).items():
            headlines.append(f"held-out loss, {method}: {loss:.5f}")

        reference = reference_of(checkpoint, probes)
        for arm in START:
            headlines.append(first_sync(arm, start(arm, plain, checkpoint), reference, probes))
            for rate in RATES:
                trained = train_further(start(arm, plain, checkpoint), tokenizer, rate, args.steps, probes)
                row = {"start": arm, "learning rate": f"{rate:g}", **trained}
                rows.append(row)
                print(row, flush=True)

    common.report("bench_quantized_start", args, headlines, rows, load, tokens=reference.logps.numel())


if __name__ == "__main__":
    main()
