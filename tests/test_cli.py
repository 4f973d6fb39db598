"""The command `qarl-trl`."""

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from conftest import make_model, make_tokenizer

from qarl_trl import cli


def test_help_imports_no_library():
    code = (
        "import runpy, sys; sys.argv = ['qarl-trl', '--help']\n"
        "try: runpy.run_module('qarl_trl.cli', run_name='__main__')\n"
        "except SystemExit: print([m for m in ('torch', 'transformers', 'trl', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "quickstart" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("argv", [[], ["trian"], ["export"], ["export", "a", "b", "--group_size", "32"]])
def test_wrong_command_line_exits_with_usage(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert "usage: qarl-trl" in capsys.readouterr().err


def test_train_and_quickstart_get_their_arguments_whole(monkeypatch):
    seen = []
    module = types.ModuleType("qarl_trl.quickstart.__main__")
    module.main = lambda argv: seen.append(("quickstart", argv))
    monkeypatch.setitem(sys.modules, "qarl_trl.quickstart", types.ModuleType("qarl_trl.quickstart"))
    monkeypatch.setitem(sys.modules, "qarl_trl.quickstart.__main__", module)
    monkeypatch.setattr("qarl_trl.train.main", lambda argv: seen.append(("train", argv)))
    cli.main(["train", "--config", "a.yaml", "--help"])
    cli.main(["quickstart", "--help", "--steps", "3"])
    assert seen == [("train", ["--config", "a.yaml", "--help"]), ("quickstart", ["--help", "--steps", "3"])]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_model(num_hidden_layers=1).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def read_weights(path):
    from safetensors.torch import load_file

    return {k: v for file in Path(path).glob("*.safetensors") for k, v in load_file(file).items()}


def test_export_writes_the_low_bit_tensors_of_the_checkpoint(checkpoint, tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from qarl_trl.quant import apply_quantization, iter_low_bit_weights

    out = tmp_path / "out"
    cli.main(["export", str(checkpoint), str(out), "--group-size", "32", "--ignore", "lm_head", "re:.*o_proj$"])
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    expected = dict(
        iter_low_bit_weights(apply_quantization(model, "W4A16", ignore=["lm_head", "re:.*o_proj$"], group_size=32))
    )
    found = read_weights(out)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert "model.layers.0.self_attn.o_proj.weight" in found  # control: --ignore reached the quantizer
    assert AutoConfig.from_pretrained(out).quantization_config is not None
    assert AutoTokenizer.from_pretrained(out).eos_token == "<eos>"


def test_export_merges_an_adapter_into_its_base_model(checkpoint, tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from qarl_trl.quant import apply_quantization, iter_low_bit_weights

    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), config)
    model.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "adapter")
    cli.main(["export", str(tmp_path / "adapter"), str(tmp_path / "out"), "--group-size", "32"])
    expected = dict(iter_low_bit_weights(apply_quantization(model, "W4A16", group_size=32)))
    found = read_weights(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    cli.main(["export", str(checkpoint), str(tmp_path / "base"), "--group-size", "32"])
    name = "model.layers.0.self_attn.q_proj.weight_packed"
    assert not torch.equal(read_weights(tmp_path / "base")[name], found[name])  # control: the adapter is in it
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_export_of_a_low_bit_checkpoint_is_refused(checkpoint, tmp_path):
    cli.main(["export", str(checkpoint), str(tmp_path / "once"), "--scheme", "FP8_DYNAMIC"])
    with pytest.raises(ValueError, match="quantized already"):
        cli.run(["export", str(tmp_path / "once"), str(tmp_path / "twice")])


def test_export_refuses_an_unknown_scheme_before_it_reads_the_model(tmp_path):
    with pytest.raises(ValueError, match="W2A2"):
        cli.run(["export", str(tmp_path / "nothing"), str(tmp_path / "out"), "--scheme", "W2A2"])


def test_schemes_prints_a_row_for_each_of_the_table(capsys):
    from qarl_trl.quant.table import GPU_GENERATIONS, SUPPORTED

    cli.main(["schemes"])
    head, *rows = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]
    assert head[3:] == ["learner CPU", "learner GPU", "engine CPU", *GPU_GENERATIONS, "export", "LoRA, experts"]
    assert [row[0] for row in rows] == list(SUPPORTED)
    cells = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert cells["W4A16"]["group sizes"] == "32, 64, 128, channel"
    assert cells["W4AFP8"]["group sizes"] == "128"
    assert {name for name in SUPPORTED if cells[name]["LoRA, experts"] == "no"} == {"NVFP4A16"}
    for name, row in SUPPORTED.items():
        assert cells[name]["activations"] == row.activations
        assert cells[name]["engine CPU"] == ("tested" if row.cpu_engine else "no")
        assert cells[name]["learner GPU"] == ("untested" if row.gpus else "no")
        assert {g for g in GPU_GENERATIONS if cells[name][g] == "untested"} == set(row.gpus)
        assert {cells[name][g] for g in GPU_GENERATIONS} <= {"untested", "no"}
