"""`qarl_trl.learner.probe`: which models are packed, by what they say and by what they do."""

import contextlib

import pytest
import torch
import transformers
from peft import PromptTuningConfig, get_peft_model
from transformers import Mamba2Config, Qwen3Config, RecurrentGemmaConfig, RwkvConfig
from trl.trainer.utils import add_fused_lm_head

from qarl_trl.learner import attention
from qarl_trl.learner.logps import PackedPasses
from qarl_trl.learner.probe import layers_that_run_on, unfit


SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
BLOOM = {"vocab_size": 32, "hidden_size": 32, "n_layer": 1, "n_head": 2}
GPT2 = {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}


def make(family, architecture="ForCausalLM", **sizes):
    """A random model of a family of transformers."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes)
    return getattr(transformers, family + architecture)(config)


def measured(model):
    """What the trainer's measurement finds wrong; the config finds nothing."""
    add_fused_lm_head(model)
    assert unfit(model) is None
    passes = PackedPasses(1000, contextlib.nullcontext, lambda tensor: tensor, lambda wrapped: wrapped)
    attention.use_packed_attention(model)
    model.train()

    reason = passes._crossing(model, model)

    # It measures in evaluation mode, where dropout is off, and must leave the model as it was.
    assert model.training
    return reason


# By the config ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "architecture", "sizes", "why"),
    [
        ("Qwen3Next", "ForCausalLM", SIZES, "layers of type 'linear_attention', which run on"),
        ("Bloom", "ForCausalLM", BLOOM, "no position_ids"),
        ("Qwen2_5_VL", "ForConditionalGeneration", {}, "other parts than a text model"),
    ],
)
def test_what_a_config_says_is_believed(family, architecture, sizes, why):
    # Without memory: the models of these families are large as they come.
    with torch.device("meta"):
        model = make(family, architecture, **sizes)

    assert why in unfit(model)


def test_learned_tokens_and_an_attention_of_the_whole_row_are_not_packed(tiny_model):
    adapter = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)

    assert "learned tokens" in unfit(get_peft_model(tiny_model(), adapter))
    assert "eager attention would compute the square" in unfit(tiny_model(attn_implementation="eager"))
    assert unfit(tiny_model()) is None


# By a measurement ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "olmoe"])
def test_decoders_whose_attention_is_told_are_fit(tiny_model, kind):
    assert measured(tiny_model(kind, dtype=torch.bfloat16)) is None


def test_absolute_positions_and_windows_are_fit():
    assert measured(make("GPT2", "LMHeadModel", **GPT2)) is None
    assert measured(make("Gemma2", **SIZES, sliding_window=4, head_dim=16)) is None


def test_layers_that_do_not_tell_their_attention_are_padded():
    assert "do not tell their attention" in measured(make("StableLm", **SIZES))


def forget_lengths(forward):
    """The forward of an attention layer that attends to the whole row."""

    def without(*args, sequence_lengths=None, **kwargs):
        kwargs["attention_mask"] = None
        return forward(*args, **kwargs)

    return without


@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_layer_that_reaches_across_is_noticed(tiny_model, kind, dtype):
    model = tiny_model(kind, dtype=dtype)
    # The first layer is whole, so a probe of one layer alone would find nothing.
    for layer in model.model.layers[1:]:
        layer.self_attn.forward = forget_lengths(layer.self_attn.forward)

    assert "with its neighbour" in measured(model)


def test_positions_that_run_on_are_noticed_where_they_are_absolute():
    # Rotary positions are relative: those that run on give each sequence the same log-probs. GPT-2's are absolute, and
    # with weights of the usual size (0.02) a wrong position hardly counts.
    model = make("GPT2", "LMHeadModel", **GPT2, initializer_range=0.2)

    def run_on(module, args, kwargs):
        if "position_ids" in kwargs:
            kwargs["position_ids"] = torch.arange(kwargs["position_ids"].shape[1])[None]
        return args, kwargs

    model.transformer.register_forward_pre_hook(run_on, with_kwargs=True)

    assert "when it is packed" in measured(model)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Qwen3Config(), None),
        (RecurrentGemmaConfig(block_types=("attention",)), None),
        (RecurrentGemmaConfig(), "it has layers of type 'recurrent', which run on into the next sequence"),
        (RwkvConfig(), "a rwkv runs on into the next sequence"),
        (Mamba2Config(), "a mamba2 runs on into the next sequence"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_layers_that_read_their_neighbours_are_known_by_the_config(config, reason):
    assert layers_that_run_on(config) == reason
