"""`qarl_trl.validate.adapters`: adapters that can be trained, and the words for those that cannot."""

import pytest
import torch
from configs import config
from huggingface_hub import constants
from peft import AdaLoraConfig, IA3Config, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from qarl_trl import QaRLTrainer
from qarl_trl.export import save_low_bit
from qarl_trl.quant import apply_quantization
from qarl_trl.validate import check_arguments, check_run, config_of
from qarl_trl.validate.adapters import check_adapter
from qarl_trl.validate.layers import check_layers


def lora(**changes):
    """The configuration of a small adapter for the queries of a model."""
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
    adapter = lora(**changes)
    check_adapter(adapter, config(tmp_path))

    # From a file peft fills fields that nobody set with empty containers, which must count as unset.
    adapter.save_pretrained(tmp_path)
    check_adapter(LoraConfig.from_pretrained(tmp_path), config(tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, ["use_dora=True"]),
        ({"lora_dropout": 0.05}, ["lora_dropout=0.05", "engine's weight", "ModelConfig has 0.05"]),
        ({"bias": "all"}, ["bias='all'"]),
        ({"ensure_weight_tying": True, "modules_to_save": ["lm_head"]}, ["ensure_weight_tying=True", "leave"]),
        ({"target_parameters": ["experts.down_proj"]}, ["target_parameters"]),
        ({"fan_in_fan_out": True}, ["fan_in_fan_out=True"]),
        ({"layer_replication": [(0, 2), (1, 2)]}, ["layer_replication"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights='pissa'"]),
        # A list, as people write it in a recipe.
        ({"target_modules": "q_proj, v_proj"}, ["target_modules must be a list", "'q_proj, v_proj'"]),
        # Two causes get the advice for both.
        ({"use_dora": True, "lora_dropout": 0.1}, ["use_dora=True", "Leave use_dora out. Set lora_dropout: 0.0"]),
        # peft makes a set of them for a mixture. So many that its own order, another in each process, would show.
        ({"target_parameters": set("hgfedcba")}, ["target_parameters=['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h']"]),
    ],
)
def test_adapters_that_cannot_be_aligned_are_refused_before_a_model_loads(tmp_path, changes, words):
    # No model has this name, so a refusal that came after the load would be another error.
    with pytest.raises(ValueError) as error:
        QaRLTrainer("no/such-model", reward_funcs=[], args=config(tmp_path), peft_config=lora(**changes))
    for word in words:
        assert word in str(error.value)
    # Advice about a setting that is not the cause would mislead.
    assert ("TRL's ModelConfig has 0.05" in str(error.value)) == ("lora_dropout" in changes)

    # Control: without quantization it is TRL's own business.
    without_quantization = config(tmp_path, quant_scheme="none")
    check_arguments("no/such-model", without_quantization, {"peft_config": lora(**changes)})


@pytest.mark.parametrize("other", [IA3Config(), AdaLoraConfig(total_step=10)], ids=lambda other: type(other).__name__)
def test_other_kinds_of_adapters_are_refused(tmp_path, other):
    with pytest.raises(ValueError, match=f"{type(other).__name__}, and only LoRA"):
        check_adapter(other, config(tmp_path))


@pytest.mark.parametrize("copied", ["lm_head", "embed_tokens", "model"])
def test_a_copy_of_a_tied_weight_is_refused_before_the_model_loads(tmp_path, tiny_model, copied):
    """Learner and engine would drift apart: 0.04 nats were seen after the first updates, and at sync 1 nothing."""

    def check(tied: bool, **changes):
        path = tmp_path / str(tied)
        tiny_model(num_hidden_layers=1, tie_word_embeddings=tied).save_pretrained(path)
        check_run(str(path), config(tmp_path / "run"), {"peft_config": lora(**changes)})

    # `model` contains the embedding, which is one of the two names of the shared weight.
    with pytest.raises(ValueError, match="train a copy of '(model.embed_tokens|lm_head)'.* share one weight") as error:
        check(True, modules_to_save=[copied])
    assert "\n" not in str(error.value)

    # Controls: another module, and two weights.
    check(True, modules_to_save=["norm"])
    check(False, modules_to_save=[copied])


def test_a_module_to_save_that_is_not_there_is_refused_before_the_model_loads(tmp_path, tiny_model):
    """peft takes the name in silence, and trains nothing by it."""
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "model")

    def check(name: str):
        check_run(str(tmp_path / "model"), config(tmp_path / "run"), {"peft_config": lora(modules_to_save=[name])})

    with pytest.raises(ValueError, match="no module 'lm_haed'"):
        check("lm_haed")
    check("lm_head")  # control
    # TRL makes a reward model of a model that has no such head yet.
    check("score")


