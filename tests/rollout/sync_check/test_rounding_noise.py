"""`qarl_trl.rollout.sync_check.rounding_noise`: which products it changes, and how far."""

import pytest
import torch
from torch import nn

from qarl_trl.quant import apply_quantization
from qarl_trl.rollout.sync_check.rounding_noise import rounding_noise


@torch.no_grad()
def test_the_noise_is_one_rounding_of_each_output():
    # So many outputs that the largest factor comes near its bound.
    layer = nn.Linear(64, 4096)
    x = torch.randn(2, 64)
    clean = layer(x)

    with rounding_noise(layer):
        noisy = layer(x)

    relative = (noisy / clean - 1).abs()
    assert 0.9 * 2**-8 < relative.max() <= 1.01 * 2**-8
    assert relative.mean().item() == pytest.approx(2**-9, rel=0.1)

    # Control: the layer is left as it was.
    assert torch.equal(layer(x), clean)


@torch.no_grad()
def test_the_noise_reaches_the_router_whose_logits_choose_experts(tiny_model):
    router = tiny_model("qwen3_moe").model.layers[0].mlp.gate
    x = torch.randn(64, router.weight.shape[1])
    clean, *_ = router(x)

    with rounding_noise(router):
        noisy, *_ = router(x)

    relative = (noisy / clean - 1).abs()
    assert 0.9 * 2**-8 < relative.max() <= 1.01 * 2**-8
    # Control: the router is left as it was.
    assert torch.equal(router(x)[0], clean)


@pytest.mark.parametrize("scheme", ["W4A16", None])
@torch.no_grad()
def test_the_noise_reaches_experts(tiny_model, scheme):
    model = tiny_model("qwen3_moe")
    if scheme is not None:
        apply_quantization(model, scheme)
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(64, experts.gate_up_proj.shape[-1])
    # All experts in turn, two for each token.
    choices = torch.arange(128).view(64, 2) % len(experts.gate_up_proj)
    weights = torch.full((64, 2), 0.5)

    clean = experts(x, choices, weights)
    with rounding_noise(experts):
        noisy = experts(x, choices, weights)

    # A factor uniform within one rounding has a root mean square of 0.58 roundings.
    error = (noisy - clean).norm() / clean.norm() / 2**-8
    if scheme is None:
        assert error == pytest.approx(0.58, rel=0.1)
    else:
        # Four of them, 2 x 0.58: of gate, up, down and output.
        assert error == pytest.approx(1.16, rel=0.1)
    # Control: the experts are left as they were.
    assert torch.equal(experts(x, choices, weights), clean)
