"""The log-prob mismatch between engine and learner, measured on a few prompts with a local model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from trl.trainer.utils import create_model_from_path

from ...config import QaRLConfig
from ...cpu_exact.arithmetic import choose_arithmetic
from ...export import save_low_bit
from ...processes import in_fresh_process
from ...quant import apply_quantization, remove_quantization
from ...quant.layers.experts import num_experts
from ...quant.scheme import support_of
from ...quant.start import load_frozen_base
from ...rollout.engine_gemm import gemm_choice
from ...rollout.engine_settings import changed_config
from ...validate.model import config_of, loading_arguments
from ..evaluate.sample import generate, start_engine
from . import OK, SKIPPED, CheckResult
from .judge import Mismatch, advise_on_qarl, judge_mismatch, status_of
from .room import free_share, off_the_gpu, why_no_room


TOKENS = 64  # sampled after each prompt
LIMIT_S = 1800  # for an engine's process, from start to end
SEED = 0

# Token ids of a prompt and of its answer, and the engine's log-probs of the answer.
Sample = tuple[list[int], list[int], list[float]]


def probe_mismatch(folder: str | None, args: QaRLConfig, dataset: Dataset) -> Iterator[CheckResult]:
    """
    Measure and judge the mismatch, or give the reason why it is not measured.

    Args:
        folder: The model's folder, `None` if it is not on this machine.
        args: The settings of the run.
        dataset: The prompts to sample after; all are used.
    """
    reason = _why_not_measured(folder, args, dataset)
    if folder is None or reason is not None:
        yield CheckResult(SKIPPED, "mismatch", f"{reason}: not measured")
        return

    # GiB of key-value cache of a CPU engine: by itself vLLM takes a share of all memory, however much is in use.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    tokenizer = _load_tokenizer(folder, args)
    prompts = _prompt_ids(tokenizer, dataset["prompt"], args.chat_template_kwargs)
    mismatch = measure(folder, args, prompts)

    floor = f"{mismatch.floor:.2e} nats per token"
    yield CheckResult(OK, "kernel floor", f"{floor}, bf16 engine against bf16 learner")
    if args.quantized or args.has_low_bit_cache:
        cache = f" with a {args.kv_cache_dtype} cache" if args.has_low_bit_cache else ""
        engine = f"{args.quant_name} engine{cache}"
        # A warning is about the learner of this run, and the bf16 one is that only without `quantize_learner`.
        status = OK if args.quantize_learner else status_of(mismatch.rollout_only)
        yield CheckResult(status, "quantized rollout", f"{mismatch.rollout_only:.2e}, {engine}, bf16 learner")
        name = "QaRL" if args.quantize_learner else "this run"
        status = status_of(mismatch.learner)
        yield CheckResult(status, name, f"{mismatch.learner:.2e}, {engine}, learner of this run")

    yield judge_mismatch(mismatch, args)
    if args.quantized or args.has_low_bit_cache:
        yield advise_on_qarl(mismatch.rollout_only, args.quantize_learner, _has_four_bits(args))


def _why_not_measured(folder: str | None, args: QaRLConfig, dataset: Dataset) -> str | None:
    """Why the mismatch of a run cannot be measured here; `None` if it can."""
    if folder is None:
        return "no local model"

    config = AutoConfig.from_pretrained(folder, **loading_arguments(args))
    if getattr(config, "quantization_config", None) is not None:
        return "the model is quantized already"
    if num_experts(config) > 0:
        return "a mixture of experts"
    if not hasattr(args, "use_vllm"):
        return "nothing is sampled"
    if not args.use_vllm:
        return "use_vllm: false, so the learner samples itself"
    if len(dataset) == 0:
        return "no prompts"
    return why_no_room(folder, args)


def _load_tokenizer(folder: str, args: QaRLConfig) -> Any:
    """The tokenizer of a run."""
    trust_remote_code = loading_arguments(args)["trust_remote_code"]
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def _prompt_ids(
    tokenizer: Any, prompts: Sequence[Any], chat_template_kwargs: dict[str, Any] | None
) -> list[list[int]]:
    """The token ids of prompts, which are all texts or all lists of chat messages."""
    if isinstance(prompts[0], str):
        return [tokenizer(prompt)["input_ids"] for prompt in prompts]

    settings = {"add_generation_prompt": True, "return_dict": False} | (chat_template_kwargs or {})
    return [tokenizer.apply_chat_template(prompt, **settings) for prompt in prompts]


def measure(folder: str, args: QaRLConfig, prompts: Sequence[list[int]]) -> Mismatch:
    """
    Measure the mismatch of a run with its model and these prompts.

    Each engine samples in a process of its own, which gives back all of its memory when it ends.

    Args:
        folder: The model's folder, with high-precision weights.
        args: The settings of the run.
        prompts: Token ids of each prompt.

    Raises:
        RuntimeError, TimeoutError: if an engine fails, or takes longer than `LIMIT_S`.
    """
    choose_arithmetic()

    samples = _sample_in_bf16(folder, args, prompts)
    model = load_policy(folder, args)
    floor = logp_diff(model, samples, args.temperature)

    # Without scheme and cache the numbers below are those of bf16 alone.
    if args.quantized:
        samples = _sample_in_low_bits(model, folder, args, prompts)
    elif args.has_low_bit_cache:
        samples = _sample_with_low_bit_cache(model, folder, args, prompts)
    rollout_only = logp_diff(model, samples, args.temperature)

    if args.frozen:
        # First, because the two need not fit beside each other.
        del model
        learner = load_frozen_learner(folder, args)
    else:
        learner = quantize_learner(model, args)
    # In the precision of the run: without bf16 its learner does not round to it.
    of_run = logp_diff(learner, samples, args.temperature, bf16=args.bf16)

    return Mismatch(floor, rollout_only, of_run, _is_weight_only(args))


# Learners ------------------------------------------------------------------------------------------------------------


def load_policy(folder: str, args: QaRLConfig) -> PreTrainedModel:
    """
    The model of a run before it is quantized, loaded as TRL loads it. Under autocast it is the bf16 learner.

    Args:
        folder: The model's folder, with high-precision weights.
        args: The settings of the run.
    """
    model = create_model_from_path(folder, **_loading_arguments(args))
    return model.eval().to(args.device)


def quantize_learner(model: PreTrainedModel, args: QaRLConfig) -> PreTrainedModel:
    """
    The learner of a run with master weights.

    An adapter changes nothing yet: its B starts at zero, so `W + s B A` is W.

    Args:
        model: From [`load_policy`]; modified in place.
        args: The settings of the run.
    """
    from ...trainers.policy import prepare_policy

    prepare_policy(model, args, args.quant_plan())
    return model


def load_frozen_learner(folder: str, args: QaRLConfig) -> PreTrainedModel:
    """
    The learner of a run with `lora_base: frozen`, whose layers are quantized while they load.

    It has no adapter: B starts at zero, so at the start of the run `s B (A x)` is zero.

    Args:
        folder: The model's folder, with high-precision weights.
        args: The settings of the run.
    """
    plan = args.quant_plan()
    gemm = gemm_choice(args.learner_kernel, args.quant_keep_matrices)
    model = load_frozen_base(folder, plan, gemm=gemm, **_loading_arguments(args))
    return quantize_learner(model.eval().to(args.device), args)


def _loading_arguments(args: QaRLConfig) -> dict[str, Any]:
    """The arguments by which the model of a run loads, onto the CPU."""
    return loading_arguments(args) | {"device_map": None}


def _is_weight_only(args: QaRLConfig) -> bool:
    """Whether neither scheme nor cache quantizes activations."""
    plan = args.quant_plan()
    groups = [] if plan is None else plan.config_groups.values()
    activations_in_bf16 = all(support_of(scheme).activations == "none" for scheme in groups)
    return activations_in_bf16 and not args.has_low_bit_cache


def _has_four_bits(args: QaRLConfig) -> bool:
    """Whether some layers have 4-bit weights."""
    plan = args.quant_plan()
    groups = [] if plan is None else plan.config_groups.values()
    return any(scheme.weights is not None and scheme.weights.num_bits == 4 for scheme in groups)


# Engines -------------------------------------------------------------------------------------------------------------


def _sample_in_bf16(folder: str, args: QaRLConfig, prompts: Sequence[list[int]]) -> list[Sample]:
    """What an engine in bf16 samples, with its cache in bf16 too."""
    settings = _engine_settings(folder, args, prompts) | {"kv_cache_dtype": "auto"}
    request = (folder, settings, prompts, args.temperature)
    return in_fresh_process("the bf16 engine", sample, *request, limit_s=LIMIT_S)


def _sample_in_low_bits(
    model: PreTrainedModel, folder: str, args: QaRLConfig, prompts: Sequence[list[int]]
) -> list[Sample]:
    """What the run's engine samples from the low-bit weights of `model`, which is the same model afterwards."""
    plan: Any = args.quant_plan()
    tokenizer = _load_tokenizer(folder, args)

    with tempfile.TemporaryDirectory() as low_bit:
        save_low_bit(apply_quantization(model, plan), tokenizer, low_bit)
        # The same model is the bf16 learner of the next measurement.
        remove_quantization(model)
        with off_the_gpu(model, args.device):
            request = (low_bit, _engine_settings(folder, args, prompts), prompts, args.temperature)
            return in_fresh_process("the low-bit engine", sample, *request, limit_s=LIMIT_S)


