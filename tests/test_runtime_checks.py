"""`qarl_trl.runtime_checks`: what a loaded model or a step shows stops the run, with words that say what to do."""

import pytest
import torch
from configs import config
from peft import LoraConfig, get_peft_model

from qarl_trl.quant import apply_quantization
from qarl_trl.quant.plan import single_group
from qarl_trl.quant.scheme import resolve_scheme
from qarl_trl.runtime_checks import (
    check_layers_ran,
    check_merged_layers,
    check_mismatch,
    check_model,
)


def test_a_model_that_is_quantized_already_is_refused(tiny_model):
    model = tiny_model(num_hidden_layers=1)
    check_model(model)
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match=r"gptq.*Start from the unquantized checkpoint"):
        check_model(model)


def test_adapters_without_a_peft_model_around_them_are_refused(tiny_model):
    model, adapter = tiny_model(num_hidden_layers=1), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model.add_adapter(adapter)
    with pytest.raises(ValueError, match=r"Wrap it with peft: peft\.PeftModel"):
        check_model(model)
    with pytest.raises(ValueError, match="LoRA layers without a PeftModel"):
        apply_quantization(model, "W4A16")
    check_model(get_peft_model(tiny_model(num_hidden_layers=1), adapter))


@pytest.mark.parametrize(("gap", "stops"), [(0.09, False), (0.1, False), (0.11, True), (float("nan"), True)])
def test_a_gap_above_the_threshold_stops_the_run_with_its_likely_causes(tmp_path, gap, stops):
    args = config(tmp_path, use_vllm=True, mismatch_abort_threshold=0.1, temperature=0.7)
    if not stops:
        return check_mismatch(gap, args)
    with pytest.raises(RuntimeError) as error:
        check_mismatch(gap, args)
    message = str(error.value)
    for cause in ("stale engine", "wrong scheme", "sampling parameters", "kernels"):
        assert cause in message
    for fact in ("mismatch_abort_threshold=0.1", "must both run 'W4A16'", "temperature=0.7", f"{gap:.4f} nats"):
        assert fact in message
    assert "quant_learner=False" not in message


def test_the_baseline_is_told_that_its_gap_is_the_point(tmp_path):
    args = config(tmp_path, use_vllm=True, mismatch_abort_threshold=0.1, quant_learner=False)
    with pytest.raises(RuntimeError, match=r"quant_learner=False: this gap is what the method removes"):
        check_mismatch(1.0, args)


def test_without_a_threshold_no_gap_stops(tmp_path):
    check_mismatch(float("nan"), config(tmp_path))


def test_a_bypassed_layer_is_named(tiny_model):
    model = apply_quantization(tiny_model(num_hidden_layers=1), "W4A16")
    tokens = torch.tensor([[3, 4, 5]])
    model(tokens)
    check_layers_ran(model)

    model = apply_quantization(tiny_model(num_hidden_layers=1), "W4A16")
    layer = model.model.layers[0].mlp.up_proj
    layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight)
    model(tokens)
    with pytest.raises(RuntimeError, match=r"1 quantized layers.*model\.layers\.0\.mlp\.up_proj.*quant_ignore"):
        check_layers_ran(model)


def test_the_baseline_has_no_low_bit_forward_to_miss(tiny_model):
    model = apply_quantization(tiny_model(num_hidden_layers=1), "W4A16", quantize_forward=False)
    model(torch.tensor([[3, 4, 5]]))
    check_layers_ran(model)


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
