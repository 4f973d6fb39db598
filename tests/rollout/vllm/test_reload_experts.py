"""Kernels of experts over a weight sync, by vLLM's class for their scales; whole engines: `tests/pretended_gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qarl_trl.rollout.vllm.reload_experts import _take_over


def layer_of_experts() -> torch.nn.Module:
    layer = torch.nn.Module()
    # Scales that are a parameter of the layer, which vLLM's own reload fills.
    layer.w13_weight_scale = torch.nn.Parameter(torch.ones(4, 8, 1), requires_grad=False)
    return layer


def scales_of(w1: torch.Tensor, w2: torch.Tensor, alpha: float | None = None) -> Any:
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    return fp8_w8a8_moe_quant_config(w1_scale=w1, w2_scale=w2, gemm1_alpha=alpha)


def test_only_what_is_no_parameter_is_filled():
    layer = layer_of_experts()
    constant = torch.zeros(4, 6, 1)
    first = scales_of(layer.w13_weight_scale, constant)

    _take_over(layer, first, scales_of(torch.full((4, 8, 1), 2.0), torch.full((4, 6, 1), 3.0)))

    # The same memory with new numbers: a graph reads the address.
    assert first.w2_scale is constant
    assert (constant == 3).all()
    assert (layer.w13_weight_scale == 1).all()  # vLLM's reload fills it


@pytest.mark.parametrize(
    ("w2", "alpha", "message"),
    [
        (torch.zeros(4, 1, 1), 1.0, r"_w2.scale .* must stay torch.float32 of shape \(4, 6, 1\)"),
        (torch.zeros(4, 6, 1).bfloat16(), 1.0, "got torch.bfloat16"),
        (torch.zeros(4, 6, 1), 2.0, "gemm1_alpha .* must stay 1.0 over a weight sync, got 2.0"),
    ],
    ids=["shape", "dtype", "number"],
)
def test_what_a_graph_could_not_follow_stops_the_sync(w2, alpha, message):
    layer = layer_of_experts()
    first = scales_of(layer.w13_weight_scale, torch.zeros(4, 6, 1), alpha=1.0)

    with pytest.raises(RuntimeError, match=message):
        _take_over(layer, first, scales_of(torch.ones(4, 8, 1), w2, alpha))

    # Control: the same form.
    _take_over(layer, first, scales_of(torch.ones(4, 8, 1), torch.zeros(4, 6, 1), alpha=1.0))
