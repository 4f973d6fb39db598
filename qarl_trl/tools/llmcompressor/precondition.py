"""Transforms that leave a model's function as it is and let its weights quantize better, folded in before RL.

SmoothQuant, AWQ's scaling and SpinQuant's R1 and R2, by llm-compressor. A plain high-precision model is saved if its
log-probs on the calibration texts are those of the one that came in, otherwise nothing (paper Sec. 3.1).
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ...quant import apply_quantization, quantized_modules, remove_quantization
from ...quant.experts import expert_modules
from ...quant.gemm import dequantize
from ...quant.recipe import TRANSFORMS
from .calibration import calibration_set, read_plan, run_oneshot
from .ptq import modifiers as quantization


# Largest change of a log-prob, in nats, in float32. Measured on trained and random toys: 1e-5 and less for transforms that
# are folded exactly, 0.1 and more for one that is not (an uncompensated norm). See tests/llmcompressor/test_precondition.py.
TOLERANCE = 1e-3
_LEFTOVERS = ("weight_scale", "weight_zero_point", "weight_observer")


@dataclass(frozen=True)
class QuantizationError:
    """What a scheme costs a model on given texts; all but the first in nats per token."""

    weight_error: float  # mean over layers of |W - Q(W)| / |W|, in Frobenius norms
    logp_diff: float  # mean absolute difference between the log-probs under Q(model) and model
    logp_diff_max: float
    loss: float  # mean negative log-prob under model
    loss_quantized: float  # the same under Q(model)


def precondition(
    model: PreTrainedModel, modifiers: Sequence[Any], dataset: Any | None, probe: Sequence[Tensor]
) -> PreTrainedModel:
    """
    Fold the transforms of `modifiers` into the weights of `model`, in float32, which is used up.

    A quantization that AWQ needs is taken off again. The function is compared on the token ids `(1, T)` of `probe`:
    `ValueError` when a transform cannot be folded, or changed it.
    """
    before = [log_probs(model, ids) for ids in tqdm(probe, "log-probs before")]
    weights = set(model.state_dict())
    transformed = run_oneshot(model, modifiers, dataset)
    plain = _plain(transformed, weights)
    after = (log_probs(plain, ids) for ids in tqdm(probe, "log-probs after"))
    change = max((new - old).abs().max().item() for new, old in zip(after, before, strict=True))
    if not change <= TOLERANCE:
        raise ValueError(
            f"The transforms changed the model: a log-prob moved by {change:.2e} nats, must be {TOLERANCE:.0e} at "
            f"most. Nothing was saved. Their mappings do not fit {type(model).__name__}: give your own in a recipe "
            "(--recipe)."
        )
    return plain


def check_dense(model: PreTrainedModel) -> None:
    """Refuse mixtures of experts, which llm-compressor's mappings do not reach."""
    name = next((name for name, _ in expert_modules(model)), None)
    if name is not None:
        raise ValueError(
            f"{type(model).__name__} has fused experts ({name!r}), unknown to the transforms. Train from it as it is."
        )


def transforms(method: str, plan: QuantizationConfig) -> list[Any]:
    """The modifiers of a method by name; AWQ searches its scales for `plan`."""
    from llmcompressor.modifiers.transform import SmoothQuantModifier, SpinQuantModifier

    return {
        "smoothquant": [SmoothQuantModifier(smoothing_strength=0.5)],
        "awq": quantization("awq", plan),
        "rotation": [SpinQuantModifier(rotations=["R1", "R2"], transform_type="hadamard")],
    }[method]


def transforms_of_recipe(path: str | os.PathLike) -> list[Any]:
    """The modifiers of an llm-compressor recipe, of which none may do more than transform weights."""
    from llmcompressor.recipe import Recipe

    if not Path(path).is_file():
        raise FileNotFoundError(f"--recipe {path}: there is no such file in {Path.cwd()}.")
    modifiers = Recipe.create_instance(str(path)).modifiers
    others = [type(m).__name__ for m in modifiers if type(m).__name__ not in TRANSFORMS]
    if not modifiers or set(others) - {"QuantizationModifier"}:
        raise ValueError(
            f"{path} has {others or 'no modifier'}. Known here: {', '.join(TRANSFORMS)}, and QuantizationModifier, which AWQ "
            "searches its scales for. Pruning, GPTQ and the like change the model."
        )
    return modifiers


