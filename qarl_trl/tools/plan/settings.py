"""From the settings of a run to the numbers of the formulas. Refuses what cannot run on so many GPUs."""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig
from transformers import PretrainedConfig

from ...quant.layers.experts import num_experts
from ...quant.scheme import support_of
from ...quant.source import quantized_source
from ...quant.supported import SchemeSupport
from ...rollout.scheme_support import default_engine_kwargs
from ...rollout.vllm.adapters import engine_rank
from ...trainers.teacher import check_own_start, loading_of_own_start, teaches_by_its_base
from ...validate.adapters import check_adapter
from ...validate.kv_cache import check_cache_device
from ...validate.parallel import check_parallel
from ...validate.placement import check_sharded
from ...validate.source import check_frozen, check_quantized_start
from ...validate.teacher import check_same_vocabulary
from .memory.engine import WITHOUT_CACHE
from .model import is_quantized, model_without_weights, parameters, read_config
from .run import GIB, Hardware, Run, Teacher
from .seconds.batch import Batch


# Most tokens of a prompt, assumed where nothing limits its length.
PROMPT = 512
# Mean tokens of a prompt; assumed where nobody says.
MEAN_PROMPT = 200
# The mean length of an answer as a share of the longest; assumed where nobody says.
MEAN_ANSWER = 0.5
# Adapters of this rank and below have a place in the engines of all versions of vLLM.
USUAL_RANK = 512
# vLLM's own `gpu_memory_utilization` (0.31).
SHARE_OF_SERVER = 0.92


def run_of(settings: Any, model_args: Any, hardware: Hardware) -> Run:
    """
    The numbers of a run.

    Args:
        settings: Its config: a `QaRLConfig`, or that of another trainer.
        model_args: Its `trl.ModelConfig`.
        hardware: The GPUs.

    Raises:
        ValueError: if the run cannot work, or a model is unknown.
    """
    gpus = hardware.gpus
    # Supervised fine-tuning has none of the fields of an engine.
    engine = settings.vllm_mode if settings.has_engine else ""
    engine_ranks = settings.vllm_tensor_parallel_size if engine else 1
    _check_engine_ranks(engine, engine_ranks, gpus)
    check_cache_device(settings, "cuda")
    _check_estimated(settings, model_args)

    # First, so that an unknown model is reported as one, and not by the error of what reads its files next.
    name = model_args.model_name_or_path
    config = read_config(name)
    quantization = _quantization_of(name, settings)
    kinds = getattr(config.get_text_config(), "layer_types", None) or ["full_attention"]
    if not hasattr(config.get_text_config(), "num_attention_heads") or set(kinds) <= set(WITHOUT_CACHE):
        raise ValueError(f"plan needs a model with attention, got {name} ({config.model_type}).")

    adapter = _adapter_of(model_args)
    fsdp2 = gpus > 1 and hardware.sharding != "ddp"
    _check_low_bits(settings, quantization, adapter, fsdp2)
    dtype = _dtype_of(config, settings, model_args)
    model = model_without_weights(config, dtype, adapter, quantization)
    check_parallel(model, settings)
    # The trainer refuses these too, but only at its start, on the machine with the GPUs.
    if settings.frozen and (adapter is None or num_experts(config)):
        raise ValueError("lora_base='frozen' needs use_peft: true, and a model without experts.")
    from_low_bits = is_quantized(name)
    if from_low_bits:
        check_quantized_start(name, settings)
        check_frozen(name, settings)

    ranks_that_gather = gpus if fsdp2 and _gathers_low_bits(settings) else 1
    # accelerate 1.15 (`fsdp2_prepare_model`) makes what is trained float32 before it shards a model in mixed
    # precision: the policy, and a reference model of its size. It leaves the base of an adapter as it is.
    in_float32 = fsdp2 and settings.bf16
    return Run(
        parameters=parameters(model, _optimizer_of(settings), ranks_that_gather, settings.frozen, in_float32),
        config=config.get_text_config(),
        low_bit_forward=quantization is not None and settings.quantize_learner,
        memory=int(hardware.memory * GIB),
        rows=settings.per_device_train_batch_size,
        tokens=_longest_row(settings),
        budget=getattr(settings, "max_tokens_per_pass", None),
        checkpointing=settings.gradient_checkpointing,
        compute=2 if settings.bf16 else 4,
        engine=engine,
        utilization=_share_of_engine(settings, engine),
        # A server has GPUs of its own, and stays awake.
        sleep=engine == "colocate" and settings.vllm_enable_sleep_mode,
        frozen=settings.frozen,
        decompresses=from_low_bits and decompresses_beside(settings, dtype),
        keeps_matrices=settings.quant_keep_matrices,
        engine_kernel=settings.quantize_learner and settings.quant_kernel == "engine",
        engine_ranks=engine_ranks,
        ranks=gpus,
        fsdp2=fsdp2,
        reference=_has_reference(settings, adapter),
        teacher=_teacher_of(name, config, settings, adapter, fsdp2),
        samples=_samples(settings),
        sampled_rows=_sampled_rows(settings),
        accumulation=settings.gradient_accumulation_steps,
        cache_entry=1 if settings.has_low_bit_cache else 2,
        cache_size=_cache_size(settings) if engine else None,
        eager=bool((default_engine_kwargs(model) | settings.engine_kwargs).get("enforce_eager")),
        # Without an engine nothing here asks for vLLM's kernels.
        kernels=_kernels(quantization) if engine else (),
    )


