"""
Where the log-prob mismatch between engine and learner comes from, measured on a few prompts with a local model.

All numbers are mean absolute differences of log-probs of sampled tokens, in nats per token, at the temperature of the run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ...config import QaRLConfig
from ...export import save_low_bit
from ...processes import in_fresh_process
from ...quant import apply_quantization, quantized_modules, remove_quantization
from ...quant.gemm import dequantize
from ...rollout.cpu import choose_arithmetic
from ...rollout.cpu_ops import use_engine_ops
from ...rollout.gemm import GEMMS
from ..evaluate.sample import prompt_seed, start_engine
from .findings import FAIL, OK, WARN, Finding


LIMIT_S = 1800  # of an engine's process: start, prompts, end
SEED = 0


@dataclass(frozen=True)
class Sample:
    """Token ids of a prompt and of its answer, and the engine's log-probs of the answer."""

    prompt: list[int]
    answer: list[int]
    logps: list[float]


@dataclass(frozen=True)
class Mismatch:
    """Nats per token; `NaN` where a run has no such part."""

    tokens: int  # that the low-bit engine sampled (without a scheme: the bf16 engine)
    floor: float  # bf16 engine and bf16 learner
    weights: float = torch.nan  # Q(W) and W, in one float32 model
    activations: float = torch.nan  # low-bit forward and Q(W), in one float32 model
    rollout_only: float = torch.nan  # low-bit engine and bf16 learner
    aligned: float = torch.nan  # low-bit engine and low-bit learner


def measure(folder: str, args: QaRLConfig, prompts: Sequence[list[int]], tokens: int) -> Mismatch:
    """Measure with the model in `folder` and `prompts` as token ids, up to `tokens` sampled after each; see [`Mismatch`]."""
    choose_arithmetic()
    settings = engine_settings(args, max(map(len, prompts)) + tokens)
    engine = (settings, prompts, tokens, args.temperature)
    samples = in_fresh_process("the bf16 engine", sample, folder, *engine, limit_s=LIMIT_S)
    model = _load(folder)
    with tempfile.TemporaryDirectory() as low_bit:
        if args.quantized:
            apply_quantization(model, args.quant_plan())
            save_low_bit(model, AutoTokenizer.from_pretrained(folder), low_bit)
            remove_quantization(model)
        model.to(args.device)
        with torch.autocast(args.device.type, torch.bfloat16):
            floor = _logp_diff(_engine(samples), _learner(model, samples, args.temperature, "bf16 floor"))
        if not args.quantized:
            return Mismatch(len(_engine(samples)), floor)
        samples = in_fresh_process("the low-bit engine", sample, low_bit, *engine, limit_s=LIMIT_S)
    weights, activations, rollout_only = _parts(model, samples, args)
    del model
    aligned = _logp_diff(_engine(samples), _aligned(_load(folder).to(args.device), samples, args))
    return Mismatch(len(_engine(samples)), floor, weights, activations, rollout_only, aligned)


def engine_settings(args: QaRLConfig, longest: int) -> dict[str, Any]:
    """Of `vllm.LLM`, as in training as far as log-probs depend on it."""
    settings: dict[str, Any] = {"max_model_len": longest, "seed": SEED, "logprobs_mode": "processed_logprobs"}
    if args.device.type == "cuda":
        settings["gpu_memory_utilization"] = args.vllm_gpu_memory_utilization
        settings["tensor_parallel_size"] = args.vllm_tensor_parallel_size
    return settings | (args.vllm_engine_kwargs or {})


def sample(
    folder: str, settings: dict[str, Any], prompts: Sequence[list[int]], tokens: int, temperature: float
) -> list[Sample]:
    """Answers of a fresh engine; run it in a process of its own."""
    llm = start_engine(folder, **settings)
    from vllm import SamplingParams

    # One seed for all prompts would draw the same numbers for each.
    seeds = [prompt_seed(ids, SEED) for ids in prompts]
    params = [SamplingParams(temperature=temperature, max_tokens=tokens, logprobs=0, seed=seed) for seed in seeds]
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params)
    rows = [(list(ids), output.outputs[0]) for ids, output in zip(prompts, outputs, strict=True)]
    return [
        Sample(ids, list(a.token_ids), [s[t].logprob for s, t in zip(a.logprobs, a.token_ids, strict=True)])
        for ids, a in rows
    ]