@torch.no_grad()
def log_probs(model: PreTrainedModel, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-prob of each token after the first, `(1, T - 1)` in float32."""
    logits = model(input_ids=ids.to(model.device)).logits[:, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None].to(logits.device)).squeeze(-1)


@torch.no_grad()
def quantization_error(
    model: PreTrainedModel, plan: QuantizationConfig, probe: Sequence[Tensor], skip: int = 0
) -> QuantizationError:
    """
    What quantizing `model` by `plan` costs, with the learner's own forward; the weights stay as they are.

    Measured on the token ids `(1, T)` of `probe`, without the first `skip` log-probs of each, as of a prompt.
    """
    plain = torch.cat([log_probs(model, ids)[0, skip:] for ids in tqdm(probe, "log-probs")])
    apply_quantization(model, plan)
    try:
        errors = []
        for _, module in tqdm([*quantized_modules(model)], "quantizing"):
            weight = module.weight.float()
            errors.append(((dequantize(module.low_bit()).float() - weight).norm() / weight.norm()).item())
        low_bit = torch.cat([log_probs(model, ids)[0, skip:] for ids in tqdm(probe, "quantized log-probs")])
    finally:
        remove_quantization(model)
    logp_diff = (low_bit - plain).abs()
    return QuantizationError(
        sum(errors) / len(errors),
        logp_diff.mean().item(),
        logp_diff.max().item(),
        -plain.mean().item(),
        -low_bit.mean().item(),
    )


def run(args: argparse.Namespace) -> None:
    """`qarl-trl precondition`, with the options of `command.py`."""
    plan = read_plan(args)
    modifiers = transforms_of_recipe(args.recipe) if args.recipe else transforms(args.method, plan)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = calibration_set(args, tokenizer)
    probe = [torch.tensor([ids]) for ids in rows["input_ids"][: args.num_probes]]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    check_dense(model)
    before = quantization_error(model, plan, probe)
    needs_data = any(modifier.requires_calibration_data for modifier in modifiers)
    plain = precondition(model, modifiers, rows if needs_data else None, probe)
    after = quantization_error(plain, plan, probe)
    plain.to(AutoConfig.from_pretrained(args.model).dtype or torch.bfloat16).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    print(report(before, after))
    print(f"Transformed model, not quantized, written to {args.output}. Train with model_name_or_path: {args.output}")


def report(before: QuantizationError, after: QuantizationError) -> str:
    """The two measurements side by side."""
    lines = [f"{'':16} {'before':>10} {'after':>10}"]
    lines += [f"{name:16} {old:10.5f} {asdict(after)[name]:10.5f}" for name, old in asdict(before).items()]
    if after.logp_diff >= before.logp_diff:
        lines.append("The quantized model is no closer to the model than before: this method does not help here.")
    return "\n".join(lines)


def _plain(model: PreTrainedModel, weights: set[str]) -> PreTrainedModel:
    """A fresh model with the weights of `model`, without what a transform or a quantization hung on it."""
    state = {name: t for name, t in model.state_dict().items() if not name.endswith(_LEFTOVERS)}
    extra = sorted(set(state) - weights - {"lm_head.weight"})
    if extra:
        raise ValueError(
            f"A transform left {len(extra)} tensors that the model has to apply while it runs (first: {extra[0]!r}). "
            "Use those that fold into the weights: R1 and R2, not R3 or R4."
        )
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    state = {name: tensor.detach().float().clone() for name, tensor in state.items()}
    plain = type(model).from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)
    plain.generation_config = model.generation_config
    return plain.eval()