def _share_of_engine(settings: Any, engine: str) -> float:
    """The share of a GPU's memory that an engine takes."""
    if not engine:
        return 0.0
    share = settings.vllm_gpu_memory_utilization
    # TRL's default leaves room for a learner, and `qarl-trl serve` leaves it out.
    of_trl = type(settings).__dataclass_fields__["vllm_gpu_memory_utilization"].default
    return SHARE_OF_SERVER if engine == "server" and share == of_trl else share


def _check_low_bits(settings: Any, quantization: QuantizationConfig | None, adapter: Any, fsdp2: bool) -> None:
    """Refuse (`ValueError`) what the trainer refuses of low-bit layers, but only at its start, where the GPUs are."""
    if not settings.quantized:
        return
    if fsdp2:
        check_sharded(settings, quantization)
    if adapter is None:
        return

    check_adapter(adapter, settings)
    # vLLM loads in seconds, so it is asked only where its answer may be no.
    if settings.frozen and settings.has_engine and adapter.r > USUAL_RANK:
        engine_rank(adapter.r)  # raises if vLLM has none


def _kernels(quantization: QuantizationConfig | None) -> tuple[SchemeSupport, ...]:
    """The schemes of all groups of layers, each once."""
    if quantization is None:
        return ()
    return tuple(dict.fromkeys(support_of(scheme) for scheme in quantization.config_groups.values()))


def _cache_size(settings: Any) -> int | None:
    """Bytes of the engine's key-value cache on each GPU; `None`: what its share leaves."""
    size = settings.engine_kwargs.get("kv_cache_memory_bytes")
    return None if size is None else int(size)


def _longest_row(settings: Any) -> int:
    """Most tokens of a row, prompt and answer together; `ValueError` if nothing limits it."""
    # Supervised fine-tuning has rows and no answers.
    if not hasattr(settings, "max_completion_length"):
        if settings.max_length is None:
            raise ValueError("plan needs the longest row: set max_length, got null.")
        return settings.max_length

    return settings.vllm_max_model_length or _longest_answer(settings) + PROMPT