def _sample_with_low_bit_cache(
    model: PreTrainedModel, folder: str, args: QaRLConfig, prompts: Sequence[list[int]]
) -> list[Sample]:
    """What the run's engine samples: bf16 weights, and a cache in 8-bit floats. `model` makes room for it."""
    with off_the_gpu(model, args.device):
        request = (folder, _engine_settings(folder, args, prompts), prompts, args.temperature)
        return in_fresh_process("the engine with an FP8 cache", sample, *request, limit_s=LIMIT_S)


def _engine_settings(folder: str, args: QaRLConfig, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """
    The arguments of `vllm.LLM`, beside the model: the run's own without the size of its cache, and room for the
    longest prompt and its answer.

    Call it when the engine is to start: its share of a GPU is what is free by then.
    """
    longest_prompt = max(map(len, prompts))
    trust_remote_code = loading_arguments(args)["trust_remote_code"]
    settings: dict[str, Any] = {
        "max_model_len": longest_prompt + TOKENS,
        "seed": SEED,
        # After the temperature, as TRL asks for, and as the learner computes them.
        "logprobs_mode": "processed_logprobs",
        "trust_remote_code": trust_remote_code,
        # What `model_init_kwargs` changes in the model, another rotary embedding for instance.
        "hf_overrides": changed_config(config_of(folder, args), trust_remote_code),
    }
    if args.device.type == "cuda":
        settings["gpu_memory_utilization"] = free_share(args.device)
        settings["tensor_parallel_size"] = args.vllm_tensor_parallel_size

    of_run = dict(args.engine_kwargs)
    # The cache of the run is for its rollout batches: a few answers need less, and it may not fit beside weights in
    # bfloat16, nor on this machine.
    of_run.pop("kv_cache_memory_bytes", None)
    return settings | of_run


def sample(folder: str, settings: dict[str, Any], prompts: Sequence[list[int]], temperature: float) -> list[Sample]:
    """
    Sample an answer to each prompt from a new engine. Call it in a separate process.

    It keeps the log-probs of the sampled tokens, as a run does; the sync check asks for those of a prompt
    (`rollout/sync_check/engine_logps.py`).

    Args:
        folder: The model's folder.
        settings: Arguments of `vllm.LLM`.
        prompts: Token ids of each prompt.
        temperature: The temperature to sample with.
    """
    engine = start_engine(folder, **settings)
    # After the engine, because `start_engine` sets variables that vLLM may read when it is imported.
    from vllm import SamplingParams

    # logprobs=0: those of the sampled tokens alone.
    params = SamplingParams(temperature=temperature, max_tokens=TOKENS, logprobs=0)
    outputs = generate(engine, prompts, params, SEED)

    samples = []
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        steps = zip(answer.logprobs, answer.token_ids, strict=True)
        logps = [step[token].logprob for step, token in steps]
        samples.append((list(prompt), list(answer.token_ids), logps))
    return samples


@torch.no_grad()
def logp_diff(model: PreTrainedModel, samples: Sequence[Sample], temperature: float, bf16: bool = True) -> float:
    """
    Mean absolute difference between the engine's log-probs and those of a model, nats per token.

    Args:
        model: The learner, in evaluation mode.
        samples: What the engine sampled.
        temperature: The temperature that the engine sampled with.
        bf16: Run the model under bfloat16 autocast.
    """
    differences = []
    for prompt, answer, engine_logps in samples:
        ids = torch.tensor([prompt + answer], device=model.device)  # (1, T)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            logits = model(input_ids=ids).logits[:, :-1].float()

        logps = (logits / temperature).log_softmax(-1)
        logps = logps.gather(-1, ids[:, 1:, None]).squeeze(-1)  # (1, T - 1)
        # The first token has no log-prob, so the answer's begin one place earlier than its tokens.
        answer_logps = logps[0, len(prompt) - 1 :].cpu()
        differences.append(answer_logps - torch.tensor(engine_logps))
    return torch.cat(differences).abs().mean().item()
