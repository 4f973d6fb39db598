"""What a config of a low-bit trainer refuses, as functions of the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from trl.import_utils import is_vllm_available

from .user_code import is_of_library


# Switches of TRL and transformers that do not work with low-bit layers, each with the reason.
UNFIT = {
    "fp16": "the engine computes in bfloat16 and the learner must too, so set bf16: true",
    "bf16_full_eval": "an evaluation outside of train() would cast the float32 master weights, for good",
    "fp16_full_eval": "an evaluation outside of train() would cast the float32 master weights, for good",
    "use_transformers_continuous_batching": "it casts the master weights to bfloat16, which loses small updates",
    "use_liger_kernel": "its kernels were not run beside low-bit layers, and those of experts replace the low-bit "
    "forward",
    "enable_jit_checkpoint": "it saves within a step, which no resume continues exactly; SIGTERM saves at the end of "
    "a step",
}
# Fields of TRL's configs (1.16) that are one of a few texts. TRL looks at them after the model has loaded, or never.
CHOICES_OF_TRL = {
    "vllm_mode": ("colocate", "server"),
    "vllm_model_impl": ("vllm", "transformers"),
    "importance_sampling_level": ("token", "sequence"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    # It makes these of True and False.
    "scale_rewards": ("group", "batch", "none"),
}
# Whole numbers above 0: a run divides by them, or trains nothing if they are 0.
POSITIVE = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "num_generations",
    "num_iterations",
    "steps_per_generation",
    "generation_batch_size",
    "max_completion_length",
    "max_tokens_per_pass",
    "vllm_tensor_parallel_size",
)
# Arguments of `vllm.LLM` that TRL sets from its own fields, or that the trainer sets so that engine and learner agree.
OWNED_ENGINE_ARGUMENTS = (
    "model",
    "load_format",
    "dtype",
    "hf_overrides",
    "quantization",
    "kv_cache_dtype",
    "logprobs_mode",
    "seed",
    "max_model_len",
    "max_num_seqs",
    "model_impl",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "enable_sleep_mode",
    "distributed_executor_backend",
    "trust_remote_code",
    # Sampling settings for all requests: the loss would not know them.
    "override_generation_config",
    # What the server loads of ours.
    "worker_extension_cls",
    "middleware",
    "additional_config",
)
# What speculates without a second model, whose weights would stay random: an engine starts without files
# (`load_format: dummy`), and a sync sends the policy alone.
DRAFTS_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
# vLLM's `_MAX_TEMP`.
COLDEST = 0.01
# Stores of keys and values outside of the engine: `reset_prefix_cache`, which a sync calls, leaves them as they are.
OUTER_CACHES = ("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend")
# What else compiles the model.
SET_BY = "torch_compile_backend, torch_compile_mode and the launcher's --dynamo_backend set it, too"
# Configs of TRL whose forward on low-bit layers TorchDynamo (torch 2.13) does not get through: RecursionError.
NOT_COMPILED = ("SFTConfig", "DPOConfig", "KTOConfig", "CPOConfig", "RewardConfig")
# Configs of TRL by which an evaluation samples groups of answers.
OF_GROUPS = ("GRPOConfig", "RLOOConfig")
# Fields of TRL's configs that name a token of the tokenizer.
TOKENS_OF_TEXT = ("eos_token", "pad_token")


def is_secret(field: str) -> bool:
    """Whether a field holds a token that gives access to something."""
    return field.endswith("_token") and field not in TOKENS_OF_TEXT


def check_order(cls: type, half: type, other: type) -> None:
    """
    Refuse (`TypeError`) a class in which methods of transformers or TRL would run in place of the low-bit half's.

    Args:
        cls: A class that is just defined.
        half: `LowBitMixin` or `LowBitConfig`.
        other: The class of transformers that the other half subclasses.
    """
    order = cls.__mro__
    for base in order[: order.index(half)]:
        # A user's class may come first, if what it subclasses comes after the low-bit half. So may ours.
        is_plain = is_of_library(base.__module__) and not base.__module__.startswith("qarl_trl.")
        if is_plain and issubclass(base, other):
            raise TypeError(
                f"{cls.__name__} must have {half.__name__} before {base.__name__}, whose methods would run in place "
                f"of its own: class {cls.__name__}({half.__name__}, {base.__name__})."
            )


def check_choices(args: Any) -> None:
    """Refuse (`ValueError`) a value that a `Literal` field, or one of `CHOICES_OF_TRL`, does not have."""
    # Nothing else checks them in a script.
    hints: dict[str, Any] = {}
    for base in type(args).__mro__:
        if base.__module__.startswith("qarl_trl."):  # a user's class may have annotations that only exist for mypy
            # The nearest class wins: a subclass may narrow a field of its base.
            hints = get_type_hints(base) | hints

    literals = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
    for name, choices in (CHOICES_OF_TRL | literals).items():
        # A user's class may give a field of TRL's more values.
        if not hasattr(args, name) or _is_declared_by_user(type(args), name):
            continue
        value = getattr(args, name)
        if value not in choices:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")


def _is_declared_by_user(cls: type, field: str) -> bool:
    """Whether a user's class declares a field of a config."""
    for base in cls.__mro__:
        if field in vars(base).get("__annotations__", {}):
            return not is_of_library(base.__module__)
    return False


