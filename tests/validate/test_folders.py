"""`qarl_trl.validate.folders`: a run never writes over the model that it starts from."""

import json

import pytest
from configs import config
from slow.toys import save_model
from transformers import AutoModelForCausalLM

from qarl_trl import QaRLTrainer, cli
from qarl_trl.export import save_low_bit
from qarl_trl.quant import apply_quantization
from qarl_trl.validate.folders import check_folders


@pytest.fixture
def model(tmp_path, tiny_model, tiny_tokenizer):
    """A quantized model: GPTQ, for example, may not be repeatable."""
    quantized = apply_quantization(tiny_model(), "W4A16")
    return str(save_low_bit(quantized, tiny_tokenizer, tmp_path / "run"))


def content(folder):
    """The bytes of all files of a folder, by their paths."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_folder_of_the_model_is_refused_as_output_before_it_loads(model, tmp_path, monkeypatch):
    # Three names of one folder: absolute, relative, and through a link.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(model)
    # Loaded before loading is forbidden: a model in memory remembers its folder.
    loaded = AutoModelForCausalLM.from_pretrained(model)
    before = content(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))

    for output in (model, "run", "link"):
        with pytest.raises(ValueError, match=f"output_dir='{output}' must not be the folder of the model '{model}'"):
            QaRLTrainer(model, reward_funcs=[], args=config(output, quant_scheme="checkpoint"))
    with pytest.raises(ValueError, match="output_dir"):
        check_folders(loaded, config(model))
    with pytest.raises(ValueError, match="sync_folder"):
        check_folders(model, config(tmp_path / "out", sync_folder=model))

    # A check that came after the first write would have made folders, or replaced files.
    assert content(tmp_path) == before
    check_folders(model, config(tmp_path))  # control: beside the model


@pytest.mark.parametrize("inside", ["low_bit", "base", "checkpoint-6", "checkpoint-6/low_bit"])
def test_what_a_run_would_overwrite_inside_of_its_output_is_refused_as_model(tmp_path, inside):
    model = save_model(tmp_path / inside, layers=1)

    with pytest.raises(ValueError, match="must not be the folder of the model"):
        check_folders(model, config(tmp_path))

    # Control: the same model beside the output.
    moved = (tmp_path / inside).rename(tmp_path / "mine")
    check_folders(str(moved), config(tmp_path))


def test_a_folder_with_the_name_of_a_hub_model_is_not_made(tmp_path, monkeypatch):
    """It would be taken for the model from then on."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ValueError, match="output_dir='some/model'"):
        check_folders("some/model", config("some/model"))
    assert not (tmp_path / "some").exists()


def test_an_export_does_not_overwrite_the_base_that_it_reads(model, tmp_path, capsys):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    # A config alone: the export must be refused before it reads factors, which are not there.
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": model, "peft_type": "LORA"}))
    before = content(tmp_path)

    for output in (model, str(adapter)):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["export", str(adapter), output])
        assert stopped.value.code == 2
        assert f"output='{output}' must not be the folder of the model" in capsys.readouterr().err

    assert content(tmp_path) == before


# Neither JSON, nor an object, nor with a map from names to file names.
NO_INDEX = ["", "{", "[]", "null", "{}", '{"weight_map": 3}', '{"weight_map": []}', '{"weight_map": {"a": 3}}']


@pytest.mark.parametrize("text", [*NO_INDEX, '{"weight_map": {"a": "../../other/model.safetensors"}}'])
def test_an_index_of_weights_that_is_none_is_refused(tmp_path, text):
    """transformers and vLLM would fail in it, or read files of another folder."""
    model = save_model(tmp_path / "model", layers=1)
    args = config(tmp_path / "run")
    check_folders(model, args)  # control

    (tmp_path / "model" / "model.safetensors.index.json").write_text(text)

    with pytest.raises(ValueError, match=r"model.safetensors.index.json (cannot be read|must have weight_map)"):
        check_folders(model, args)


def test_an_index_whose_files_are_not_there_is_refused(tmp_path):
    model = save_model(tmp_path / "model", layers=1)
    index = {"weight_map": {"a": "part-1.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    # Control: transformers reads the one file, and ignores the index beside it.
    check_folders(model, config(tmp_path / "run"))

    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names \['part-1.safetensors'\], which are not there"):
        check_folders(model, config(tmp_path / "run"))
