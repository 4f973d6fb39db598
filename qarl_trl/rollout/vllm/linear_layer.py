"""The engine's own linear layer, with a low-bit weight of the learner (`quant_kernel="engine"`).

vLLM makes the layer from checkpoint tensors, as when it loads a model, and chooses the kernel
(`model_executor/layers/linear.py`, `quantization/compressed_tensors/`). So a learner with this layer uses the engine's
kernel on any GPU and with any version of vLLM. What vLLM takes from a running engine, it gets here for one layer: the
settings, a group of ranks, Marlin's locks.
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

from ...cpu_exact.arithmetic import choose_arithmetic
from ...quant.quantize import LowBitWeight
from ...quant.scheme import quantized_key
from .start import keep_block_scales


class _LayerConfigs:
    """
    vLLM's configs for the layers of this process, each made when a layer first needs it.

    Attributes:
        engine: vLLM's settings (`VllmConfig`), by which it chooses kernels: those of the colocated engine, or defaults
            from the first layer on; `None` before.
        schemes: vLLM's config of each scheme, by format and quantization of weights and activations.
    """

    def __init__(self) -> None:
        self.engine: Any = None
        self.schemes: dict[tuple[Any, ...], Any] = {}


_configs = _LayerConfigs()


def use_settings_of(llm: Any) -> None:
    """
    From now on make layers with the settings of a colocated `vllm.LLM`.

    The order counts: layers that were made before keep the kernels that vLLM's defaults chose. The trainer starts its
    engine in its constructor, and so before the learner's first forward.

    Args:
        llm: The engine of this process.
    """
    _configs.engine = _not_compiled(llm.llm_engine.vllm_config)


def engine_product(x: Tensor, weight: LowBitWeight, bias: Tensor | None = None) -> Tensor:
    """
    The product of the engine's layer, which also quantizes the input if the scheme does.

    The first call makes the weight's layer and keeps it with the quantized values.

    Args:
        x: The input, `(tokens, in)` bfloat16.
        weight: The low-bit weight, `(out, in)`.
        bias: `(out,)` bfloat16. Weight-only schemes on a GPU take none, because their kernels need it permuted.

    Returns:
        `(tokens, out)` bfloat16.

    Raises:
        ValueError: if vLLM has no kernel for a layer of this size.
        RuntimeError: if vLLM's layer holds other tensors than the weight.
    """
    layer = weight.prepared.get("engine")
    if layer is None:
        layer = engine_layer(weight)
        weight.prepared["engine"] = layer

    with _new_locks():
        return layer.quant_method.apply(layer, x, bias)


@contextmanager
def _new_locks() -> Iterator[None]:
    """
    Give Marlin's kernel new locks in each call.

    By default it gets them by stream from the engine's manager, which is closed once graphs are captured; and in an
    autograd thread, which recomputes checkpointed blocks, the query for the stream changes it.
    """
    from vllm.model_executor.layers.quantization.utils import marlin_utils

    if not hasattr(marlin_utils, "get_marlin_workspace"):  # in vLLM 0.26 each layer has locks of its own
        yield
        return

    def new_locks(device: torch.device) -> Tensor:
        return marlin_utils.marlin_make_workspace_new(device, marlin_utils.MARLIN_MAX_BLOCKS_PER_SM)

    with patch.object(marlin_utils, "get_marlin_workspace", new_locks):
        yield


def engine_layer(weight: LowBitWeight) -> Any:
    """
    Make vLLM's linear layer without bias, loaded with a low-bit weight and ready to multiply.

    Args:
        weight: The low-bit weight, on the device of the layer.

    Raises:
        ValueError: if vLLM has no kernel for a layer of this size.
        RuntimeError: if vLLM's layer holds other tensors than the weight.
    """
    with _loading(weight.quantized.device):
        layer = _empty_layer(weight)
        _load(layer, weight)
        # As vLLM does after it loads a model: here a kernel permutes or packs what it reads.
        layer.quant_method.process_weights_after_loading(layer)

    for parameter in layer.parameters():
        # These refer to the layer: it would stay until the garbage collector runs, although its quantized values are
        # gone.
        for name in ("_weight_loader", "weight_loader"):
            vars(parameter).pop(name, None)
    return layer


def _empty_layer(weight: LowBitWeight) -> Any:
    """Make vLLM's layer for a weight of this shape and scheme. `ValueError` if it has no kernel."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    out_features, in_features = weight.shape
    try:
        # A layer by itself, not a merged one: the learner has q, k and v one by one.
        return ColumnParallelLinear(
            in_features,
            out_features,
            quant_config=_quant_config(weight.scheme),
            prefix="layer",
            bias=False,
            return_bias=False,
            disable_tp=True,
            params_dtype=torch.bfloat16,
        )
    except ValueError as error:
        # The engine may still have one: its layer is wider where it merges q, k and v.
        raise ValueError(f"vLLM has no kernel for {weight.shape}: {error}. Use quant_kernel='auto'.") from error


def _load(layer: Any, weight: LowBitWeight) -> None:
    """Load the tensors of a weight into vLLM's layer. `RuntimeError` if it holds others."""
    # A tensor that is not loaded would keep what was in memory before, without an error.
    parameters = dict(layer.named_parameters())
    if parameters.keys() != weight.tensors.keys():
        raise RuntimeError(
            f"vLLM's layer holds {sorted(parameters)}, and the low-bit weight has {sorted(weight.tensors)}. "
            "Use quant_kernel='auto' and report the version of vLLM."
        )

    for name, tensor in weight.tensors.items():
        parameter = parameters[name]
        parameter.weight_loader(parameter, tensor)


@contextmanager
def _loading(device: torch.device) -> Iterator[None]:
    """The context in which vLLM makes a layer: its settings, one rank, the device, and bfloat16 for new tensors."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.utils.torch_utils import set_default_torch_dtype

    if device.type == "cpu":
        choose_arithmetic()
    keep_block_scales()

    # The learner's weight is whole, also if the engine has several ranks or is not in this process.
    one_rank = patch.object(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1))

    with set_current_vllm_config(_settings()), one_rank, device, set_default_torch_dtype(torch.bfloat16):
        yield


def _settings() -> Any:
    """The settings of the colocated engine; without one vLLM's defaults."""
    from vllm.config import VllmConfig

    if _configs.engine is None:
        settings = _not_compiled(VllmConfig())
        # Float8 kernels read the model's dtype and config.
        settings.model_config = SimpleNamespace(dtype=torch.bfloat16, hf_text_config=None)
        _configs.engine = settings
    return _configs.engine


def _not_compiled(settings: Any) -> Any:
    """A copy of the settings without compilation."""
    from vllm.config import CompilationMode

    # An engine compiles these operations together with its model; a learner calls them alone.
    settings = copy.copy(settings)
    settings.compilation_config = copy.copy(settings.compilation_config)
    settings.compilation_config.mode = CompilationMode.NONE
    return settings


def _quant_config(scheme: QuantizationScheme) -> Any:
    """vLLM's config of a checkpoint in which all layers have this scheme."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    key = (scheme.format, quantized_key(scheme.weights), quantized_key(scheme.input_activations))
    if key not in _configs.schemes:
        # A recipe's targets may be names of layers, but this layer has a name of its own.
        group = scheme.model_copy(update={"targets": ["Linear"]})
        checkpoint = QuantizationConfig(
            config_groups={"group_0": group}, format=group.format, quantization_status="compressed"
        )
        _configs.schemes[key] = CompressedTensorsConfig.from_config(checkpoint.to_dict())
    return _configs.schemes[key]
