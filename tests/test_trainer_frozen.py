"""`lora_base="frozen"` in `QaRLTrainer`: an adapter beside low-bit weights; its files, its base, and their export."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from slow.toys import logged, stored_tensors
from toy_runs import adapter, changed, make
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from qarl_trl.export.adapter_base import base_of, check_base
from qarl_trl.export.push import model_files
from qarl_trl.quant import apply_quantization, iter_low_bit_weights
from qarl_trl.quant.layers.frozen import adapter_tensors
from qarl_trl.quant.start import load_master_weights
from qarl_trl.rollout.vllm.adapters import engine_rank
from qarl_trl.tools.evaluate.checkpoint import find_checkpoint
from qarl_trl.tools.export.command import main as export


def beside_checkpoint(model: str, folder: Path, **changes):
    """A trainer of an adapter beside the weights of a quantized checkpoint."""
    return make(model, folder, adapter(), quant_scheme="checkpoint", lora_base="frozen", **changes)


def test_a_frozen_base_starts_at_the_checkpoint_and_stays(gptq_model, tmp_path):
    start = stored_tensors(gptq_model)
    trainer = beside_checkpoint(gptq_model, tmp_path, learning_rate=2e-2)
    assert not hasattr(trainer.model.config, "quantization_config")
    assert not changed(start, dict(iter_low_bit_weights(trainer.model)))
    factors = dict(adapter_tensors(trainer.model))

    trainer.train()

    assert not changed(start, dict(iter_low_bit_weights(trainer.model)))
    assert changed(factors, dict(adapter_tensors(trainer.model))) == factors.keys()

    # The factors alone, in float32: bfloat16 would lose small updates.
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    assert len(trained) == len(factors)
    for parameter in trained:
        assert parameter.dtype == torch.float32


@torch.no_grad()
def test_peft_loads_the_saved_adapter_beside_its_base(gptq_model, tmp_path):
    trainer = beside_checkpoint(gptq_model, tmp_path / "run", learning_rate=2e-2)
    with torch.enable_grad():
        trainer.train()
    trainer.save_model(tmp_path / "final")
    tokens = torch.tensor([[3, 4, 5, 6, 7]])
    expected = trainer.model.eval()(tokens).logits

    # peft wants a weight in each layer.
    plain = CompressedTensorsConfig(run_compressed=False)
    base = AutoModelForCausalLM.from_pretrained(gptq_model, quantization_config=plain, dtype=torch.bfloat16)
    loaded = PeftModel.from_pretrained(base, tmp_path / "final")

    assert loaded.peft_config["default"].base_model_name_or_path == gptq_model
    # Roundings of bfloat16 in other places.
    bound = 0.02 * expected.abs().max()
    assert (loaded(tokens).logits - expected).abs().max() < bound
    # Control: the adapter is larger than they are.
    with loaded.disable_adapter():
        assert (loaded(tokens).logits - expected).abs().max() > bound

    # The card says so: it leaves the base compressed.
    with pytest.raises(AttributeError, match="no attribute 'weight'"):
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "final")


def test_an_adapter_beside_a_checkpoint_is_saved_without_weights_of_its_base(gptq_model, tmp_path):
    trainer = beside_checkpoint(gptq_model, tmp_path / "run")

    trainer.save_model(tmp_path / "final")
    assert not (tmp_path / "final" / "low_bit").exists()

    trainer.create_model_card()
    card = (tmp_path / "run" / "README.md").read_text()
    # What vLLM takes for the adapter's r=4.
    assert engine_rank(4) == 8
    assert f"vllm serve path/to/{Path(gptq_model).name} --enable-lora --max-lora-rank 8 " in card

    trainer.save_model()
    pushed = model_files(trainer._model_output)
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md"} <= pushed.keys()


@pytest.mark.parametrize("revision", [None, "main"])
def test_an_adapter_names_the_commit_of_a_base_of_the_hub(dense_model, tmp_path, monkeypatch, revision):
    """Its branch may have moved when the adapter is exported."""
    commit = "a" * 40
    cached = tmp_path / "cache" / "models--some--model"
    make(dense_model, tmp_path / "dense").save_model(cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    beside_checkpoint("some/model", tmp_path / "run", model_init_kwargs={"revision": revision}).save_model()

    config = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "some/model"
    # A branch that the user names moves on.
    assert config["revision"] == commit


def test_the_reference_of_a_frozen_base_is_the_base(gptq_model, tmp_path):
    trainer = beside_checkpoint(gptq_model, tmp_path, beta=0.1, max_steps=2)
    assert trainer.ref_model is None

    trainer.train()

    kl = logged(trainer, "kl")
    assert kl[0] == 0.0
    assert kl[-1] > 0.0


# A base that the run quantized itself -------------------------------------------------------------------------------


def test_what_a_run_quantized_is_written_once_as_the_base_of_its_adapters(dense_model, tmp_path):
    run = tmp_path / "run"
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trainer = make(dense_model, run, adapter(), lora_base="frozen", **saving)
    trainer.train()
    base = run / "base"
    assert not changed(dict(iter_low_bit_weights(trainer.model)), stored_tensors(base))
    # By the first checkpoint.
    written = (base / "model.safetensors").stat().st_mtime_ns

    trainer.save_model()

    assert (base / "model.safetensors").stat().st_mtime_ns == written
    assert not (run / "checkpoint-1" / "base").exists()
    assert not (run / "checkpoint-1" / "low_bit").exists()
    for folder in (run, run / "checkpoint-1"):
        named, _ = base_of(folder)
        assert Path(named).resolve() == base.resolve()
        check_base(folder, base)

    card = (base / "README.md").read_text()
    assert "Quantized by rounding to nearest" in card
    assert "trained by reinforcement" not in card
    with pytest.raises(ValueError, match="base is quantized already"):
        export([str(base), str(tmp_path / "low")])

    final = tmp_path / "final"
    trainer.save_model(final)
    assert base_of(final) == (str(final / "base"), None)
    assert stored_tensors(final / "base").keys() == stored_tensors(base).keys()

    # A callback that keeps the best model alone deletes the one before.
    shutil.rmtree(final)
    trainer.save_model(final)
    check_base(final, final / "base")
    assert stored_tensors(final / "base").keys() == stored_tensors(base).keys()


def test_a_resumed_run_keeps_an_equal_base_and_writes_a_damaged_one_again(dense_model, tmp_path):
    """A kill while it is written would leave all checkpoints without their base."""
    saving = {"lora_base": "frozen", "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    make(dense_model, tmp_path, adapter(), **saving, max_steps=1).train()
    base = tmp_path / "base" / "model.safetensors"
    content = base.read_bytes()
    written = base.stat().st_mtime_ns

    make(dense_model, tmp_path, adapter(), **saving, max_steps=2).train(resume_from_checkpoint=True)
    assert base.stat().st_mtime_ns == written

    # One bit of the last weight: sizes and names are as they were.
    base.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    make(dense_model, tmp_path, adapter(), **saving, max_steps=3).train(resume_from_checkpoint=True)
    assert base.read_bytes() == content


def test_an_adapter_keeps_to_its_base(dense_model, tmp_path):
    """Another run may write its own base into the same folder."""
    run = tmp_path / "run"
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    make(dense_model, run, adapter(), lora_base="frozen", **saving).train()

    make(dense_model, run, adapter(), lora_base="frozen", quant_scheme="W8A16").save_model()

    check_base(run, run / "base")
    with pytest.raises(ValueError, match="other weights than the base beside which .*checkpoint-1"):
        export([str(run / "checkpoint-1"), str(tmp_path / "low")])
    shutil.rmtree(run / "base")
    with pytest.raises(FileNotFoundError, match="the base of the adapter in .*run, is missing"):
        export([str(run), str(tmp_path / "low")])


# Export -------------------------------------------------------------------------------------------------------------


def fill_adapter(model: torch.nn.Module, scale: float) -> None:
    """Random numbers for B, the same for each scale; with 0 the adapter changes nothing."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_().mul_(scale)


