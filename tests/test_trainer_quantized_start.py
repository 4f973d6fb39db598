"""`QaRLTrainer` from a quantized checkpoint: master weights are what it decompresses to, in its scheme or another."""

from __future__ import annotations

import shutil

import pytest
import torch
from slow.toys import stored_tensors
from toy_runs import adapter, changed, make
from transformers import AutoModelForCausalLM

from qarl_trl.quant import iter_low_bit_weights, quantized_modules
from qarl_trl.quant.layers.linear import QuantLinear
from qarl_trl.quant.start import load_master_weights
from qarl_trl.tools.evaluate.checkpoint import find_checkpoint
from qarl_trl.tools.export.command import main as export


def packed_weights(trainer) -> dict[str, torch.Tensor]:
    """`weight_packed` of each quantized layer."""
    return {name: layer.low_bit().tensors["weight_packed"] for name, layer in quantized_modules(trainer.model)}


def test_a_merged_adapter_starts_from_a_quantized_checkpoint(gptq_model, tmp_path, capsys):
    run = tmp_path / "run"
    trainer = make(gptq_model, run, adapter(), quant_scheme="checkpoint", learning_rate=2e-2, max_steps=2)
    before = dict(iter_low_bit_weights(trainer.model))
    assert before.keys() == stored_tensors(gptq_model).keys()

    trainer.train()

    # Of the layers with an adapter, and no others: quantizing what was not trained changes no code.
    moved = changed(before, dict(iter_low_bit_weights(trainer.model)))
    layers = {name.rpartition(".")[0].removeprefix("model.layers.0.") for name in moved}
    assert layers == {"self_attn.q_proj", "mlp.down_proj"}

    trainer.save_model()
    shutil.rmtree(run / "low_bit")
    export([str(run), str(tmp_path / "low"), "--scheme", "W4A16"])
    # The two side by side never were the policy.
    assert "base and adapter" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="got another adapter"):
        find_checkpoint(str(run))


def test_the_reference_model_is_the_decompressed_checkpoint(gptq_model, tmp_path):
    trainer = make(gptq_model, tmp_path, quant_scheme="checkpoint", beta=0.1)

    assert not changed(trainer.ref_model.state_dict(), trainer.model.state_dict())
    # It is the start in high precision, as for a run from plain weights.
    for module in trainer.ref_model.modules():
        assert not isinstance(module, QuantLinear)
    trainer.train()


def test_master_weights_that_the_user_loaded_are_taken_too(gptq_model, tmp_path):
    by_name = make(gptq_model, tmp_path / "a", quant_scheme="checkpoint")

    loaded = make(load_master_weights(gptq_model), tmp_path / "b", quant_scheme="checkpoint")

    assert not changed(packed_weights(by_name), packed_weights(loaded))


def test_a_quantized_model_that_the_user_loaded_is_refused(gptq_model, tmp_path):
    # transformers keeps its layers compressed: there are no weights to train.
    model = AutoModelForCausalLM.from_pretrained(gptq_model)

    with pytest.raises(ValueError, match=r"(?s)quantized already.*load_master_weights"):
        make(model, tmp_path)


def test_another_scheme_quantizes_the_master_weights_again_and_says_so(gptq_model, tmp_path, caplog):
    with caplog.at_level("WARNING"):
        trainer = make(gptq_model, tmp_path, quant_scheme="FP8_DYNAMIC")

    assert "decompressed and quantized again, by quant_scheme='FP8_DYNAMIC'" in caplog.text
    layers = dict(quantized_modules(trainer.model))
    assert layers
    for name, layer in layers.items():
        assert layer.scheme.weights.num_bits == 8, name


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("dense_model", {"quant_scheme": "checkpoint"}, "needs a quantized model"),
        ("gptq_model", {"quant_scheme": "none", "loss_type": "grpo"}, "is quantized, and quant_scheme is 'none'"),
    ],
)
def test_a_start_that_does_not_fit_the_model_is_refused(request, tmp_path, kind, changes, words):
    with pytest.raises(ValueError, match=words):
        make(request.getfixturevalue(kind), tmp_path, **changes)