def check_numbers(args: Any) -> None:
    """
    Refuse (`ValueError`) numbers with which a run divides by zero or trains nothing: before TRL divides by them.

    Args:
        args: Any config, which has some of the fields. Its values are those that the user gave.
    """
    for name in POSITIVE:
        if not hasattr(args, name):
            continue
        value = getattr(args, name)
        # TRL's type of the number of answers has a null, too, by which TRL would divide.
        may_be_null = name != "num_generations"
        if not (may_be_null and value is None) and not (isinstance(value, int) and value > 0):
            raise ValueError(f"{name} must be a whole number above 0, got {value!r}.")
    _check_sampling_ranges(args)

    if not (args.max_steps > 0 or (args.max_steps == -1 and args.num_train_epochs > 0)):
        raise ValueError(f"max_steps={args.max_steps} with num_train_epochs={args.num_train_epochs} trains nothing.")
    weights = getattr(args, "reward_weights", None)
    if weights and not any(weights):
        raise ValueError(f"reward_weights={weights} would train nothing.")
    clip = getattr(args, "reward_clip_range", None)
    if clip is not None and not (len(clip) == 2 and clip[0] < clip[1]):
        raise ValueError(f"reward_clip_range must be two numbers, the lower one first, got {clip}.")


def _check_sampling_ranges(args: Any) -> None:
    """Refuse (`ValueError`) what neither vLLM nor transformers samples with: they say so only at the first answer."""
    for name in ("temperature", "top_p", "repetition_penalty"):
        if getattr(args, name, 1.0) is None:
            raise ValueError(f"{name} must be a number, got None. Leave it out for TRL's default.")
    temperature = getattr(args, "temperature", 1.0)
    top_p = getattr(args, "top_p", 1.0)
    # Written so that a NaN is refused, too: every comparison with it is false.
    if not (temperature > 0 and 0 < top_p <= 1):
        raise ValueError(f"temperature must be above 0 and top_p in (0, 1], got {temperature} and {top_p}.")

    # 0 is "all tokens" for TRL; -1 is it for vLLM alone.
    fewest = -1 if args.has_engine else 0
    top_k = getattr(args, "top_k", None)
    if top_k is not None and top_k < fewest:
        raise ValueError(f"top_k must be 0 (all tokens) or above, got {top_k}.")
    min_p = getattr(args, "min_p", None)
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"min_p must be in [0, 1], got {min_p}.")
    repetition_penalty = getattr(args, "repetition_penalty", 1.0)
    if not repetition_penalty > 0:
        raise ValueError(f"repetition_penalty must be above 0, got {repetition_penalty}.")


def check_first_evaluation(args: Any) -> None:
    """Refuse (`ValueError`) an evaluation at the start whose batches cut groups: TRL looks at those of steps alone."""
    samples_groups = any(config.__name__ in OF_GROUPS for config in type(args).__mro__)
    if not (samples_groups and args.eval_on_start and args.eval_strategy == "no"):
        return
    answers = args.num_generations_eval or args.num_generations
    rows = args.per_device_eval_batch_size * args.world_size
    if rows % answers != 0:
        raise ValueError(
            f"per_device_eval_batch_size x processes must be a multiple of the {answers} answers to a prompt, got "
            f"{args.per_device_eval_batch_size} x {args.world_size}. Set it, or num_generations_eval."
        )