def test_a_merged_adapter_in_the_folder_of_a_frozen_one_is_not_taken_for_it(gptq_model, tmp_path):
    beside_checkpoint(gptq_model, tmp_path).save_model()
    assert find_checkpoint(str(tmp_path)) == (Path(gptq_model), tmp_path)  # control

    # Its policy is the merged and quantized model, and adapter and base are another one.
    make(gptq_model, tmp_path, adapter(), quant_scheme="checkpoint").save_model()

    with pytest.raises(ValueError, match="Give its low_bit/ folder"):
        find_checkpoint(str(tmp_path))
    # A file of the user with that name stays.
    (tmp_path / "base_config.json").write_text('{"mine": 1}')
    make(gptq_model, tmp_path, adapter(), quant_scheme="checkpoint").save_model()
    assert (tmp_path / "base_config.json").read_text() == '{"mine": 1}'

    # A frozen one in its place is one again.
    beside_checkpoint(gptq_model, tmp_path).save_model()
    assert find_checkpoint(str(tmp_path)) == (Path(gptq_model), tmp_path)


def test_an_export_merges_an_adapter_into_its_frozen_base_and_says_how_far_that_is(gptq_model, tmp_path, capsys):
    run = tmp_path / "run"
    low = tmp_path / "low"
    trainer = beside_checkpoint(gptq_model, run)

    def exported_nats(scale: float, scheme: str) -> float:
        """What an export says of an adapter of this size."""
        fill_adapter(trainer.model, scale)
        trainer.save_model()
        export([str(run), str(low), "--scheme", scheme])
        said = capsys.readouterr().out
        return float(re.search(r"is (\S+) nats per token from base and adapter", said)[1])

    base_in_8_bits = exported_nats(0.0, "W8A16")
    base_as_it_was = exported_nats(0.0, "W4A16")
    rounded_adapter = exported_nats(0.05, "W4A16")

    # An adapter of zeros leaves the rounding of its base, and that in 8 bits is finer.
    assert base_in_8_bits < base_as_it_was < rounded_adapter
    merged = get_peft_model(load_master_weights(gptq_model, dtype="bfloat16"), adapter())
    # Not strict: the base is there already, in other tensors than the trainer's.
    factors = {name: tensor for name, tensor in trainer.model.state_dict().items() if "lora" in name}
    missing = merged.load_state_dict(factors, strict=False)
    assert not missing.unexpected_keys
    expected = dict(iter_low_bit_weights(apply_quantization(merged, "W4A16")))
    assert not changed(expected, stored_tensors(low))


