"""The log-prob mismatch between engine and learner, measured on a few prompts with a local model."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ...config import QaRLConfig
from ...cpu_exact.arithmetic import choose_arithmetic
from ...export import save_low_bit
from ...processes import in_fresh_process
from ...quant import apply_quantization, remove_quantization
from ...quant.experts import num_experts
from ...quant.scheme import support_of
from ..evaluate.sample import generate, start_engine
from . import FAIL, OK, SKIPPED, WARN, Finding


TOKENS = 64  # sampled after each prompt
LIMIT_S = 1800  # for an engine's process, from start to end
SEED = 0


class Mismatch(NamedTuple):
    """Mean absolute differences of log-probs of sampled tokens, nats per token. Without a scheme all engines and learners are bf16."""

    floor: float  # bf16 engine and bf16 learner
    rollout_only: float  # low-bit engine and bf16 learner
    learner: float  # low-bit engine and the learner of the run
    weight_only: bool = True  # the scheme leaves activations alone


def check_mismatch(folder: str | None, args: QaRLConfig, dataset: Dataset) -> Iterator[Finding]:
    """Measure the mismatch with all prompts of `dataset`, or give the reason why not."""
    trust = {"trust_remote_code": args.trust_remote_code}
    config = folder and AutoConfig.from_pretrained(folder, **trust)
    reasons = {
        "no local model": config is None,
        "the model is quantized already": getattr(config, "quantization_config", None) is not None,
        "a mixture of experts": config is not None and num_experts(config) > 0,
        "use_vllm: false, so the learner samples itself": not args.use_vllm,
        "no prompts": not len(dataset),
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), None):
        yield Finding(SKIPPED, "mismatch", f"{reason}: not measured")
        return
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
    chat = {"add_generation_prompt": True, "return_dict": False} | (args.chat_template_kwargs or {})
    text = isinstance(dataset[0]["prompt"], str)
    ids = [tokenizer(p)["input_ids"] if text else tokenizer.apply_chat_template(p, **chat) for p in dataset["prompt"]]
    found = measure(str(folder), args, ids)
    yield Finding(OK, "kernel floor", f"{found.floor:.2e} nats per token, bf16 engine against bf16 learner")
    if args.quantized:
        yield Finding(OK, "quantized rollout", f"{found.rollout_only:.2e}, {args.quant_name} engine, bf16 learner")
        yield Finding(OK, "QaRL", f"{found.learner:.2e}, {args.quant_name} engine, learner of this run")
    yield verdict(found, args)
    if args.quantized:
        yield rule(found.rollout_only)


def measure(folder: str, args: QaRLConfig, prompts: Sequence[list[int]]) -> Mismatch:
    """Measure the mismatch with the model in `folder` and `prompts` of token ids."""
    from ...trainer import prepare

    choose_arithmetic()
    settings: dict[str, Any] = {"max_model_len": max(map(len, prompts)) + TOKENS, "seed": SEED}
    settings["logprobs_mode"] = "processed_logprobs"
    if args.device.type == "cuda":
        settings["gpu_memory_utilization"] = args.vllm_gpu_memory_utilization
        settings["tensor_parallel_size"] = args.vllm_tensor_parallel_size
    engine = (settings | args.engine_kwargs, prompts, args.temperature)
    samples = in_fresh_process("the bf16 engine", sample, folder, *engine, limit_s=LIMIT_S)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(args.device)
    floor, schemes = logp_diff(model, samples, args.temperature), []
    if args.quantized:
        plan: Any = args.quant_plan()
        schemes = [support_of(scheme) for scheme in plan.config_groups.values()]
        with tempfile.TemporaryDirectory() as low_bit:
            save_low_bit(apply_quantization(model, plan), AutoTokenizer.from_pretrained(folder), low_bit)
            remove_quantization(model)
            samples = in_fresh_process("the low-bit engine", sample, low_bit, *engine, limit_s=LIMIT_S)
    rollout_only = logp_diff(model, samples, args.temperature)
    prepare(model, args, None)
    learner = logp_diff(model, samples, args.temperature, bf16=args.bf16)
    return Mismatch(floor, rollout_only, learner, all(scheme.activations == "none" for scheme in schemes))


# Token ids of a prompt and of its answer, and the engine's log-probs of the answer.
Sample = tuple[list[int], list[int], list[float]]


def sample(folder: str, settings: dict[str, Any], prompts: Sequence[list[int]], temperature: float) -> list[Sample]:
    """Sample answers from a new engine; call it in a separate process."""
    llm = start_engine(folder, **settings)
    from vllm import SamplingParams

    params = SamplingParams(temperature=temperature, max_tokens=TOKENS, logprobs=0)
    answers = [output.outputs[0] for output in generate(llm, prompts, params, SEED)]
    return [
        (list(ids), list(a.token_ids), [s[t].logprob for s, t in zip(a.logprobs, a.token_ids, strict=True)])
        for ids, a in zip(prompts, answers, strict=True)
    ]


@torch.no_grad()
def logp_diff(model: PreTrainedModel, samples: list[Sample], temperature: float, bf16: bool = True) -> float:
    """Mean absolute difference between the engine's log-probs and those of `model`, by default in bfloat16."""
    differences = []
    for prompt, answer, expected in samples:
        ids = torch.tensor([prompt + answer], device=model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            logits = model(input_ids=ids).logits[:, :-1].float()
        logps = (logits / temperature).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        differences.append(logps[0, len(prompt) - 1 :].cpu() - torch.tensor(expected))
    return torch.cat(differences).abs().mean().item()


def verdict(found: Mismatch, args: QaRLConfig) -> Finding:
    """Judge the numbers: a learner's mismatch above the kernel floor is a failure, or a warning if the scheme explains it."""
    if found.learner <= 1.5 * found.floor:
        return Finding(OK, "verdict", "engine and learner agree as far as kernels let them")
    times = f"{found.learner / max(found.floor, 1e-9):.1f} times the floor"
    if not args.quantize_learner:
        return Finding(WARN, "verdict", f"quantize_learner: false leaves {times}")
    if found.weight_only and found.learner > 0.5 * found.rollout_only and found.rollout_only > 2 * found.floor:
        text = "the low-bit learner is hardly nearer to the engine than a bf16 one: it does not compute what the engine does. "
        return Finding(FAIL, "verdict", text + "Compare versions above; report model and scheme")
    text = f"{times}. With quantized activations this is expected if engine and learner round at different places "
    return Finding(WARN, "verdict", text + "(docs/numerics.md); a weight-only scheme (W4A16) reaches the floor")


def rule(mismatch: float) -> Finding:
    """The advice of docs/do_i_need_qarl.md for this mismatch between a low-bit engine and a bf16 learner."""
    rows = json.loads(Path(__file__).with_name("rule.json").read_text())
    advice = [row["advice"] for row in rows if mismatch >= row["from"]][-1]
    return Finding(OK, "do I need QaRL?", f"at {mismatch:.2g} nats per token: {advice} (docs/do_i_need_qarl.md)")
