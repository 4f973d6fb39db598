"""Prepare the policy of a run: its low-bit layers, and what engine and ZeRO-3 ask of it then."""

from __future__ import annotations

from typing import Any

from accelerate.logging import get_logger
from compressed_tensors.quantization import QuantizationConfig
from torch import nn

from .._compat.sharding import fit_to_zero3, is_zero3, sharding_of
from ..cpu_exact.ops import leave_engine_ops, use_engine_ops
from ..learner.attention import attend_from_cache
from ..quant.convert import apply_quantization
from ..quant.kv_cache import attend_without_cache
from ..quant.names import base_model, config_wrongly_ties_head, untie
from ..quant.rest import round_rest
from ..rollout.engine_gemm import gemm_choice
from ..validate import check_head


logger = get_logger(__name__)


def prepare_policy(model: nn.Module, args: Any, plan: QuantizationConfig | None) -> None:
    """
    Prepare a policy: the config of its head, its low-bit layers, ZeRO-3, the engine's roundings, attention.

    A trainer calls it right before its engine starts, which needs the scheme of the layers; without an engine at the
    end of TRL's constructor. The layers of a frozen base are quantized already: `quant.start.load_frozen_base` did it.

    Args:
        model: The policy, with its adapter.
        args: The config of the run, with [`LowBitConfig`].
        plan: Which layers are quantized, and how; `None`: none.
    """
    # Before the engine starts, and before anything is saved: both go by the config.
    if plan is not None and config_wrongly_ties_head(model):
        logger.warning("The model has an output layer of its own: its config now says tie_word_embeddings=False.")
        untie(base_model(model).config)

    if args.frozen:
        # The layers were quantized while they were loaded, before the model had its adapter.
        from ..quant.layers.frozen import align_adapters  # imports peft

        align_adapters(model)
    elif plan is not None:
        gemm = gemm_choice(args.learner_kernel, args.quant_keep_matrices)
        apply_quantization(model, plan, gemm=gemm, quantize_forward=args.quantize_learner)
        check_head(model)

    if is_zero3(args):
        fit_to_zero3(base_model(model))
    _round_as_engine(model, args, is_low_bit=plan is not None or args.frozen)

    attend_without_cache(model)  # an earlier trainer's cache
    if args.aligned_cache is not None:  # after the choice of an attention
        attend_from_cache(model, args.aligned_cache)


def leave_earlier_run(model: nn.Module) -> None:
    """
    Undo how an earlier trainer of the script made a model attend and compute, before TRL loads a reference with its
    attention.

    Args:
        model: The policy that the script gave, also a `PeftModel`.
    """
    attend_without_cache(model)
    leave_engine_ops(model)


def _round_as_engine(model: nn.Module, args: Any, is_low_bit: bool) -> None:
    """Let what is not quantized round where the engine does."""
    if args.engine_ops_for(model.config):
        # Beside a CPU engine, with its operations.
        use_engine_ops(model)
        return

    # An earlier trainer's.
    leave_engine_ops(model)
    if is_low_bit and args.quantize_learner and args.bf16 and sharding_of(args) == "none":
        # Sharded weights are gathered in bfloat16 anyway.
        round_rest(base_model(model))
