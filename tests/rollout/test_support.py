"""`qarl_trl.rollout.support`: an engine that cannot compute as the learner does is refused before a model loads."""

import os
import re
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from configs import config
from transformers import Gemma3nTextConfig, Qwen3Config, Qwen3MoeConfig

from qarl_trl import QaRLTrainer
from qarl_trl.quant import apply_quantization
from qarl_trl.quant.scheme import SUPPORTED, resolve_scheme, single_group
from qarl_trl.rollout import _vllm
from qarl_trl.rollout.support import check_engine, check_merged_layers, check_shards, default_engine_kwargs
from qarl_trl.validate import check_arguments, check_run


@pytest.mark.parametrize("scheme", list(SUPPORTED))
def test_a_scheme_without_a_cpu_kernel_is_refused_before_a_model_loads(tmp_path, scheme):
    args = config(tmp_path, use_vllm=True, quant_scheme=scheme)
    if SUPPORTED[scheme].cpu_engine:
        return check_arguments("org/model", args, {})
    with pytest.raises(ValueError, match=f"quant_scheme={scheme!r}.*'cpu'.*use_vllm=False"):
        QaRLTrainer("no/such-model", reward_funcs=[], args=args)
    check_arguments("org/model", config(tmp_path, quant_scheme=scheme), {})  # control: without the engine it trains


def on_gpu(monkeypatch, scheme, capability=(9, 0), ranks=1, **engine):
    """`check_engine` as on a GPU of that capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    args = SimpleNamespace(
        device=torch.device("cuda"), vllm_tensor_parallel_size=ranks, vllm_engine_kwargs=engine or None
    )
    check_engine(single_group(resolve_scheme(scheme), ["Linear"], []), args)


@pytest.mark.parametrize("scheme", list(SUPPORTED))
def test_a_scheme_needs_a_gpu_that_has_a_kernel(monkeypatch, scheme):
    generations = {(7, 5): None, (8, 0): "Ampere", (8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}
    row = SUPPORTED[scheme]
    for capability, generation in generations.items():
        if generation in row.gpus:
            on_gpu(monkeypatch, scheme, capability)
            continue
        with pytest.raises(ValueError, match=rf"quant_scheme='{scheme}' cannot be sampled on device 'cuda'") as error:
            on_gpu(monkeypatch, scheme, capability)
        needed = [*row.gpus, str(capability)] if row.gpus else ["no GPU kernel"]
        assert all(words in str(error.value) for words in needed)


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC"])
def test_several_engine_ranks_scale_a_token_in_parts(monkeypatch, caplog, scheme):
    PartialState()  # which the logger asks for
    on_gpu(monkeypatch, scheme)
    assert not caplog.text
    on_gpu(monkeypatch, scheme, ranks=2)
    assert (f"vllm_tensor_parallel_size=2 with {scheme}" in caplog.text) == (scheme == "FP8_DYNAMIC")


def test_a_quantized_cache_of_keys_and_values_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8'.*mismatch is not measured"):
        on_gpu(monkeypatch, "W4A16", kv_cache_dtype="fp8")
    on_gpu(monkeypatch, "W4A16", kv_cache_dtype="bfloat16")  # control


@pytest.mark.parametrize("value", ["1", "0", ""])
def test_block_scales_are_not_rounded_in_the_engine_alone(monkeypatch, value):
    """vLLM's default for Hopper, where it has DeepGEMM; the engine starts with the switch off."""
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", value)
    on_gpu(monkeypatch, "FP8_DYNAMIC")
    if value == "1":
        with pytest.raises(ValueError, match="VLLM_USE_DEEP_GEMM_E8M0"):
            on_gpu(monkeypatch, "FP8_BLOCK")
        return
    on_gpu(monkeypatch, "FP8_BLOCK")
    _vllm.keep_block_scales()
    assert os.environ["VLLM_USE_DEEP_GEMM_E8M0"] == "0"


def test_vllm_still_knows_the_switch_for_block_scales():
    """Control for the name: the default is on."""
    envs = pytest.importorskip("vllm.envs")
    assert _vllm.BLOCK_SCALES in envs.environment_variables


def refused(model, ranks, scheme=None, ignore=(), parallel=False):
    """What is said of an engine of so many ranks."""
    plan = scheme and single_group(resolve_scheme(scheme), ["Linear"], list(ignore))
    args = SimpleNamespace(vllm_tensor_parallel_size=ranks, vllm_engine_kwargs={"enable_expert_parallel": parallel})
    try:
        check_shards(model, plan, args)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("scheme", "ignore", "ranks", "words"),
    [
        ("W4A16", [], 1, None),
        ("W4A16", [], 2, "192 inputs of mlp.down_proj into parts of 96, and groups of 128"),
        ("FP8_BLOCK", [], 2, "192 inputs of mlp.down_proj into parts of 96, and groups of 128"),
        ("W4A16", ["re:.*down_proj"], 2, None),
        ("FP8_DYNAMIC", [], 2, None),
        ("W4A16", ["re:.*down_proj"], 3, "vllm_tensor_parallel_size=3 must divide the 4 attention heads"),
    ],
)
def test_engine_ranks_divide_the_groups_of_every_layer(scheme, ignore, ranks, words):
    model = Qwen3Config(hidden_size=256, num_attention_heads=4, head_dim=64, intermediate_size=192)
    found = refused(model, ranks, scheme, ignore)
    assert found is None if words is None else words in found