def _load(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _parts(model: PreTrainedModel, samples: list[Sample], args: QaRLConfig) -> tuple[float, float, float]:
    """Weight quantization, activation quantization and the mismatch of a rollout in low bits alone; `model` is used up."""
    temperature = args.temperature
    with torch.autocast(args.device.type, torch.bfloat16):
        rollout_only = _logp_diff(_engine(samples), _learner(model, samples, temperature, "bf16 learner"))
    plain = _learner(model, samples, temperature, "float32 learner")
    apply_quantization(model, args.quant_plan())
    low_bit = _learner(model, samples, temperature, "its low-bit forward")
    rounded = {module: dequantize(module.low_bit()) for _, module in quantized_modules(model)}
    remove_quantization(model)
    with torch.no_grad():
        for module, weight in rounded.items():
            module.weight.copy_(weight)
    weights_only = _learner(model, samples, temperature, "its rounded weights")
    return _logp_diff(weights_only, plain), _logp_diff(low_bit, weights_only), rollout_only


def _aligned(model: PreTrainedModel, samples: list[Sample], args: QaRLConfig) -> Tensor:
    """Log-probs of the learner as the trainer makes it."""
    apply_quantization(model, args.quant_plan(), gemm=GEMMS[args.learner_kernel])
    if args.engine_ops_for(model.config):
        use_engine_ops(model)
    with torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16):
        return _learner(model, samples, args.temperature, "low-bit learner")


def _engine(samples: list[Sample]) -> Tensor:
    return torch.tensor([logp for row in samples for logp in row.logps])


def _learner(model: PreTrainedModel, samples: list[Sample], temperature: float, what: str) -> Tensor:
    """Log-probs of all sampled tokens in one row, float32."""
    rows = []
    for row in tqdm(samples, what, unit="prompt"):
        logps = log_probs(model, torch.tensor([row.prompt + row.answer]), temperature)
        rows.append(logps[0, len(row.prompt) - 1 :].cpu())
    return torch.cat(rows)


@torch.no_grad()
def log_probs(model: PreTrainedModel, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-prob of each token of `ids` `(1, T)` after the first, `(1, T - 1)` in float32."""
    logits = model(input_ids=ids.to(model.device)).logits[:, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None].to(logits.device)).squeeze(-1)


def _logp_diff(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().mean().item()


def describe(found: Mismatch, args: QaRLConfig) -> list[Finding]:
    """The parts and what follows from them."""
    rows = [("kernel floor", found.floor, "bf16 engine against bf16 learner")]
    if args.quantized:
        rows += [
            ("weights", found.weights, "rounded weights against the master weights, float32"),
            ("activations", found.activations, "what rounding the layers' inputs adds, float32"),
            (
                "quantized rollout",
                found.rollout_only,
                f"{args.quant_name} engine, bf16 learner (quantize_learner: false)",
            ),
            ("QaRL", found.aligned, f"{args.quant_name} engine, {args.quant_name} learner"),
        ]
    lines = [Finding(OK, name, f"{value:.2e}, {text}") for name, value, text in rows]
    return [*lines, verdict(found, args)]


def verdict(found: Mismatch, args: QaRLConfig) -> Finding:
    """What to make of the numbers. A mismatch of the learner that is no floor of kernels is a failure or, if expected, a warning."""
    b, times = found, lambda logp_diff: f"{logp_diff / max(found.floor, 1e-9):.1f} times the floor"
    if not args.quantized:
        return Finding(OK, "verdict", f"no scheme: the mismatch to expect is the floor, {b.floor:.1e}")
    limit = f"mismatch_abort_threshold: {3 * max(b.aligned, 1e-6):.1g} is three times the mismatch"
    if not args.quantize_learner:
        text = f"quantize_learner: false leaves {times(b.rollout_only)}. With true it would be {b.aligned:.1e}"
        return Finding(WARN, "verdict", text)
    if b.aligned <= 1.5 * b.floor:
        return Finding(OK, "verdict", f"engine and learner agree as far as kernels let them. {limit}")
    if b.aligned > 0.5 * b.rollout_only and b.rollout_only > 2 * b.floor and not b.activations > b.weights / 10:
        text = "the low-bit learner is hardly nearer to the engine than a bf16 one: it does not compute what the engine does. "
        return Finding(FAIL, "verdict", text + "Compare versions above; report model and scheme")
    text = f"{times(b.aligned)}. With quantized activations that is expected where engine and learner round at "
    text += f"different places (docs/numerics.md); a weight-only scheme (W4A16) reaches the floor. {limit}"
    return Finding(WARN, "verdict", text)
