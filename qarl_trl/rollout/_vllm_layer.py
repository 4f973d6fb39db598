"""The rollout engine's own linear layer, with a low-bit weight of the learner.

vLLM makes it from checkpoint tensors, as when it loads a model, and chooses the kernel. So a learner with this layer uses the
engine's kernel on any GPU and with any version of vLLM.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from torch import Tensor

from ..cpu_exact.arithmetic import choose_arithmetic
from ..quant.quantize import LowBitWeight
from ..quant.scheme import quantized_key
from . import _vllm


_engine_settings: Any = None
_quant_configs: dict[tuple[Any, ...], Any] = {}


def use_settings_of(llm: Any) -> None:
    """From now on make layers with the settings of a colocated `vllm.LLM`: vLLM chooses kernels by them."""
    global _engine_settings
    _engine_settings = _not_compiled(llm.llm_engine.vllm_config)


def multiply(x: Tensor, weight: LowBitWeight, bias: Tensor | None = None) -> Tensor:
    """
    The engine's product `(tokens, out)` of `x` `(tokens, in)`; it also quantizes the input if the scheme does.

    All tensors are bfloat16. The first call makes the weight's layer and keeps it with the quantized values. Weight-only schemes on
    a GPU take no bias `(out,)`, because their kernels need it permuted. `ValueError` if vLLM has no kernel for a layer of this
    size, `RuntimeError` if its layer holds other tensors than the weight.
    """
    layer = weight.prepared.get("engine")
    if layer is None:
        layer = weight.prepared["engine"] = engine_layer(weight)
    from vllm.model_executor.layers.quantization.utils import marlin_utils

    def locks(device: torch.device) -> Tensor:
        return marlin_utils.marlin_make_workspace_new(device, marlin_utils.MARLIN_MAX_BLOCKS_PER_SM)

    # New locks for Marlin in each call. By default it gets them by stream from the engine's manager, which is closed once graphs are
    # captured; and in an autograd thread, which recomputes checkpointed blocks, the query for the stream changes it.
    with patch.object(marlin_utils, "get_marlin_workspace", locks):
        return layer.quant_method.apply(layer, x, bias)


def engine_layer(weight: LowBitWeight) -> Any:
    """Make vLLM's linear layer without bias, loaded with `weight` and ready to multiply."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    out_features, in_features = weight.shape
    with _loading(weight.quantized.device):
        try:
            plain = {"bias": False, "return_bias": False, "disable_tp": True, "params_dtype": torch.bfloat16}
            config = _quant_config(weight.scheme)
            layer = ColumnParallelLinear(in_features, out_features, quant_config=config, prefix="layer", **plain)
        except ValueError as error:  # the engine's layer may be wider, because it merges q, k and v
            raise ValueError(f"vLLM has no kernel for {weight.shape}: {error}. Use quant_kernel='auto'.") from error
        parameters = dict(layer.named_parameters())
        if parameters.keys() != weight.tensors.keys():
            found = f"vLLM's layer holds {sorted(parameters)}, and the low-bit weight has {sorted(weight.tensors)}"
            raise RuntimeError(f"{found}. Use quant_kernel='auto' and report the version of vLLM.")
        for name, tensor in weight.tensors.items():
            parameters[name].weight_loader(parameters[name], tensor)
        layer.quant_method.process_weights_after_loading(layer)
    for parameter in layer.parameters():
        # These refer to the layer: it would stay until the garbage collector runs, although its quantized values are gone.
        for name in ("_weight_loader", "weight_loader"):
            vars(parameter).pop(name, None)
    return layer


@contextmanager
def _loading(device: torch.device) -> Iterator[None]:
    """The context in which vLLM makes a layer: its settings, one rank, the device, and bfloat16 for new tensors."""
    global _engine_settings
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.utils.torch_utils import set_default_torch_dtype

    if device.type == "cpu":
        choose_arithmetic()
    _vllm.keep_block_scales()
    # The learner's weight is whole, also if the engine has several ranks or is not in this process.
    one_rank = patch.object(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1))
    if _engine_settings is None:  # no colocated engine: vLLM's defaults
        _engine_settings = _not_compiled(VllmConfig())
        # Float8 kernels read the model's dtype and config.
        _engine_settings.model_config = SimpleNamespace(dtype=torch.bfloat16, hf_text_config=None)
    with set_current_vllm_config(_engine_settings), one_rank, device, set_default_torch_dtype(torch.bfloat16):
        yield


def _not_compiled(settings: Any) -> Any:
    """A copy of the settings without compilation: an engine compiles these operations with its model, a learner does not."""
    from vllm.config import CompilationMode

    settings = copy.copy(settings)
    settings.compilation_config = copy.copy(settings.compilation_config)
    settings.compilation_config.mode = CompilationMode.NONE
    return settings


def _quant_config(scheme: QuantizationScheme) -> Any:
    """vLLM's config of a checkpoint in which all layers have this scheme."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    key = scheme.format, quantized_key(scheme.weights), quantized_key(scheme.input_activations)
    if key not in _quant_configs:
        group = scheme.model_copy(update={"targets": ["Linear"]})  # a recipe's targets may be names of layers
        whole = QuantizationConfig(
            config_groups={"group_0": group}, format=group.format, quantization_status="compressed"
        )
        _quant_configs[key] = CompressedTensorsConfig.from_config(whole.to_dict())
    return _quant_configs[key]