def check_fit(args: Any) -> None:
    """Refuse (`ValueError`) the switches in `UNFIT`, and a precision of the launcher's that no switch has."""
    if getattr(args, "mixed_precision", "no") == "fp8":
        raise ValueError("mixed_precision must be 'no' or 'bf16', got 'fp8' from the launcher: the scheme quantizes.")
    for name, why in UNFIT.items():
        if getattr(args, name, False):
            raise ValueError(f"{name} must be False: {why}.")


def check_compiled(args: Any) -> None:
    """Refuse (`ValueError`) to compile low-bit layers where TorchDynamo fails, which it does at the first step."""
    # A learner in bfloat16 ran: its layers remember nothing.
    if not args.compiles or not args.quantize_learner:
        return
    if any(config.__name__ in NOT_COMPILED for config in type(args).__mro__):
        raise ValueError(
            f"torch_compile must be False in low bits ({SET_BY}): TorchDynamo does not get through the forward of "
            "SFT, DPO, KTO, CPO and reward models on low-bit layers."
        )
    # It cannot trace what a layer remembers of its input. In a recomputed block it leaves the layers alone.
    if not args.gradient_checkpointing:
        raise ValueError(
            f"torch_compile in low bits needs gradient_checkpointing: true ({SET_BY}): TorchDynamo does not get "
            "through low-bit layers, and leaves those of recomputed blocks alone."
        )


def changed_fields(args: Any, names: Sequence[str] = ()) -> dict[str, Any]:
    """
    The fields of a dataclass that differ from their defaults, with their values.

    Args:
        args: An instance.
        names: Only these fields, if there are any.
    """
    changed = {}
    for field in fields(args):
        if names and field.name not in names:
            continue
        # A field without a factory has `MISSING` there, which is not callable.
        default = field.default_factory() if callable(field.default_factory) else field.default
        value = getattr(args, field.name)
        if value != default:
            changed[field.name] = value
    return changed


def check_one_source(args: Any) -> None:
    """Refuse (`ValueError`) scheme fields beside a recipe or a checkpoint, which already says what is quantized."""
    if args.quant_recipe is None and not args.from_checkpoint:
        return

    decides = "quant_scheme" if args.quant_recipe is None else "quant_recipe"
    changed = list(changed_fields(args, ("quant_scheme", "quant_group_size", "quant_ignore")))
    others = [name for name in changed if name != decides]
    if others:
        raise ValueError(f"{decides} decides which layers are quantized and how, so {others} must not be set.")


def check_engine_settings(args: Any) -> None:
    """Refuse an engine that is not installed (`ImportError`), and arguments for it that are not the user's to set."""
    if args.has_engine and not is_vllm_available():
        raise ImportError("vLLM is missing: pip install 'qarl_trl[vllm]' (CPU: make install), or use_vllm=False.")

    _check_tokens(args)
    _check_server_address(args)
    defaults = (args.vllm_engine_kwargs or {}).get("generation_config", "vllm")
    if defaults != "vllm":
        raise ValueError(
            f"vllm_engine_kwargs: generation_config must be 'vllm', got {defaults!r}: the loss would not know the "
            "penalties of such a file. Set TRL's fields, or generation_kwargs."
        )
    owned = sorted(set(args.vllm_engine_kwargs or {}) & set(OWNED_ENGINE_ARGUMENTS))
    if owned:
        raise ValueError(f"vllm_engine_kwargs sets {owned}, which the trainer sets from its own fields. Remove them.")
    outer = [name for name in OUTER_CACHES if (args.vllm_engine_kwargs or {}).get(name) is not None]
    if outer:
        raise ValueError(
            f"vllm_engine_kwargs sets {outer}: keys and values would outlive the weights that made them, since a sync "
            "empties the engine's own cache alone. Remove them."
        )
    # Below it vLLM samples at this temperature, and only a line of its own says so.
    temperature = getattr(args, "temperature", 1.0)
    if args.has_engine and temperature < COLDEST:
        raise ValueError(f"temperature must be at least {COLDEST} with vLLM, got {temperature}.")
    _check_cache_size(args)
    _check_ranks(args)
    _check_drafts(args)


