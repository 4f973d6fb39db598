"""The log-prob mismatch between engine and learner, measured on a few prompts with a local model."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ...config import QaRLConfig
from ...export import save_low_bit
from ...processes import in_fresh_process
from ...quant import apply_quantization, remove_quantization
from ...quant.scheme import support_of
from ...rollout.cpu import choose_arithmetic
from ...rollout.cpu_ops import use_engine_ops
from ...rollout.gemm import GEMMS
from ..evaluate.sample import prompt_seed, start_engine
from . import FAIL, OK, WARN, Finding


LIMIT_S = 1800  # of an engine's process: start, prompts, end
SEED = 0


class Sample(NamedTuple):
    """Token ids of a prompt and of its answer, and the engine's log-probs of the answer."""

    prompt: list[int]
    answer: list[int]
    logps: list[float]


class Mismatch(NamedTuple):
    """Mean absolute differences of log-probs of sampled tokens, nats per token; `NaN` where a run has no such part."""

    floor: float  # bf16 engine and bf16 learner
    rollout_only: float = torch.nan  # low-bit engine and bf16 learner
    aligned: float = torch.nan  # low-bit engine and low-bit learner
    weight_only: bool = True  # the scheme leaves activations alone


def measure(folder: str, args: QaRLConfig, prompts: Sequence[list[int]], tokens: int) -> Mismatch:
    """Measure with the model in `folder` and `prompts` as token ids, up to `tokens` sampled after each; see [`Mismatch`]."""
    choose_arithmetic()
    engine = (engine_settings(args, max(map(len, prompts)) + tokens), prompts, tokens, args.temperature)
    samples = in_fresh_process("the bf16 engine", sample, folder, *engine, limit_s=LIMIT_S)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(args.device)
    floor = logp_diff(model, samples, args.temperature)
    if not args.quantized:
        return Mismatch(floor)
    plan = args.quant_plan()
    with tempfile.TemporaryDirectory() as low_bit:
        save_low_bit(apply_quantization(model, plan), AutoTokenizer.from_pretrained(folder), low_bit)
        remove_quantization(model)
        samples = in_fresh_process("the low-bit engine", sample, low_bit, *engine, limit_s=LIMIT_S)
    rollout_only, aligned = logp_diff(model, samples, args.temperature), _aligned(model, samples, args)
    weight_only = all(support_of(scheme).activations == "none" for scheme in plan.config_groups.values())
    return Mismatch(floor, rollout_only, aligned, weight_only)


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
    answers = [output.outputs[0] for output in outputs]
    return [
        Sample(list(ids), list(a.token_ids), [s[t].logprob for s, t in zip(a.logprobs, a.token_ids, strict=True)])
        for ids, a in zip(prompts, answers, strict=True)
    ]


def _aligned(model: PreTrainedModel, samples: list[Sample], args: QaRLConfig) -> float:
    """The mismatch of the learner as the trainer makes it; `model` is used up."""
    apply_quantization(model, args.quant_plan(), gemm=GEMMS[args.learner_kernel])
    if args.engine_ops_for(model.config):
        use_engine_ops(model)
    return logp_diff(model, samples, args.temperature, bf16=args.bf16)


@torch.no_grad()
def logp_diff(model: PreTrainedModel, samples: list[Sample], temperature: float, bf16: bool = True) -> float:
    """Mean absolute difference between the engine's log-probs and those of `model`, by default in bfloat16."""
    differences = []
    for row in samples:
        ids = torch.tensor([row.prompt + row.answer], device=model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            logits = model(input_ids=ids).logits[:, :-1].float()
        logps = (logits / temperature).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        differences.append(logps[0, len(row.prompt) - 1 :].cpu() - torch.tensor(row.logps))
    return torch.cat(differences).abs().mean().item()


def describe(found: Mismatch, args: QaRLConfig) -> list[Finding]:
    """The parts and what follows from them."""
    rows = [("kernel floor", found.floor, "bf16 engine against bf16 learner")]
    if args.quantized:
        name = args.quant_name
        rows += [
            ("quantized rollout", found.rollout_only, f"{name} engine, bf16 learner (quantize_learner: false)"),
            ("QaRL", found.aligned, f"{name} engine, {name} learner"),
        ]
    return [*(Finding(OK, name, f"{value:.2e}, {text}") for name, value, text in rows), verdict(found, args)]


def verdict(found: Mismatch, args: QaRLConfig) -> Finding:
    """What to make of the numbers. A mismatch of the learner that is no floor of kernels is a failure or, if expected, a warning."""
    floor, rollout_only, aligned, weight_only = found
    if not args.quantized:
        return Finding(OK, "verdict", f"no scheme: the mismatch to expect is the floor, {floor:.1e}")
    times = f"{(aligned if args.quantize_learner else rollout_only) / max(floor, 1e-9):.1f} times the floor"
    limit = f"mismatch_abort_threshold: {3 * max(aligned, 1e-6):.1g} is three times the mismatch"
    if not args.quantize_learner:
        return Finding(WARN, "verdict", f"quantize_learner: false leaves {times}. With true it would be {aligned:.1e}")
    if aligned <= 1.5 * floor:
        return Finding(OK, "verdict", f"engine and learner agree as far as kernels let them. {limit}")
    if weight_only and aligned > 0.5 * rollout_only and rollout_only > 2 * floor:
        text = "the low-bit learner is hardly nearer to the engine than a bf16 one: it does not compute what the engine does. "
        return Finding(FAIL, "verdict", text + "Compare versions above; report model and scheme")
    text = f"{times}. With quantized activations that is expected where engine and learner round at different places "
    return Finding(
        WARN, "verdict", f"{text}(docs/numerics.md); a weight-only scheme (W4A16) reaches the floor. {limit}"
    )