def test_muon_and_lora_are_refused_together(tmp_path):
    with pytest.raises(ValueError, match="optim_muon must be False with LoRA"):
        check_adapter(lora(), config(tmp_path, optim_muon=True))


def test_the_adapters_of_a_peft_model_are_checked_too(tmp_path, tiny_model):
    with_dropout = get_peft_model(tiny_model(num_hidden_layers=1), lora(lora_dropout=0.1))
    with pytest.raises(ValueError, match=r"lora_dropout=0\.1"):
        check_arguments(with_dropout, config(tmp_path), {})

    plain = get_peft_model(tiny_model(num_hidden_layers=1), lora())
    check_arguments(plain, config(tmp_path), {})  # control


def test_an_adapter_that_transformers_loads_into_the_layers_is_refused(tmp_path, tiny_model):
    """Its tensors would be lost in every sync and file: a second adapter of the same name replaces it."""
    folder = tmp_path / "start"
    tiny_model(num_hidden_layers=1).save_pretrained(folder)
    check_arguments(str(folder), config(tmp_path), {"peft_config": lora()})  # control
    get_peft_model(tiny_model(num_hidden_layers=1), lora()).save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)

    # Also after peft has wrapped what transformers loaded.
    for model in (loaded, get_peft_model(loaded, lora(), adapter_name="second")):
        with pytest.raises(ValueError, match=r"without a PeftModel.* Load the base alone"):
            check_arguments(model, config(tmp_path), {})
    with pytest.raises(ValueError, match="must be a model, got one with an adapter"):
        check_arguments(str(folder), config(tmp_path), {"peft_config": lora()})


def trains(model, part):
    """Train the parameters with a part of a name, beside the adapter."""
    for name, parameter in model.named_parameters():
        if part in name and "original_module" not in name:
            parameter.requires_grad = True
    return model


def test_parameters_that_are_trained_beside_an_adapter_and_not_saved_with_it_are_refused(tmp_path, tiny_model):
    """peft's files have no norms: a resumed run would begin with those of the base."""
    args = config(tmp_path)
    norms = trains(get_peft_model(tiny_model(), lora()), "norm")

    with pytest.raises(ValueError, match=r"trains \d+ parameters beside .* first '.*norm\.weight'.*modules_to_save"):
        check_arguments(norms, args, {})

    # Controls: copies of them, an adapter of another name, and an embedding that has grown, which peft saves.
    copies = get_peft_model(tiny_model(), lora(modules_to_save=["input_layernorm"]))
    named = get_peft_model(tiny_model(), lora(), adapter_name="policy")
    tiny_model().save_pretrained(tmp_path / "start")
    grown = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    grown.resize_token_embeddings(72)
    for model in (copies, named, trains(get_peft_model(grown, lora()), "embed_tokens")):
        check_arguments(model, args, {})


@pytest.mark.parametrize(
    ("changes", "adapter", "words"),
    [
        ({}, None, "needs an adapter .*, and the name of a model"),
        ({}, {"modules_to_save": ["lm_head"]}, "vLLM serves no adapter with modules_to_save"),
        ({}, {"rank_pattern": {"q_proj": 2}}, "vLLM serves no adapter with rank_pattern"),
        ({}, {"alpha_pattern": {"q_proj": 2}}, "vLLM serves no adapter with alpha_pattern"),
        ({}, {"use_dora": True}, "use_dora=True"),
        ({}, {"target_modules": ["embed_tokens"]}, "'model.embed_tokens'.*is not quantized"),
        # Without an engine any rank trains. 512 is the largest that vLLM takes.
        ({"use_vllm": True}, {"r": 1024}, "r must be at most 512 for vLLM"),
    ],
)
def test_what_a_frozen_base_does_not_take_is_one_line_before_a_model_loads(
    tmp_path, tiny_model, changes, adapter, words
):
    path = tmp_path / "model"
    tiny_model(num_hidden_layers=1).save_pretrained(path)
    # Control: no check reads the weights, which are cut off.
    for file in path.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:1000])

    args = config(tmp_path / "run", lora_base="frozen", **changes)
    peft_config = None if adapter is None else lora(**adapter)

    with pytest.raises(ValueError, match=words) as error:
        # The settings alone, then the layers: as `check_run` calls them.
        check_arguments(str(path), args, {"peft_config": peft_config})
        check_layers(config_of(str(path), args), args.quant_plan(), args, peft_config)
    assert "\n" not in str(error.value)