def batch_of(settings: Any, prompt_tokens: float | None, answer_tokens: float | None) -> Batch:
    """
    The rollout batch of a run.

    Args:
        settings: Its config, made for all its processes: a `QaRLConfig`, or that of RLOO.
        prompt_tokens: Mean tokens of a prompt; `None`: assumed.
        answer_tokens: Mean tokens of an answer; `None`: assumed.

    Raises:
        ValueError: if nothing limits the length of an answer.
    """
    longest = _longest_answer(settings)
    answers = settings.generation_batch_size  # of all processes
    # Micro-batches that are trained. Below, an update that needs several rollout batches counts as one of each.
    passes = settings.steps_per_generation * settings.num_iterations
    return Batch(
        answers=answers,
        prompts=max(1, answers // settings.num_generations),
        prompt_tokens=MEAN_PROMPT if prompt_tokens is None else prompt_tokens,
        answer_tokens=longest * MEAN_ANSWER if answer_tokens is None else min(longest, answer_tokens),
        longest=longest,
        micro_batches=settings.steps_per_generation,
        iterations=settings.num_iterations,
        updates=max(1, passes // settings.gradient_accumulation_steps),
        has_old=_has_old(settings, passes),
        has_reference=_has_penalty(settings),
    )


def _has_old(settings: Any, passes: int) -> bool:
    """Whether TRL computes the log-probs before the updates by a forward of its own."""
    corrects = getattr(settings, "vllm_importance_sampling_correction", None)
    if corrects is None:  # RLOO always does
        return True
    return (settings.use_vllm and corrects) or settings.gradient_accumulation_steps % passes != 0


def _samples(settings: Any) -> bool:
    """Whether a run samples answers. Supervised fine-tuning does not, nor does a distillation on given ones."""
    return hasattr(settings, "max_completion_length") and getattr(settings, "distill_on", "rollouts") == "rollouts"


def _sampled_rows(settings: Any) -> int:
    """Answers that transformers samples at once in a process: TRL asks it for a whole rollout batch."""
    if settings.has_engine or not _samples(settings):
        return 0
    # A distillation has a rollout batch for each update.
    steps = getattr(settings, "steps_per_generation", None) or settings.gradient_accumulation_steps
    return settings.per_device_train_batch_size * steps


def _check_estimated(settings: Any, model_args: Any) -> None:
    """Refuse (`ValueError`) settings that take memory which no formula here counts."""
    loading = settings.model_init_kwargs or {}
    if "eager" in (model_args.attn_implementation, loading.get("attn_implementation")):
        raise ValueError(
            "plan does not count the scores of attn_implementation: eager, which grow with the square of a pass. "
            "For the plan alone, --attn_implementation sdpa gives the least that the run takes."
        )
    # With it TRL's supervised fine-tuning computes all logits at once.
    if settings.label_smoothing_factor and not hasattr(settings, "max_completion_length"):
        raise ValueError(
            "plan does not count the logits that label_smoothing_factor needs. For the plan alone, "
            "--label_smoothing_factor 0 gives the least that the run takes."
        )


def _has_reference(settings: Any, adapter: Any) -> bool:
    """Whether there is a second model for a KL penalty; without its adapter a PeftModel is its own reference."""
    return _has_penalty(settings) and adapter is None


def _has_penalty(settings: Any) -> bool:
    """Whether there is a KL penalty. The `beta` of a distillation chooses its divergence."""
    return hasattr(settings, "num_generations") and settings.beta > 0


def _teacher_of(name: str, config: PretrainedConfig, settings: Any, adapter: Any, fsdp2: bool) -> Teacher | None:
    """
    What the student of a distillation learns from; `None` for other trainers.

    Args:
        name: The student's name.
        config: Its config.
        settings: The config of the run.
        adapter: The adapter's `peft.PeftConfig`, if any.
        fsdp2: Whether FSDP2 shards the run on the GPUs that it is meant for.
    """
    if not hasattr(settings, "teacher_model_name_or_path"):
        return None

    positions = _longest_answer(settings)
    named = settings.teacher_model_name_or_path
    loading = settings.teacher_model_init_kwargs or {}
    if named is None:
        check_own_start(name, settings)
        if settings.from_checkpoint or is_quantized(name):
            raise ValueError("teacher_model_name_or_path is missing: a quantized checkpoint has nothing to teach.")
        if teaches_by_its_base(settings, adapter, is_sharded=fsdp2):
            return Teacher("the base of the adapter", (), config.get_text_config(), positions)
        loading = loading_of_own_start(settings)

    # Also for a run's own start: the config that the student was made of has the dtype of the student.
    of_teacher = read_config(named or name, "teacher_model_name_or_path")
    check_same_vocabulary(of_teacher, config)
    # As the trainer loads it: in the dtype of the checkpoint.
    dtype = loading.get("dtype")
    if dtype in (None, "auto"):
        dtype = of_teacher.dtype or "float32"
    model = model_without_weights(of_teacher, dtype)
    return Teacher(named or "its own start", parameters(model, ""), of_teacher.get_text_config(), positions)


def _longest_answer(settings: Any) -> int:
    """Most tokens of an answer; `ValueError` if only the model's context limits it."""
    longest = settings.max_completion_length or settings.vllm_max_model_length
    if longest is None:
        raise ValueError(
            "plan needs the longest answer: set max_completion_length or vllm_max_model_length, got null for both."
        )
    return longest


def _check_engine_ranks(engine: str, ranks: int, gpus: int) -> None:
    """`ValueError` for an engine that needs other GPUs than there are; a server has its own."""
    if ranks < 1 or (engine == "colocate" and gpus % ranks):
        raise ValueError(f"vllm_tensor_parallel_size={ranks} must divide the GPUs, got --gpus {gpus}.")


def _quantization_of(name: str, settings: Any) -> QuantizationConfig | None:
    """Which layers the run quantizes, and how. One that starts from a quantized checkpoint takes it from there."""
    if not settings.from_checkpoint:
        return settings.quant_plan()

    source = quantized_source(name)
    if source is None:
        return settings.quant_plan(None)
    return settings.quant_plan(source.plan())


def _optimizer_of(settings: Any) -> str:
    """TRL's `optim`, or `"muon"`; `"sgd_momentum"` and the like if its arguments ask for momentum."""
    if getattr(settings, "optim_muon", False):
        return "muon"
    name = settings.optim.value
    # By its arguments SGD and RMSprop have a moment more.
    if "momentum" in (settings.optim_args or "") and name in ("sgd", "rmsprop"):
        return f"{name}_momentum"
    return name


def _gathers_low_bits(settings: Any) -> bool:
    """Whether FSDP2 would gather quantized values instead of weights."""
    # An engine's gemm keeps them in its own layout, whose rows cannot be gathered. FSDP2 shards no frozen base.
    return settings.quantize_learner and settings.quant_kernel != "engine" and not settings.frozen


def _dtype_of(config: PretrainedConfig, settings: Any, model_args: Any) -> torch.dtype | str:
    """The dtype of the master weights. TRL's default is float32."""
    dtype = (settings.model_init_kwargs or {}).get("dtype") or model_args.dtype or "float32"
    if dtype == "auto":
        return config.dtype or "float32"
    return dtype


def decompresses_beside(settings: Any, dtype: torch.dtype | str) -> bool:
    """
    Whether the decompressed weights of a quantized checkpoint are held beside those of the model while it loads,
    whatever scheme the run quantizes them by.

    Args:
        settings: The settings of the run.
        dtype: That in which the model loads.
    """
    # Of a frozen base nothing is decompressed, and a model in bfloat16 takes the decompressed weights.
    return not settings.frozen and "bfloat16" not in str(dtype)


def _adapter_of(model_args: Any) -> Any:
    """The `peft.PeftConfig` of the run, if it trains an adapter."""
    if not model_args.use_peft:
        return None
    from trl import get_peft_config  # loads pandas and datasets

    return get_peft_config(model_args)
