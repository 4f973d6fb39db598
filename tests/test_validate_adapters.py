"""`qarl_trl.validate.check_adapter`: adapters that can be trained, and the words for those that cannot."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from configs import config
from peft import AdaLoraConfig, IA3Config, LoraConfig, get_peft_model

from qarl_trl import QaRLTrainer
from qarl_trl.trainer import prepare
from qarl_trl.validate import check_adapter, check_arguments, check_layers, config_of


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
    check_adapter(lora(**changes), config(tmp_path))
    lora(**changes).save_pretrained(tmp_path)
    check_adapter(LoraConfig.from_pretrained(tmp_path), config(tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, ["use_dora=True"]),
        ({"lora_dropout": 0.05}, ["lora_dropout=0.05", "engine's weight", "ModelConfig has 0.05"]),
        ({"bias": "all"}, ["bias='all'"]),
        ({"target_parameters": ["experts.down_proj"]}, ["target_parameters"]),
        ({"fan_in_fan_out": True}, ["fan_in_fan_out=True"]),
        ({"layer_replication": [(0, 2), (1, 2)]}, ["layer_replication"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights='pissa'"]),
        ({"use_dora": True, "lora_dropout": 0.1}, ["use_dora=True", "lora_dropout=0.1", "Leave"]),
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
            check_adapter(other, config(tmp_path))


def test_muon_and_lora_are_refused_together(tmp_path):
    with pytest.raises(ValueError, match="optim_muon must be False with LoRA"):
        check_adapter(lora(), config(tmp_path, optim_muon=True))


def test_the_adapters_of_a_peft_model_are_checked_too(tmp_path, tiny_model):
    model = get_peft_model(tiny_model(num_hidden_layers=1), lora(lora_dropout=0.1))
    with pytest.raises(ValueError, match=r"lora_dropout=0\.1"):
        check_arguments(model, config(tmp_path), {})
    check_arguments(get_peft_model(tiny_model(num_hidden_layers=1), lora()), config(tmp_path), {})


# A frozen base -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "adapter", "words"),
    [
        ({}, None, "needs peft_config, and the name of a model"),
        ({}, {"modules_to_save": ["lm_head"]}, "vLLM serves no adapter with modules_to_save"),
        ({}, {"rank_pattern": {"q_proj": 2}}, "vLLM serves no adapter with rank_pattern"),
        ({}, {"alpha_pattern": {"q_proj": 2}}, "vLLM serves no adapter with alpha_pattern"),
        ({}, {"use_dora": True}, "use_dora=True"),
        ({}, {"target_modules": ["embed_tokens"]}, "'model.embed_tokens'.*is not quantized"),
        ({"use_vllm": True}, {"r": 1024}, "r must be at most 512 for vLLM"),
        ({"use_vllm": True, "vllm_mode": "server", "sync_folder": "s"}, {}, "with vllm_mode='colocate'"),
    ],
)
def test_what_a_frozen_base_does_not_take_is_one_line_before_a_model_loads(
    tmp_path, tiny_model, changes, adapter, words
):
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    for file in tmp_path.glob("model/*.safetensors"):  # control: it is never read
        file.write_bytes(file.read_bytes()[:1000])
    args = config(tmp_path / "run", lora_base="frozen", **{**changes, "sync_folder": changes.get("sync_folder")})
    given = {"peft_config": None if adapter is None else lora(**adapter)}
    with pytest.raises(ValueError, match=words) as error:
        check_arguments(str(tmp_path / "model"), args, given)
        check_layers(config_of(str(tmp_path / "model"), args), args.quant_plan(), args, given["peft_config"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("version", "words"),
    [("1", "Use FSDP2"), ("2", None), ("zero3", "lora_base='frozen' runs on one process, DDP or FSDP2")],
)
def test_a_frozen_base_has_no_shards_but_those_of_fsdp2(tmp_path, monkeypatch, version, words):
    args = config(tmp_path, lora_base="frozen")
    check_arguments("model", args, {"peft_config": lora()})  # control: DDP looks no other
    if version == "zero3":
        args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    else:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # as `accelerate launch` does
        monkeypatch.setenv("FSDP_VERSION", version)
    with pytest.raises(ValueError, match=words) if words else nullcontext():
        check_arguments("model", args, {"peft_config": lora()})


@pytest.mark.parametrize("base", ["merged", "frozen"])
def test_an_output_layer_in_low_bits_is_refused_without_weights(tmp_path, tiny_model, base):
    """TRL's fused head would read its master weight, and the engine its quantized values."""
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    for ignore in (["lm_head"], []):  # control first
        args = config(tmp_path / "run", lora_base=base, quant_ignore=ignore)
        given = config_of(str(tmp_path / "model"), args), args.quant_plan(), args, lora()
        if ignore:
            check_layers(*given)
        else:
            with pytest.raises(ValueError, match="Add lm_head to quant_ignore") as error:
                check_layers(*given)
            assert "\n" not in str(error.value)


def test_a_loaded_model_with_an_output_layer_in_low_bits_is_refused(tmp_path, tiny_model):
    prepare(tiny_model(num_hidden_layers=1), config(tmp_path), None)  # control
    with pytest.raises(ValueError, match="Add lm_head to quant_ignore"):
        prepare(tiny_model(num_hidden_layers=1), config(tmp_path, quant_ignore=[]), None)


def test_experts_are_no_frozen_base(tmp_path, tiny_model):
    tiny_model("qwen3_moe", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    args = config(tmp_path / "run", lora_base="frozen")
    with pytest.raises(ValueError, match="needs linear layers, got the experts"):
        check_layers(config_of(str(tmp_path / "model"), args), args.quant_plan(), args, lora())
    given = config(
        tmp_path / "run", lora_base="frozen", quant_ignore=["lm_head", "re:.*experts.*", r"re:.*mlp\.gate$"]
    )
    check_layers(config_of(str(tmp_path / "model"), given), given.quant_plan(), given, lora())  # control