ROPE = {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}}


def test_a_base_in_a_subfolder_is_refused_because_an_adapter_cannot_name_it(tmp_path, tiny_model):
    """Export and `eval` would take the model beside it."""
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "two" / "q")

    def check(model, **loading):
        args = config(tmp_path / "run", model_init_kwargs={"dtype": "float32"} | loading)
        check_run(str(model), args, {"peft_config": lora()})

    with pytest.raises(ValueError, match=f"cannot name a base in a subfolder.*Name {tmp_path}/two/q as the model"):
        check(tmp_path / "two", subfolder="q")

    # Controls: as the message says, and without an adapter.
    check(tmp_path / "two" / "q")
    check_run(str(tmp_path / "two"), config(tmp_path / "run", model_init_kwargs={"subfolder": "q"}), {})


def test_a_config_that_loading_changes_is_said_to_be_in_no_file_of_an_adapter(tmp_path, tiny_model, caplog):
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "model")

    def check(adapter, **loading):
        caplog.clear()
        args = config(tmp_path / "run", model_init_kwargs={"dtype": "float32"} | loading)
        check_run(str(tmp_path / "model"), args, {"peft_config": adapter})
        return "rope_parameters of the base, which no file of an adapter says" in caplog.text

    assert check(lora(), **ROPE)
    # transformers makes the same entry of the older name.
    assert check(lora(), rope_scaling={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    # Controls: other arguments of loading, and without an adapter.
    assert not check(lora(), attn_implementation="eager", use_cache=False)
    assert not check(None, **ROPE)


def test_a_stored_frozen_base_is_refused_with_another_config(tmp_path, tiny_model):
    """Served by the command of its card, the two would be another policy."""
    model = apply_quantization(tiny_model(num_hidden_layers=1), "W4A16")
    save_low_bit(model, None, tmp_path / "model")

    def check(**loading):
        settings = {"lora_base": "frozen", "quant_scheme": "checkpoint", "model_init_kwargs": loading}
        check_run(str(tmp_path / "model"), config(tmp_path / "run", **settings), {"peft_config": lora()})

    with pytest.raises(ValueError, match="change rope_parameters of the base.*another policy"):
        check(**ROPE)
    check()  # control


def test_a_resized_embedding_of_a_model_of_the_hub_is_refused_offline(tmp_path, tiny_model, monkeypatch):
    """peft would assume that the vocabulary was not modified, and no file would have the new rows."""
    cache = tmp_path / "cache"
    folder = cache / "models--some--model"
    commit = "a" * 40
    tiny_model(num_hidden_layers=1).save_pretrained(folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    model = AutoModelForCausalLM.from_pretrained("some/model")

    def check(offline, **changes):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        check_arguments(model, config(tmp_path / "run"), {"peft_config": lora(**changes)})

    rows = model.get_input_embeddings().num_embeddings
    check(True)  # control: as it was
    # As ZeRO-3 cuts it.
    embedding = model.get_input_embeddings().weight
    values = embedding.data
    embedding.ds_shape = values.shape
    embedding.data = torch.empty(0)
    check(True)
    embedding.data = values
    del embedding.ds_shape
    model.resize_token_embeddings(rows + 8)

    with pytest.raises(ValueError, match=f"has {rows + 8} rows, that of some/model on the Hub {rows}"):
        check(True)
    # Controls: peft can look, the adapter has the embedding, and from a folder.
    check(False)
    check(True, modules_to_save=["embed_tokens", "lm_head"])
    model.config._name_or_path = str(folder / "snapshots" / commit)
    check(True)
