"""Folders and weights are tried before any work, and what is shared may be read as the umask says."""

import os

import pytest
from slow.toys import save_model
from test_trainer import make
from transformers import AutoModelForCausalLM

from qarl_trl import cli
from qarl_trl.export import save_low_bit
from qarl_trl.export.files import base_of, name_base
from qarl_trl.quant import apply_quantization


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture
def unloaded(monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))


@pytest.mark.parametrize("field", ["output_dir", "sync_folder"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_model_loads(model, tmp_path, unloaded, field):
    (tmp_path / "run").mkdir()
    file = tmp_path / "file"
    file.write_text("mine")
    server = {"sync_folder": str(file), "use_vllm": True, "vllm_mode": "server"}
    folder, changes = (file, {}) if field == "output_dir" else (tmp_path / "run", server)
    with pytest.raises(OSError, match=f"{field}=.*{file.name}.*must be a folder that can be written"):
        make(model, folder, **changes)
    assert file.read_text() == "mine"


def test_export_onto_a_file_is_refused_before_the_model_loads(model, tmp_path, unloaded, capsys):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["export", model, str(tmp_path / "file")])
    assert stopped.value.code == 2 and f"output='{tmp_path / 'file'}' must be a folder" in capsys.readouterr().err


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_low_bit_folder_may_be_read_as_the_umask_says(tiny_model, tiny_tokenizer, tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        folder = save_low_bit(apply_quantization(tiny_model(), "W4A16"), tiny_tokenizer, tmp_path / "shared")
    finally:
        os.umask(before)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in folder.iterdir()} == dict.fromkeys(
        [file.name for file in folder.iterdir()], oct(mode)
    )
    assert folder.stat().st_mode & 0o777 == mode | (0o111 if umask == 0o022 else 0o100)


def test_a_base_is_a_folder_beside_the_adapter_or_a_repository_whatever_its_name(tmp_path):
    for name in ("org/base", "base", "../base"):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "adapter_config.json").write_text("{}")
        name_base(tmp_path / "run", name, "v2", tmp_path)
        if "org" in name:
            assert base_of(tmp_path / "run") == (name, "v2")
            continue
        with pytest.raises(FileNotFoundError, match="is missing"):
            base_of(tmp_path / "run")
        (tmp_path / "run" / name).mkdir()
        assert base_of(tmp_path / "run") == (str(tmp_path / "run" / name), None)
