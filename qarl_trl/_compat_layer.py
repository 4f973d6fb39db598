"""The rollout engine's own linear layer, holding a low-bit weight of the learner.

Invariant: vLLM makes the layer out of checkpoint tensors as it does while it loads a model: it chooses the kernel, repacks the
weight and multiplies. Nothing here knows one of its kernels, so a learner that multiplies by this layer follows the engine to
another GPU and another vLLM (paper Sec. 3.1, step 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from torch import Tensor, nn

from . import _compat_cpu
from .quant.scheme import arithmetic_of


if TYPE_CHECKING:
    from .quant.quantize import LowBitWeight


_engine_settings: Any = None
_quant_configs: dict[tuple, Any] = {}


def use_settings_of(llm: Any) -> None:
    """Make layers with the settings of a colocated `vllm.LLM` from now on: it chooses kernels by them."""
    global _engine_settings
    _engine_settings = llm.llm_engine.vllm_config


def multiply(x: Tensor, weight: LowBitWeight, bias: Tensor | None = None) -> Tensor:
    """
    The engine's product, quantization of the input included where the scheme has it.

    Args:
        x (`Tensor`): bfloat16 `(tokens, in)`.
        weight (`LowBitWeight`): On the device of `x`. Its layer is made at the first call and kept with the codes.
        bias (`Tensor`, *optional*): bfloat16 `(out,)`; not for weight-only schemes on a GPU, whose kernels want it permuted.

    Returns:
        `Tensor`: bfloat16 `(tokens, out)`.

    Raises:
        RuntimeError: when the installed vLLM computes on another device, or its layer holds other tensors than the weight.
    """
    layer = weight.prepared.get("engine")
    if layer is None:
        layer = weight.prepared["engine"] = engine_layer(weight)
    return layer.quant_method.apply(layer, x, bias)


def engine_layer(weight: LowBitWeight) -> nn.Module:
    """vLLM's linear layer without bias, loaded with `weight` and ready to multiply."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.platforms import current_platform

    device = weight.codes.device
    if current_platform.device_type != device.type:
        raise RuntimeError(
            f"quant_kernel='engine' on device {device.type!r} needs a vLLM for it; the installed one computes on "
            f"{current_platform.device_type!r}. Use quant_kernel='auto'."
        )
    out_features, in_features = weight.shape
    with _loading(device):
        layer = ColumnParallelLinear(
            in_features,
            out_features,
            bias=False,
            params_dtype=torch.bfloat16,
            quant_config=_quant_config(weight.scheme),
            prefix="layer",
            return_bias=False,
            disable_tp=True,
        )
        parameters = dict(layer.named_parameters())
        if parameters.keys() != weight.tensors.keys():
            raise RuntimeError(
                f"vLLM's layer holds {sorted(parameters)}, and the low-bit weight has {sorted(weight.tensors)}: this vLLM "
                "loads the scheme otherwise than the tested version. Use quant_kernel='auto' and report the version."
            )
        for name, tensor in weight.tensors.items():
            parameters[name].weight_loader(parameters[name], tensor)
        layer.quant_method.process_weights_after_loading(layer)
    return layer


@contextmanager
def _loading(device: torch.device) -> Iterator[None]:
    """The surroundings in which vLLM makes a layer: its settings, one rank, the device, and bfloat16 for new tensors."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    _compat_cpu.keep_activations_unquantized()
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(_settings()))
        # The learner's weight is whole, whatever the ranks of the engine, and there may be no engine in this process.
        stack.enter_context(patch.object(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1)))
        stack.enter_context(_compat_cpu.quick_repack())
        stack.enter_context(device)
        stack.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(torch.bfloat16)
        yield


def _settings() -> Any:
    """Those of the colocated engine, or without one vLLM's own."""
    global _engine_settings
    if _engine_settings is None:
        from vllm.config import VllmConfig

        _engine_settings = VllmConfig()
        # Kernels for float8 ask for the dtype of the model.
        _engine_settings.model_config = SimpleNamespace(dtype=torch.bfloat16)
    return _engine_settings


def _quant_config(scheme: QuantizationScheme) -> Any:
    """vLLM's reading of a checkpoint whose layers all have this scheme."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    key = scheme.format, arithmetic_of(scheme.weights), arithmetic_of(scheme.input_activations)
    if key not in _quant_configs:
        group = scheme.model_copy(update={"targets": ["Linear"]})  # a recipe's may be names of layers
        whole = QuantizationConfig(
            config_groups={"group_0": group}, format=group.format, quantization_status="compressed"
        )
        _quant_configs[key] = CompressedTensorsConfig.from_config(whole.to_dict())
    return _quant_configs[key]
