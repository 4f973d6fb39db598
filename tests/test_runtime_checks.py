"""`qarl_trl.runtime_checks`: what a loaded model or a step shows stops the run, with words that say what to do."""

import pytest
import torch
from configs import config
from peft import LoraConfig, get_peft_model

from qarl_trl.export import save_low_bit
from qarl_trl.llmcompressor.quantized_start import load_masters, quantized_source
from qarl_trl.quant import apply_quantization, iter_low_bit_weights
from qarl_trl.runtime_checks import (
    check_first_codes,
    check_layers_ran,
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


# First codes from a quantized checkpoint ------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "exact"), [("W4A16", True), ("FP8_DYNAMIC", True), ("W8A16", False)])
def test_masters_that_do_not_give_the_checkpoint_back_stop_the_run(tiny_model, tmp_path, caplog, scheme, exact):
    save_low_bit(apply_quantization(tiny_model(), scheme), None, tmp_path)
    source = quantized_source(str(tmp_path))
    model = apply_quantization(load_masters(source.name), source.plan(), qparams=source.qparams())
    with caplog.at_level("WARNING"):
        check_first_codes(model, source)
    assert ("one step beside" in caplog.text) == (not exact)
    if exact:  # control
        with torch.no_grad():
            weight = model.model.layers[1].mlp.up_proj.weight
            weight[0, 0] = -weight[0, 0] if weight[0, 0] else weight.abs().max()
        with pytest.raises(RuntimeError, match=r"1 codes of layer 'model.layers.1.mlp.up_proj' differ"):
            check_first_codes(model, source)


@pytest.mark.parametrize("kind", ["qwen3_moe", "olmoe"])
@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "FP8_DYNAMIC"])
def test_first_codes_of_experts_are_compared(tiny_model, tmp_path, kind, scheme):
    before = apply_quantization(tiny_model(kind, num_hidden_layers=1), scheme)
    save_low_bit(before, None, tmp_path)
    source = quantized_source(str(tmp_path))
    model = apply_quantization(load_masters(source.name), source.plan(), qparams=source.qparams())
    check_first_codes(model, source)
    stream = dict(iter_low_bit_weights(model))
    for name, tensor in iter_low_bit_weights(before):  # by value: float8 has two zeros
        assert torch.equal(stream[name].float(), tensor.float())

    with torch.no_grad():  # control: expert 2's part of the fused parameter
        weight = model.model.layers[0].mlp.experts.down_proj
        weight[2, 0, 0] = -weight[2, 0, 0] if weight[2, 0, 0] else weight.abs().max()
    with pytest.raises(RuntimeError, match=r"1 codes of layer 'model.layers.0.mlp.experts.2.down_proj' differ"):
        check_first_codes(model, source)


def test_first_codes_below_an_adapter_are_compared_without_it(tiny_model, tmp_path):
    save_low_bit(apply_quantization(tiny_model(), "W4A16"), None, tmp_path)
    source = quantized_source(str(tmp_path))
    adapter = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(load_masters(source.name), adapter)
    apply_quantization(model, source.plan(), qparams=source.qparams())
    layer = model.base_model.model.model.layers[1].mlp.up_proj
    check_first_codes(model, source)
    assert not layer._cached_slots  # the codes of the base are not kept beside those of the policy
    assert not torch.equal(layer.low_bit().codes, source.codes("model.layers.1.mlp.up_proj"))

    with torch.no_grad():  # control
        weight = layer.base_layer.weight
        weight[0, 0] = -weight[0, 0] if weight[0, 0] else weight.abs().max()
    with pytest.raises(RuntimeError, match=r"1 codes of layer 'model.layers.1.mlp.up_proj' differ"):
        check_first_codes(model, source)
