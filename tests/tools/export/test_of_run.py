"""What `qarl-trl export` says of an adapter whose base is not the one that the run had."""

import pytest
import torch
from conftest import make_model, make_tokenizer
from datasets import Dataset
from peft import PeftModel, get_peft_model
from toy_runs import adapter, make
from transformers import AutoModelForCausalLM

from qarl_trl import cli
from qarl_trl.tools.export.of_run import _are_same
from qarl_trl.trainers import LowBitSFTConfig, LowBitSFTTrainer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    make_model(num_hidden_layers=1).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def merged_with_an_earlier_stage(base, folder):
    """The model of a script that merged a first adapter: its config still names the base."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), adapter())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.02)
    model.save_pretrained(folder)

    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).merge_and_unload()
    return merged.requires_grad_(True)


@pytest.mark.parametrize("low_bit", [False, True], ids=["manifest", "low bits"])
@pytest.mark.parametrize(
    ("start", "is_said"), [("name", False), ("loaded", False), ("bfloat16", False), ("merged", True)]
)
def test_export_says_that_a_script_had_merged_an_earlier_stage(base, tmp_path, capsys, start, is_said, low_bit):
    """Only layers in low bits differ, where adapters are."""
    model = str(base)
    if start == "loaded":
        model = AutoModelForCausalLM.from_pretrained(base)
    if start == "merged":
        model = merged_with_an_earlier_stage(base, tmp_path / "stage")
    run = {"quant_group_size": 32, "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    if start == "bfloat16":
        run["model_init_kwargs"] = {"dtype": "bfloat16"}
    trainer = make(model, tmp_path / "run", adapter(), export_low_bit=low_bit, **run)
    trainer.train()
    trainer.save_model()

    checkpoint = tmp_path / "run" / "checkpoint-1"
    # `save_model` writes no manifest: without its low bits nothing tells.
    folders = [checkpoint, tmp_path / "run"] if low_bit else [checkpoint]
    capsys.readouterr()
    for folder in folders:
        cli.run(["export", str(folder), str(tmp_path / "out"), "--group_size", "32"])
        said = capsys.readouterr().out
        assert ("is another model than" in said) == is_said
        word = "weight_packed differs" if low_bit else "save that model, and name its folder"
        assert (word in said) == is_said


@pytest.mark.parametrize(
    ("in_low_bits", "differ", "are_same"),
    [(False, 0, True), (False, 1, False), (True, 0, True), (True, 20, True), (True, 50, False)],
)
def test_low_bits_of_another_device_are_the_same(in_low_bits, differ, are_same):
    """A GPU adds up a merged weight in another order: about one in a million values comes out otherwise."""
    one = torch.zeros(40, 1000, dtype=torch.float8_e4m3fn)
    other = one.clone()
    other.view(torch.uint8)[0, :differ] = 1

    assert _are_same(one, other, in_low_bits) == are_same
    assert not _are_same(one, other.float(), in_low_bits)


def test_export_of_a_run_with_the_template_of_another_model_is_that_of_the_run(tmp_path, capsys):
    """TRL gives the embedding other rows after it has loaded the model, and adds no token if these are 64."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(64 - len(tokenizer))])
    tokenizer.chat_template = "{{ messages }}"
    model = tmp_path / "model"
    make_model(num_hidden_layers=1, vocab_size=128).save_pretrained(model)
    tokenizer.save_pretrained(model)

    args = LowBitSFTConfig(
        output_dir=str(tmp_path / "run"),
        chat_template_path=str(model),
        quant_group_size=32,
        export_low_bit=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        max_steps=1,
        save_steps=1,
    )
    data = Dataset.from_list([{"text": "1+1=2"}] * 8)
    trainer = LowBitSFTTrainer(str(model), args, train_dataset=data, peft_config=adapter())
    trainer.train()
    assert trainer.model.get_input_embeddings().num_embeddings == 64

    cli.run(["export", str(tmp_path / "run" / "checkpoint-1"), str(tmp_path / "out"), "--group_size", "32"])

    assert "another model" not in capsys.readouterr().out
