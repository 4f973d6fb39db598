"""`qarl_trl.export.push`, by huggingface_hub's own client against a server that speaks its endpoints."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from hub_server import READER, WRITER, running_hub
from huggingface_hub import constants, snapshot_download
from peft import LoraConfig
from safetensors.torch import load_file
from slow.toys import save_model
from test_trainer import make
from transformers import AutoModelForCausalLM
from transformers.utils import hub as hub_of_transformers

from qarl_trl import cli
from qarl_trl.export import save_low_bit
from qarl_trl.export.push import model_files, open_repo, push
from qarl_trl.quant import apply_quantization, iter_low_bit_weights


@pytest.fixture
def hub(monkeypatch):
    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(hub_of_transformers, "_hf_api", None)  # made once, for an endpoint
        address = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its storage is a protocol of its own
        monkeypatch.setenv("HF_TOKEN", WRITER)
        yield hub


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture
def low_bit(tiny_model, tiny_tokenizer, tmp_path):
    model = apply_quantization(tiny_model(dtype=torch.bfloat16), "W4A16")
    return save_low_bit(model, tiny_tokenizer, tmp_path / "low")


def same(files: dict[str, bytes], folder: Path) -> bool:
    """Whether a branch holds exactly the model files of `folder`."""
    expected = {name: file.read_bytes() for name, file in model_files(folder).items()}
    return {name: content for name, content in files.items() if name != ".gitattributes"} == expected


def pushing(model, folder, **changes):
    settings = {"push_to_hub": True, "hub_model_id": "me/toy", "save_strategy": "steps", "save_steps": 2}
    return make(model, folder, **settings | changes)


# One repository --------------------------------------------------------------------------------------------------


def test_the_content_is_the_model_and_nothing_else_of_the_folder(hub, low_bit, tmp_path):
    for name in ("training_args.bin", "trainer_state.json", "log.json", "notes.md", "optimizer.pt"):
        (low_bit / name).write_text("private")
    (low_bit / "checkpoint-4").mkdir()
    (low_bit / "checkpoint-4" / "model.safetensors").write_text("master weights")
    assert open_repo("toy", private=True) == "me/toy" and hub.private["me/toy"]
    push(low_bit, "me/toy", "first")
    assert same(hub.files("me/toy"), low_bit)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= hub.files("me/toy").keys()
    assert hub.messages("me/toy") == ["first", "initial commit"]  # one commit: nobody downloads half of a model
    again = Path(snapshot_download("me/toy", cache_dir=tmp_path / "cache", endpoint=hub.url))
    assert load_file(again / "model.safetensors").keys() == load_file(low_bit / "model.safetensors").keys()


def test_weights_of_an_earlier_model_do_not_stay_and_a_revision_is_a_branch(hub, low_bit):
    open_repo("me/toy", revision="v2")
    (low_bit / "model-00001-of-00002.safetensors").write_text("old")
    (low_bit / "model.safetensors.index.json").write_text("{}")
    push(low_bit, "me/toy", "two files", revision="v2")
    (low_bit / "model-00001-of-00002.safetensors").unlink()
    (low_bit / "model.safetensors.index.json").unlink()
    push(low_bit, "me/toy", "one file", revision="v2")
    assert same(hub.files("me/toy", "v2"), low_bit)
    assert "model.safetensors" not in hub.files("me/toy")


# Failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("token", "reason"), [("wrong", "401"), (READER, "403")])
def test_a_token_that_may_not_write_is_refused_at_once_and_not_named(hub, token, reason):
    open_repo("me/toy")
    with pytest.raises(OSError, match=f"{reason}.*HF_TOKEN") as refused:
        open_repo("me/toy", token=token)
    assert token not in str(refused.value) and "\n" not in str(refused.value)


def test_a_server_that_is_down_or_refuses_is_one_line_with_the_way_out(hub, low_bit, monkeypatch):
    open_repo("me/toy")
    hub.refusals = [403]
    with pytest.raises(OSError, match=f"403.*Nothing is lost: the model is in .*qarl-trl push {low_bit} me/toy"):
        push(low_bit, "me/toy", "no")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client tries again
    with pytest.raises(OSError, match="ConnectError.*Nothing is lost") as lost:
        push(low_bit, "me/toy", "lost")
    assert lost.value.__suppress_context__  # what is beneath would name addresses with signatures


# A run -----------------------------------------------------------------------------------------------------------


def test_a_run_pushes_the_low_bit_model_at_the_end_and_keeps_master_weights_at_home(hub, model, tmp_path):
    trainer = pushing(model, tmp_path, hub_token=WRITER)
    trainer.train()
    assert hub.messages("me/toy") == ["initial commit"]
    trainer.push_to_hub(dataset_name="someone/sums")
    assert hub.messages("me/toy")[0] == "End of training"
    assert same(hub.files("me/toy"), tmp_path)
    card = hub.files("me/toy")["README.md"].decode()
    assert "vllm serve me/toy" in card and "someone/sums" in card
    expected = dict(iter_low_bit_weights(trainer.model))
    (tmp_path / "pulled").mkdir()
    (tmp_path / "pulled" / "m.safetensors").write_bytes(hub.files("me/toy")["model.safetensors"])
    pulled = load_file(tmp_path / "pulled" / "m.safetensors")
    assert pulled.keys() == expected.keys() and all(torch.equal(pulled[n], t) for n, t in expected.items())


def test_an_adapter_is_pushed_with_the_base_that_its_run_quantized(hub, model, tmp_path):
    frozen = {"peft_config": LoraConfig(target_modules=["q_proj", "down_proj"]), "lora_base": "frozen", "max_steps": 1}
    trainer = pushing(model, tmp_path / "run", **frozen)
    trainer.train()
    trainer.push_to_hub()
    assert same(hub.files("me/toy-base"), tmp_path / "run" / "base")
    files, here = hub.files("me/toy"), json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert "model.safetensors" not in files and "adapter_model.safetensors" in files
    # Each names its own base, so that neither needs the other.
    assert here["base_model_name_or_path"] == "base"
    assert json.loads(files["adapter_config.json"]) == here | {"base_model_name_or_path": "me/toy-base"}
    card = hub.files("me/toy")["README.md"].decode()
    assert "vllm serve me/toy-base --enable-lora --max-lora-rank 8 --lora-modules policy=me/toy" in card
    assert "vllm serve me/toy-base" in hub.files("me/toy-base")["README.md"].decode()
    # Beside a checkpoint that was there before, the adapter alone.
    other = {"hub_model_id": "me/other", "quant_scheme": "checkpoint"}
    trainer = pushing(str(tmp_path / "run" / "base"), tmp_path / "other", **frozen | other)
    trainer.train()
    trainer.push_to_hub()
    assert {"me/toy", "me/toy-base", "me/other"} == hub.branches.keys()


def test_a_push_that_fails_loses_nothing_and_names_no_token(hub, model, tmp_path, caplog, capfd):
    caplog.set_level("DEBUG", logger="qarl_trl")
    trainer = pushing(model, tmp_path, hub_token=WRITER)
    trainer.train()
    hub.refusals = [403]
    with pytest.raises(OSError, match="Nothing is lost") as error:
        trainer.push_to_hub()
    assert AutoModelForCausalLM.from_pretrained(tmp_path)
    trainer.push_to_hub()

    saved = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(file.name == "training_args.bin" for file in saved)
    assert not [file for file in saved if WRITER.encode() in file.read_bytes()]
    assert not [content for content in hub.files("me/toy").values() if WRITER.encode() in content]
    assert WRITER not in caplog.text + "".join(capfd.readouterr()) + str(error.value) + str(trainer.args.to_dict())
    assert pickle.loads(pickle.dumps(trainer.args)).hub_token is None
    assert WRITER.encode() in pickle.dumps(dict(vars(trainer.args)))  # control: pickle would have kept it


def test_what_cannot_be_pushed_to_is_refused_before_the_model_loads(hub, model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "wrong")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(OSError, match="401"):
        pushing(model, tmp_path)


# Commands --------------------------------------------------------------------------------------------------------


def test_push_writes_its_address_into_the_card_and_refuses_master_weights(hub, model, tmp_path, capsys):
    low_bit = tmp_path / "out"
    cli.main(["export", model, str(low_bit)])
    cli.main(["push", str(low_bit), "me/toy", "--private", "--revision", "w4"])
    assert same(hub.files("me/toy", "w4"), low_bit) and hub.private["me/toy"]
    assert "vllm serve me/toy" in (low_bit / "README.md").read_text() and "pushed: http" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        cli.main(["push", model, "me/other"])
    assert stopped.value.code == 2 and "no low-bit model" in capsys.readouterr().err
    assert "me/other" not in hub.branches
