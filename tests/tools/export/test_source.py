"""What `qarl-trl export` starts from, and in which dtype."""

import huggingface_hub
import pytest
import torch
from conftest import make_model, make_tokenizer
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from toy_runs import make

from qarl_trl import cli
from qarl_trl.tools.export.source import _dtype_of, _folder_of_weights


# Float16 has the one as infinity, and the other as zero.
OUTSIDE_FLOAT16 = torch.tensor([99840.0, 2e-8])


@pytest.fixture
def stored(request, tmp_path):
    """A model's folder with weights in one dtype, those of norms in another, and a config that says float16."""
    kind, half, norms = request.param
    model = make_model(num_hidden_layers=1)
    if half is not torch.float16:
        model.model.layers[0].mlp.up_proj.weight.data[0, :2] = OUTSIDE_FLOAT16
    if norms is not torch.float16:
        model.model.norm.weight.data[:2] = OUTSIDE_FLOAT16
    folder = tmp_path / "model"
    model.config.dtype = torch.float16
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)

    weights = {name: tensor.to(norms if "norm" in name else half) for name, tensor in model.state_dict().items()}
    if kind == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapter"])
@pytest.mark.parametrize(
    "stored",
    [
        ("safetensors", torch.bfloat16, torch.bfloat16),
        ("safetensors", torch.float16, torch.float32),
        ("safetensors", torch.float16, torch.float16),
        ("bin", torch.float32, torch.float32),
    ],
    ids=["bfloat16", "float32 norms", "float16", "bin"],
    indirect=True,
)
def test_export_has_the_bytes_of_training(stored, tmp_path, lora):
    """Training reads all weights in float32, whatever the config says."""
    peft_config = None
    if lora:
        layers = {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["lm_head"]}
        peft_config = LoraConfig(r=4, task_type="CAUSAL_LM", **layers)
    trainer = make(str(stored), tmp_path / "run", peft_config, quant_group_size=32)
    for name, parameter in trainer.model.named_parameters():
        # Trained in float32, beside a base in 16 bits, too.
        if "lora_B" in name:
            parameter.data.normal_()
        if "modules_to_save" in name:
            parameter.data[0, :2] = OUTSIDE_FLOAT16
    trainer.save_model()

    trained = tmp_path / "run" / "low_bit" if lora else tmp_path / "run"
    cli.run(["export", str(tmp_path / "run" if lora else stored), str(tmp_path / "out"), "--group_size", "32"])

    exported = load_file(tmp_path / "out" / "model.safetensors")
    expected = load_file(trained / "model.safetensors")
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(exported[name], tensor), name


@pytest.mark.parametrize(
    ("stored", "beside", "dtype"),
    [
        (["bfloat16", "bfloat16"], {}, "bfloat16"),
        (["float16", "float16"], {}, "float16"),
        (["bfloat16", "float32"], {}, "float32"),
        (["bfloat16", "float16"], {}, "float32"),
        # Low bits and their scales.
        (["bfloat16", "int32", "float8_e4m3fn"], {}, "bfloat16"),
        (["float16"], {"base_model.model.q_proj.lora_A.weight": "float32"}, "float16"),
        (["float16"], {"base_model.model.lm_head.weight": "float32"}, "float32"),
    ],
)
def test_export_loads_in_16_bits_what_has_no_others(tmp_path, stored, beside, dtype):
    """A large model would need twice its memory."""
    model = write(tmp_path / "model", {str(number): name for number, name in enumerate(stored)})
    adapter = write(tmp_path / "adapter", beside)

    assert _dtype_of(model, adapter) is getattr(torch, dtype)


def write(folder, dtypes):
    """A folder with tensors of these names and dtypes."""
    folder.mkdir()
    tensors = {name: torch.zeros(2).to(getattr(torch, dtype)) for name, dtype in dtypes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_export_of_a_hub_model_looks_at_its_files(tmp_path, monkeypatch):
    """Its config may say another dtype there, too."""
    downloaded = write(tmp_path / "snapshot", {"weight": "float32"})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, revision, **_: downloaded / name / revision)

    assert _folder_of_weights("user/model", "v2") == downloaded / "user/model/v2"
    # Control: a folder is itself.
    assert _folder_of_weights(str(downloaded), None) == downloaded