QWEN = {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128}


def vllm_refuses(ranks, kv_heads, widths):
    """Whether vLLM's layers, built as one of several ranks, stop with an error."""
    linear = pytest.importorskip("vllm.model_executor.layers.linear")
    group = SimpleNamespace(world_size=ranks, rank_in_group=0)
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        patch.setattr("vllm.distributed.parallel_state._TP", group)
        try:
            linear.QKVParallelLinear(1536, 128, 12, kv_heads)
            for width in widths:
                linear.RowParallelLinear(width, 1536)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "width", "words"),
    [
        (2, 2, 8960, None),
        (4, 2, 8192, None),  # a key-value head on two ranks each
        (3, 2, 8448, "the 2 key-value heads (or be a multiple)"),
        (4, 3, 8192, "the 3 key-value heads"),
        (3, 3, 8960, "the 8960 inputs of mlp.down_proj of the model."),
        (8, 2, 8192, "the 12 attention heads"),
    ],
)
def test_engine_ranks_share_a_model_evenly(ranks, kv_heads, width, words):
    """As vLLM's own layers would say by an assertion, while the engine starts."""
    model = Qwen3Config(**QWEN | {"num_key_value_heads": kv_heads, "intermediate_size": width})
    assert vllm_refuses(ranks, kv_heads, [width]) == (words is not None)
    found = refused(model, ranks)
    assert found is None if words is None else words in found


def test_experts_are_shared_or_cut_evenly():
    """Under expert parallel their width does not count; the dense width counts where a layer is dense."""
    widths = {"intermediate_size": 100, "moe_intermediate_size": 768, "num_experts": 4}
    heads = {"num_attention_heads": 24, "num_key_value_heads": 24}
    model = lambda **changes: Qwen3MoeConfig(**QWEN | heads | widths | changes)  # noqa: E731
    assert refused(model(), 8) is None
    assert "the 100 inputs of mlp.down_proj" in refused(model(mlp_only_layers=[0]), 8)
    assert "the 770 inputs of mlp.experts.0.down_proj" in refused(model(moe_intermediate_size=770), 4)
    assert refused(model(moe_intermediate_size=770), 4, parallel=True) is None
    assert re.search("768 inputs of mlp.experts.0.down_proj .*enable_expert_parallel", refused(model(), 4, "W4A16"))
    assert refused(model(), 4, "W4A16", parallel=True) is None
    # A width for each layer.
    assert "cuts the 768 inputs" in refused(
        Gemma3nTextConfig(num_hidden_layers=2, intermediate_size=[1024, 768]), 4, "W4A16"
    )


def test_a_run_checks_its_engine_ranks_without_a_scheme_too(tmp_path):
    Qwen3Config(**QWEN, vocab_size=151936, intermediate_size=8960).save_pretrained(tmp_path)
    args = config(tmp_path / "run", use_vllm=True, quant_scheme="none", vllm_tensor_parallel_size=3)
    with pytest.raises(ValueError, match="vllm_tensor_parallel_size=3"):
        check_run(str(tmp_path), args, {})
    args.vllm_tensor_parallel_size = 2  # control
    check_run(str(tmp_path), args, {})


@pytest.mark.parametrize(
    ("kind", "scheme", "eager"),
    [("qwen3_moe", "FP8_DYNAMIC", True), ("qwen3_moe", "W4A16", False), ("qwen3", "FP8_DYNAMIC", False)],
)
def test_experts_with_quantized_activations_run_without_graphs(tiny_model, caplog, kind, scheme, eager):
    kwargs = default_engine_kwargs(apply_quantization(tiny_model(kind, num_hidden_layers=1), scheme))
    assert kwargs == ({"enforce_eager": True} if eager else {})
    assert ("without CUDA graphs" in caplog.text) == eager


def test_layers_that_the_engine_merges_need_one_scheme(tiny_model):
    """vLLM says so too, after it has loaded a model: 'Found different quantization schemes for the shards'."""
    fp8, w4a16 = resolve_scheme("FP8_DYNAMIC"), resolve_scheme("W4A16", 32)
    plan = single_group(fp8, ["re:.*proj$"], ["lm_head"])
    check_merged_layers(apply_quantization(tiny_model(), plan))

    ignored = apply_quantization(tiny_model(), fp8, ignore=("lm_head", "re:.*k_proj"))
    words = "k_proj.* of 'model.layers.0.self_attn' .*q_proj FP8_DYNAMIC, k_proj high precision, v_proj FP8_DYNAMIC"
    with pytest.raises(ValueError, match=words):
        check_merged_layers(ignored)

    w4a16.targets, fp8.targets = ["re:.*gate_proj$"], ["re:.*(self_attn|up_proj|down_proj).*"]
    mixed = single_group(fp8, fp8.targets, ["lm_head"])
    mixed.config_groups = {"group_0": w4a16, "group_1": fp8}
    with pytest.raises(ValueError, match="gate_proj W4A16 in groups of 32, up_proj FP8_DYNAMIC"):
        check_merged_layers(apply_quantization(tiny_model(), mixed))