def _check_cache_size(args: Any) -> None:
    """Refuse (`ValueError`) a size of the engine's cache with a unit: vLLM says so after the model has loaded."""
    size = (args.vllm_engine_kwargs or {}).get("kv_cache_memory_bytes")
    if size is None:
        return
    # vLLM also takes a float without a fraction.
    if not (isinstance(size, int | float) and size > 0 and size % 1 == 0):
        raise ValueError(
            f"vllm_engine_kwargs: kv_cache_memory_bytes must be a number of bytes above 0, got {size!r}. 8 GiB are "
            f"{8 * 2**30}."
        )


def _check_server_address(args: Any) -> None:
    """Refuse (`ValueError`) a malformed server address, or one that the two ends would parse differently."""
    if not args.has_engine or args.vllm_mode != "server":
        return

    url = args.vllm_server_base_url
    if url:
        if not _is_address(url):
            raise ValueError(f"vllm_server_base_url must be http://HOST:PORT, or with https, got {url!r}.")
        return

    host = args.vllm_server_host
    port = args.vllm_server_port
    url = f"http://{host}:{port}"
    # A host with a port, a protocol or a path of its own would be parsed differently.
    if not _is_address(url) or urlsplit(url).hostname != host.strip("[]").lower() or urlsplit(url).port != port:
        raise ValueError(
            "vllm_server_host must be a name or an address, in brackets if it has colons, and vllm_server_port "
            f"between 1 and 65535, got {host!r} and {port}."
        )


def _is_address(url: str) -> bool:
    """Whether a URL names a host, and a port only if it is a number of one."""
    try:
        parts = urlsplit(url)
        # `port` raises if it is no such number.
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _check_tokens(args: Any) -> None:
    """Refuse (`ValueError`) a token among the arguments that a field passes on: they are in logs and checkpoints."""
    for field in fields(args):
        values = getattr(args, field.name)
        # Those of a chat template may well have such a name.
        if not field.name.endswith(("_init_kwargs", "_engine_kwargs")) or not isinstance(values, Mapping):
            continue
        tokens = [key for key, value in values.items() if (key == "token" or is_secret(key)) and type(value) is str]
        if tokens:
            raise ValueError(
                f"{field.name} sets {tokens}, which would be in logs and checkpoints. Set HF_TOKEN instead."
            )


def _check_ranks(args: Any) -> None:
    """Refuse (`ValueError`) engines over processes that TRL does not group: it does by tensor parallelism alone."""
    if getattr(args, "vllm_mode", None) != "colocate":
        return
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        value = (args.vllm_engine_kwargs or {}).get(name, 1)
        if value != 1:
            raise ValueError(
                f"vllm_engine_kwargs: {name} must be 1 with vllm_mode='colocate', got {value!r}: each process would "
                "give its part of the engine other prompts. Set vllm_tensor_parallel_size."
            )


def _check_drafts(args: Any) -> None:
    """Refuse (`ValueError`) speculative decoding by a model that would have random weights."""
    drafts = (args.vllm_engine_kwargs or {}).get("speculative_config")
    if not isinstance(drafts, Mapping):
        return
    # n-grams may be named as the model.
    method = drafts.get("method") or drafts.get("model")
    if method not in DRAFTS_WITHOUT_WEIGHTS:
        raise ValueError(
            "vllm_engine_kwargs: the method of speculative_config must be one of "
            f"{', '.join(DRAFTS_WITHOUT_WEIGHTS)}, got {method!r}: a draft model would have random weights, and no "
            "token of it would be accepted."
        )


def checked_verify(value: Any) -> str:
    """`"off"`, `"first"` or a number: YAML reads a bare `off` as `False`, and a script may give an `int`."""
    # Text from here on: a command line gives nothing else, and one type is enough to test.
    text = "off" if value is False else str(value)
    is_number = text.isdecimal() and int(text) >= 1
    if text not in ("off", "first") and not is_number:
        raise ValueError(f"verify_sync={value!r} must be 'off', 'first' or a number of syncs >= 1.")
    return text
