"""Folders and weights are tried before any work, and what is shared may be read as the umask says."""

import os
import shutil

import pytest
from slow.toys import save_model
from test_trainer import make
from transformers import AutoModelForCausalLM

from qarl_trl import cli
from qarl_trl.export import save_low_bit
from qarl_trl.export.files import apply_umask
from qarl_trl.quant import apply_quantization


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture
def no_loading(monkeypatch):
    """Any model that loads fails the test."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))


@pytest.fixture
def file(tmp_path):
    """A file where a folder is needed."""
    path = tmp_path / "file"
    path.write_text("mine")
    return path


def test_an_output_folder_that_cannot_be_written_is_refused_before_the_model_loads(model, file, no_loading):
    with pytest.raises(OSError, match="output_dir=.*file.*must be a folder that can be written"):
        make(model, file)
    assert file.read_text() == "mine"


# Cut off, and JSON of another kind.
@pytest.mark.parametrize(("content", "words"), [('{"eos_token_id": [1,', "is damaged"), ("[1]", "must hold a JSON")])
def test_a_damaged_generation_config_is_refused_by_each_command(model, tmp_path, capsys, content, words):
    """transformers would go on without the end tokens in it."""
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    (damaged / "generation_config.json").write_text(content)
    suite = tmp_path / "sums.jsonl"
    # `eval` needs a suite, and must not come to read it.
    suite.write_text('{"problem": "1+1=", "answer": "2"}\n')

    with pytest.raises(ValueError, match=rf"generation_config\.json {words}"):
        make(str(damaged), tmp_path / "run")
    for argv in (["export", str(damaged), str(tmp_path / "out")], ["eval", str(damaged), "--suite", str(suite)]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(argv)
        assert f"generation_config.json {words}" in capsys.readouterr().err

    # Control: a model may have none.
    (damaged / "generation_config.json").unlink()
    make(str(damaged), tmp_path / "run")


def test_a_sync_folder_that_cannot_be_written_is_refused_before_the_model_loads(model, file, tmp_path, no_loading):
    with pytest.raises(OSError, match="sync_folder=.*file.*must be a folder that can be written"):
        make(model, tmp_path / "run", sync_folder=str(file), use_vllm=True, vllm_mode="server")
    assert file.read_text() == "mine"


def test_export_onto_a_file_is_refused_before_the_model_loads(model, file, no_loading, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["export", model, str(file)])
    assert stopped.value.code == 2
    assert f"output='{file}' must be a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("umask", "file_mode", "folder_mode"),
    [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)],
)
def test_a_low_bit_folder_may_be_read_as_the_umask_says(
    tiny_model, tiny_tokenizer, tmp_path, umask, file_mode, folder_mode
):
    # Of the whole process, so it is set back whatever happens.
    before = os.umask(umask)
    try:
        folder = save_low_bit(apply_quantization(tiny_model(), "W4A16"), tiny_tokenizer, tmp_path / "shared")
    finally:
        os.umask(before)

    for file in folder.iterdir():
        assert oct(file.stat().st_mode & 0o777) == oct(file_mode), file.name
    assert oct(folder.stat().st_mode & 0o777) == oct(folder_mode)
    # Control: the weights are among the files. safetensors writes them without regard to the umask.
    assert (folder / "model.safetensors").exists()


def test_weights_of_a_user_keep_their_permissions(tmp_path):
    for name in ("model.safetensors", "model-00001-of-00002.safetensors", "private.safetensors"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o600)

    apply_umask(tmp_path)

    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    # safetensors writes files that only their owner may read.
    assert modes["model.safetensors"] == modes["model-00001-of-00002.safetensors"] == 0o644
    assert modes["private.safetensors"] == 0o600