def test_the_distance_of_an_export_does_not_depend_on_how_its_base_would_sample(odd_adapter, tmp_path, capsys):
    """It is taken over answers from the whole distribution."""
    file = odd_adapter / "base" / "generation_config.json"
    before = file.read_text()
    of_user = {"do_sample": True, "temperature": 0.01, "repetition_penalty": 1.3, "num_return_sequences": 2}

    said = []
    for changes in ({}, of_user):
        file.write_text(json.dumps(json.loads(before) | changes))
        export([str(odd_adapter), str(tmp_path / "low")])
        said.append(re.search(r"is (\S+) nats per token from base and adapter", capsys.readouterr().out)[1])
    # The folder is of all tests of this file.
    file.write_text(before)

    assert said[0] == said[1]


def test_an_export_compares_no_more_tokens_than_the_context_has(odd_adapter, tmp_path, monkeypatch):
    from qarl_trl.rollout.sync_check import learner_logps as scoring

    config = odd_adapter / "base" / "config.json"
    before = config.read_text()
    lengths = []
    score = scoring.learner_logps

    def noted(model, token_ids):
        lengths.append(len(token_ids))
        return score(model, token_ids)

    monkeypatch.setattr(scoring, "learner_logps", noted)
    config.write_text(json.dumps(json.loads(before) | {"max_position_embeddings": 16}))
    export([str(odd_adapter), str(tmp_path / "low")])
    # The folder is of all tests of this file.
    config.write_text(before)

    assert lengths == [16, 16]


@pytest.mark.parametrize(
    ("options", "bits", "keeps_ignored"),
    # The second is a control: an option overrides the base, also what it ignores.
    [([], 8, True), (["--scheme", "W4A16"], 4, False)],
)
def test_an_export_takes_the_scheme_of_the_frozen_base(odd_adapter, tmp_path, capsys, options, bits, keeps_ignored):
    export([str(odd_adapter), str(tmp_path / "low"), *options])

    config = json.loads((tmp_path / "low" / "config.json").read_text())["quantization_config"]
    for group in config["config_groups"].values():
        assert group["weights"]["num_bits"] == bits
    assert config["config_groups"]
    assert ("down_proj" in " ".join(config["ignore"])) == keeps_ignored
    said = capsys.readouterr().out
    assert "nats per token from base and adapter" in said
    served = f"vllm serve {odd_adapter}/base --enable-lora --max-lora-rank 8 --lora-modules policy={odd_adapter} "
    assert f"To keep the policy that was trained, serve the two: {served}--tokenizer {odd_adapter}\n" in said


@pytest.mark.parametrize("cache", ["fp8", "auto"])
def test_an_export_serves_the_two_with_the_cache_of_the_run(dense_model, tmp_path, capsys, cache):
    run = tmp_path / "run"
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = make(dense_model, run, lora, lora_base="frozen")
    # As after a run beside an engine, which alone has such a cache.
    trainer.args.kv_cache_dtype = cache
    trainer.save_model()

    export([str(run), str(tmp_path / "low")])

    said = capsys.readouterr().out
    assert "serve the two: vllm serve" in said
    assert (" --kv-cache-dtype fp8 " in said) == (cache == "fp8")
    assert ("--kv-cache" in said) == (cache == "fp8")


def test_an_export_with_another_group_size_needs_a_scheme(odd_adapter, tmp_path):
    with pytest.raises(ValueError, match="need --scheme"):
        export([str(odd_adapter), str(tmp_path / "low"), "--group_size", "64"])


@pytest.fixture(scope="module")
def odd_adapter(dense_model, tmp_path_factory):
    """The folder of an adapter whose base has other settings than the defaults."""
    folder = tmp_path_factory.mktemp("odd") / "run"
    lora = LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj"], task_type="CAUSAL_LM")
    quantization = {"quant_scheme": "W8A16", "quant_ignore": ["lm_head", "re:.*down_proj$"]}
    make(dense_model, folder, lora, lora_base="frozen", **quantization).save_model()
    return folder
