"""`qarl_trl.validate.parallel`: groups of weights that the GPUs of one engine would cut."""

import pytest
import torch
from configs import config
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from qarl_trl.quant import apply_quantization
from qarl_trl.validate.layers import check_layers
from qarl_trl.validate.parallel import check_parallel


SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def engine(folder, ranks, **changes):
    """The settings of a run with an engine on several GPUs."""
    return config(folder, **{"use_vllm": True, "vllm_tensor_parallel_size": ranks} | changes)


def check(folder, ranks, experts=0, **changes):
    """The check of a model with layers of 768 inputs, and an attention whose output has 512."""
    args = engine(folder, ranks, **changes)
    with torch.device("meta"):
        if experts:
            sizes = SIZES | {"moe_intermediate_size": 768, "num_experts": experts, "intermediate_size": 1024}
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    check_parallel(apply_quantization(model, args.quant_plan()), args)


@pytest.mark.parametrize(
    ("scheme", "ranks", "experts", "words"),
    [
        ("W4A16", 4, 0, "groups of 128 inputs, got 192 of the 768 .*: 64 or vllm_tensor_parallel_size: 2."),
        ("W8A16", 4, 0, "quant_group_size: 64 or vllm_tensor_parallel_size: 2."),
        # The group size has no choice.
        ("W4AFP8", 4, 0, "Set vllm_tensor_parallel_size: 2."),
        ("FP8_BLOCK", 4, 0, "groups of 128 inputs, .*Set vllm_tensor_parallel_size: 2."),
        ("NVFP4A16", 32, 0, "groups of 16 inputs, got 24 .*Set vllm_tensor_parallel_size: 16."),
        ("W4A16", 4, 4, "groups of 128 inputs, got 192 of the 768 .*: 64 or vllm_tensor_parallel_size: 2."),
        ("FP8_BLOCK", 4, 4, "groups of 128 inputs, .*Set vllm_tensor_parallel_size: 2."),
    ],
)
def test_a_group_that_gpus_would_cut_is_refused(tmp_path, scheme, ranks, experts, words):
    layer = r"mlp\.experts\.0\.down_proj" if experts else r"mlp\.down_proj"
    for pattern in (words, layer):
        with pytest.raises(ValueError, match=pattern):
            check(tmp_path, ranks, experts, quant_scheme=scheme)

    check(tmp_path, ranks // 2, experts, quant_scheme=scheme)  # control


def test_what_is_advised_fits_all_layers(tmp_path):
    # Of 512 inputs each of eight GPUs would have 64, and of 768 it would have 96.
    with pytest.raises(ValueError, match="self_attn.o_proj. Set quant_group_size: 32 or vllm_tensor_parallel_size: 2"):
        check(tmp_path, 8)
    check(tmp_path, 8, quant_group_size=32)
    check(tmp_path, 2)


def test_what_has_no_group_to_cut_is_let_pass(tmp_path):
    check(tmp_path, 4, quant_group_size=-1)
    check(tmp_path, 4, quant_scheme="FP8_DYNAMIC")
    check(tmp_path, 4, quant_ignore=["lm_head", r"re:.*down_proj"])
    check(tmp_path, 4, use_vllm=False)

    # Only what is split: whole experts are not.
    whole_experts = {"vllm_engine_kwargs": {"enable_expert_parallel": True}}
    check(tmp_path, 4, experts=4, **whole_experts)
    with pytest.raises(ValueError, match="of the 768 inputs"):
        check(tmp_path, 4, **whole_experts)


def test_a_run_is_refused_before_its_weights_load(tmp_path):
    args = engine(tmp_path, 4)
    with pytest.raises(ValueError, match="got 192 of the 768 inputs"):
        check_layers(Qwen3Config(**SIZES), args.quant_plan(), args, None)

    check_layers(Qwen3Config(**SIZES), args.quant_plan(), engine(tmp_path, 2), None)  # control
