"""Stacks through vLLM's own loader of experts; whole engines: `tests/pretended_gpu/test_stacks.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_model
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.utils import set_weight_attrs

from qarl_trl.quant import apply_quantization, iter_low_bit_weights
from qarl_trl.quant.scheme import DEFAULT_IGNORE
from qarl_trl.rollout.vllm.reload_stacks import load_stacks


NAME = "model.layers.0.mlp.experts"
# Its rows and columns have parts of whole groups and blocks for two ranks.
SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1, "num_key_value_heads": 2}
STRATEGIES = {
    "W4A16": "group",
    "W4A16_ASYM": "group",
    "W8A16": "group",
    "FP8_DYNAMIC": "channel",
    "FP8_BLOCK": "block",
}
SHARDS = {"gate_proj": ("w13", "w1"), "up_proj": ("w13", "w3"), "down_proj": ("w2", "w2")}


def layer_for(weights: dict[str, torch.Tensor], strategy: str, ranks: int = 1, rank: int = 0) -> Any:
    """vLLM's layer of experts, with empty parameters for one rank of the experts in a checkpoint, and nothing else."""
    layer: Any = RoutedExperts.__new__(RoutedExperts)
    # Past vLLM's constructor, which needs an engine: the loader reads only these attributes.
    torch.nn.Module.__init__(layer)
    layer.layer_name = NAME
    layer.quant_config = None
    layer.quant_method = SimpleNamespace()
    layer.moe_config = SimpleNamespace(
        is_act_and_mul=True,
        tp_shard_with_padding=False,
        tp_rank=rank,
        moe_parallel_config=SimpleNamespace(tp_size=ranks),
    )
    layer.expert_map_manager = SimpleNamespace(map_global_to_local=lambda number: number)
    layer.register_buffer("_expert_map", None)
    layer._fused_shared_expert_quantizer = None  # vLLM 0.32: of shared experts that are quantized while they load

    experts = 4
    for name in sorted({name.rpartition(".")[2] for name in weights if name.startswith(NAME)}):
        up = weights[f"{NAME}.0.up_proj.{name}"]
        down = weights[f"{NAME}.0.down_proj.{name}"]
        if name == "weight_shape":
            shapes = {"w13": (experts, 2), "w2": (experts, 2)}
        else:
            # The scales of channels have one column, of which each rank has all.
            columns = down.shape[1] // ranks if down.shape[1] > 1 else 1
            shapes = {"w13": (experts, 2 * up.shape[0] // ranks, up.shape[1]), "w2": (experts, down.shape[0], columns)}
        for place, shape in shapes.items():
            parameter = torch.nn.Parameter(torch.zeros(shape, dtype=up.dtype), requires_grad=False)
            set_weight_attrs(parameter, {"weight_loader": layer.weight_loader, "quant_method": strategy})
            layer.register_parameter(f"{place}_{name}", parameter)
    return layer


def load_one_by_one(layer: Any, weights: dict[str, torch.Tensor]) -> None:
    """As vLLM's `load_weights` calls the loader."""
    for name, tensor in weights.items():
        if not name.startswith(NAME):
            continue
        number, projection, local = name.removeprefix(f"{NAME}.").split(".")
        place, shard = SHARDS[projection]
        parameter = getattr(layer, f"{place}_{local}")
        # An expert's number as an index: stacks have a slice there.
        parameter.weight_loader(parameter, tensor, f"{NAME}.{place}_{local}", shard, int(number), return_success=True)


def learner_in(scheme: str) -> Any:
    return apply_quantization(make_model("qwen3_moe", **SIZES), scheme)


def bytes_of(layer: Any) -> dict[str, bytes]:
    return {name: parameter.view(torch.uint8).numpy().tobytes() for name, parameter in layer.named_parameters()}


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("scheme", STRATEGIES)
def test_a_stack_fills_the_parameter_as_its_experts_do(scheme, rank):
    learner = learner_in(scheme)
    weights = dict(iter_low_bit_weights(learner))
    place = {} if rank is None else {"ranks": 2, "rank": rank}
    expected = layer_for(weights, STRATEGIES[scheme], **place)
    load_one_by_one(expected, weights)

    layer = layer_for(weights, STRATEGIES[scheme], **place)
    rest = dict(load_stacks(layer, iter_low_bit_weights(learner, stacked=True)))

    assert bytes_of(layer) == bytes_of(expected)
    # Control: something was loaded into each.
    assert all(parameter.float().any() for parameter in layer.parameters())
    # What the rest of the engine needs.
    assert rest.keys() == {name for name in weights if not name.startswith(NAME)}


def some_experts(layer: Any) -> None:
    # Expert parallelism: two of the four are another rank's.
    layer._expert_map = torch.tensor([0, 1, -1, -1])


def another_number(layer: Any) -> None:
    layer.w13_weight_packed = torch.nn.Parameter(layer.w13_weight_packed[:3], requires_grad=False)


def turned(layer: Any) -> None:
    # As in vLLM 0.26.
    layer.w13_weight_packed.is_transposed = True


def another_name(layer: Any) -> None:
    layer.layer_name = "language_model.model.layers.0.mlp.experts"


@pytest.mark.parametrize("change", [some_experts, another_number, turned, another_name])
def test_vllm_gets_experts_one_by_one_where_it_has_another_form(change):
    learner = learner_in("W4A16")
    weights = dict(iter_low_bit_weights(learner))
    layer = layer_for(weights, "group")
    change(layer)

    rest = dict(load_stacks(layer, iter_low_bit_weights(learner, stacked=True)))

    assert not layer.w13_weight_packed.any()
    for expert in range(4):
        for projection in ("gate_proj", "up_proj"):
            name = f"{NAME}.{expert}.{projection}.weight_packed"
            assert torch.equal(rest[name], weights[name])


def test_experts_in_high_precision_are_stacks_too():
    learner = apply_quantization(make_model("qwen3_moe", **SIZES), "W4A16", ignore=(*DEFAULT_IGNORE, "re:.*experts.*"))
    weights = dict(iter_low_bit_weights(learner))
    layer = layer_for(weights, "")
    rest = dict(load_stacks(layer, iter_low_bit_weights(learner, stacked=True)))

    experts = learner.model.layers[0].mlp.experts
    assert torch.equal(layer.w13_weight, experts.gate_up_proj.bfloat16())
    assert torch.equal(layer.w2_weight, experts.down_proj.bfloat16())
    assert not any(name.startswith(NAME) for name in rest)


def test_a_stream_without_stacks_goes_through():
    weights = [("model.layers.0.mlp.experts.0.up_proj.weight", torch.zeros(2)), ("lm_head.weight", torch.ones(2))]

    assert list(load_stacks(torch.nn.Module(), weights)) == weights
