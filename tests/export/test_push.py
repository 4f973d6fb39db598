"""`qarl_trl.export.push`, by huggingface_hub's own client against a server that speaks its endpoints."""

import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from hub_server import READER, WRITER, commit_of, running_hub
from huggingface_hub import constants, snapshot_download
from peft import LoraConfig, get_peft_model
from safetensors.torch import load, load_file, save_file
from slow.toys import distinct_characters, prompts, save_model
from test_trainer import make
from toy_runs import without_engine
from trainers.runs import pairs
from trainers.runs import settings as short_run
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import hub as hub_of_transformers

from qarl_trl import LowBitDistillationConfig, LowBitDistillationTrainer, QaRLConfig, QaRLTrainer, cli
from qarl_trl.export import save_low_bit
from qarl_trl.export.card import write_card
from qarl_trl.export.card_edits import GENERATED
from qarl_trl.export.push import model_files, open_repo, push
from qarl_trl.quant import apply_quantization, iter_low_bit_weights


@pytest.fixture
def hub(monkeypatch):
    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        # transformers makes its client once, for the endpoint of that time.
        monkeypatch.setattr(hub_of_transformers, "_hf_api", None)
        address = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        # Its storage speaks a protocol of its own, which this server does not.
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", WRITER)
        yield hub


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture
def low_bit(tiny_model, tiny_tokenizer, tmp_path):
    model = apply_quantization(tiny_model(dtype=torch.bfloat16), "W4A16")
    return save_low_bit(model, tiny_tokenizer, tmp_path / "low")


def holds_model(files: dict[str, bytes], folder: Path) -> bool:
    """Whether a branch holds exactly the model files of `folder`; the card may have another address."""
    # The Hub adds a file of its own to every repository.
    pushed = dict(files)
    pushed.pop(".gitattributes", None)

    local = model_files(folder)
    if pushed.keys() != local.keys():
        return False

    different = set()
    for name, file in local.items():
        if pushed[name] != file.read_bytes():
            different.add(name)
    return different <= {"README.md"}


def pushing(model, folder, **changes):
    """A trainer that pushes to the repository `me/toy`."""
    settings = {"push_to_hub": True, "hub_model_id": "me/toy", "save_strategy": "steps", "save_steps": 2}
    return make(model, folder, **settings | changes)


# One repository --------------------------------------------------------------------------------------------------


def test_the_content_is_the_model_and_nothing_else_of_the_folder(hub, low_bit, tmp_path):
    # What a run leaves beside its model, and what a user may.
    for name in ("training_args.bin", "trainer_state.json", "log.json", "notes.md", "optimizer.pt"):
        (low_bit / name).write_text("private")
    (low_bit / "checkpoint-4").mkdir()
    (low_bit / "checkpoint-4" / "model.safetensors").write_text("master weights")

    assert open_repo("toy", private=True) == "me/toy"
    push(low_bit, "me/toy", "first")

    assert hub.private["me/toy"]
    assert holds_model(hub.files("me/toy"), low_bit)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= hub.files("me/toy").keys()
    assert hub.messages("me/toy") == ["first", "initial commit"]  # one commit: nobody downloads half of a model

    downloaded = Path(snapshot_download("me/toy", cache_dir=tmp_path / "cache", endpoint=hub.url))
    tensors = load_file(downloaded / "model.safetensors")
    assert tensors.keys() == load_file(low_bit / "model.safetensors").keys()


def test_weights_of_an_earlier_model_do_not_stay_and_a_revision_is_a_branch(hub, low_bit):
    # As of a model in two files.
    earlier = [low_bit / "model-00001-of-00002.safetensors", low_bit / "model.safetensors.index.json"]
    for file in earlier:
        file.write_text("{}")
    open_repo("me/toy", revision="v2")
    push(low_bit, "me/toy", "two files", revision="v2")

    for file in earlier:
        file.unlink()
    push(low_bit, "me/toy", "one file", revision="v2")

    assert holds_model(hub.files("me/toy", "v2"), low_bit)
    assert "model.safetensors" not in hub.files("me/toy")


def test_the_card_of_a_branch_says_so_there_alone(hub, low_bit):
    write_card(low_bit)
    open_repo("me/toy", revision="v2")
    push(low_bit, "me/toy", "a branch", revision="v2")
    of_branch = hub.files("me/toy", "v2")["README.md"]
    assert b"## Use\n\n**This is the branch `v2`**" in of_branch

    # What was downloaded from a branch, and goes to the main one.
    (low_bit / "README.md").write_bytes(of_branch)
    for main in (None, "main"):
        push(low_bit, "me/toy", "the main branch", revision=main)
        assert b"This is the branch" not in hub.files("me/toy")["README.md"]


def test_a_card_that_a_user_edited_on_the_hub_stays(hub, low_bit, caplog):
    write_card(low_bit, base_id="me/base", base="me/base")
    push(low_bit, open_repo("me/toy"), "first")
    generated = hub.files("me/toy")["README.md"]
    push(low_bit, "me/toy", "second")
    assert hub.files("me/toy")["README.md"] == generated  # control: a generated card is pushed again

    edited = generated.replace(GENERATED.encode(), b"") + b"my words"
    hub.branches["me/toy"]["main"][-1].files["README.md"] = edited
    push(low_bit, "me/toy", "third")

    assert hub.files("me/toy")["README.md"] == edited
    assert "me/toy keeps its card" in caplog.text
    # What a user has edited here is pushed.
    (low_bit / "README.md").write_text("here")
    push(low_bit, "me/toy", "fourth")
    assert hub.files("me/toy")["README.md"] == b"here"


def test_a_template_of_an_earlier_model_does_not_stay(hub, low_bit):
    """Chat requests to a base model would get it. What is no file of a model stays."""
    earlier = [low_bit / "chat_template.jinja", low_bit / "additional_chat_templates" / "tools.jinja"]
    for file in earlier:
        file.parent.mkdir(exist_ok=True)
        file.write_text("{{ messages }}")
    open_repo("me/toy")
    push(low_bit, "me/toy", "with templates")
    names = {"chat_template.jinja", "additional_chat_templates/tools.jinja"}
    assert names <= hub.files("me/toy").keys()  # control
    hub.files("me/toy")["LICENSE"] = b"the user's"
    hub.files("me/toy")["plots/chat_template.jinja"] = b"the user's"

    for file in earlier:
        file.unlink()
    push(low_bit, "me/toy", "without")

    assert not names & hub.files("me/toy").keys()
    assert {"LICENSE", "plots/chat_template.jinja", "tokenizer.json"} <= hub.files("me/toy").keys()


def test_a_public_repository_is_refused_where_it_must_be_private(hub, low_bit, capsys):
    """The Hub would leave it public, and say nothing."""
    open_repo("me/toy")
    with pytest.raises(SystemExit):
        cli.main(["push", str(low_bit), "me/toy", "--private"])
    assert "must be private" in capsys.readouterr().err
    assert hub.messages("me/toy") == ["initial commit"]

    # Control: one that is private already, and a push that asks for nothing.
    open_repo("me/hidden", private=True)
    cli.main(["push", str(low_bit), "me/hidden", "--private"])
    cli.main(["push", str(low_bit), "me/toy"])
    assert len(hub.messages("me/hidden")) == len(hub.messages("me/toy")) == 2


LLMCOMPRESSOR_RECIPE = """
default_stage:
  default_modifiers:
    GPTQModifier:
      targets: [Linear]
      scheme: W4A16
"""


@pytest.mark.parametrize(
    ("recipe", "is_pushed"),
    [
        # Then recipes of runs, alone, after one of llm-compressor and inside of it, and what is no mapping or no YAML.
        (LLMCOMPRESSOR_RECIPE, True),
        ("output_dir: runs/x\nhub_token: hf_secret\n", False),
        (LLMCOMPRESSOR_RECIPE + "hub_token: hf_secret\n", False),
        (LLMCOMPRESSOR_RECIPE + "  hub_token: hf_secret\n", False),
        ("- hf_secret\n", False),
        ("{", False),
    ],
)
def test_a_recipe_is_pushed_only_if_llmcompressor_wrote_it(low_bit, recipe, is_pushed):
    """A run's recipe may hold a token."""
    (low_bit / "recipe.yaml").write_text(recipe)

    assert ("recipe.yaml" in model_files(low_bit)) == is_pushed


@pytest.mark.parametrize(
    # Names of their own: this server has one id for each repository, by which the client keeps its files.
    ("name", "recipe", "stays"),
    [("me/quantized", LLMCOMPRESSOR_RECIPE, False), ("me/users", "output_dir: runs/x\n", True)],
)
def test_a_recipe_of_an_earlier_model_does_not_stay(hub, low_bit, name, recipe, stays):
    """It would say that llm-compressor quantized the new model. Another file of this name is the user's."""
    open_repo(name)
    hub.files(name)["recipe.yaml"] = recipe.encode()

    push(low_bit, name, "trained")

    assert ("recipe.yaml" in hub.files(name)) == stays


def test_a_recipe_of_an_earlier_model_in_the_folder_is_said(low_bit, tiny_model, caplog):
    (low_bit / "recipe.yaml").write_text("output_dir: runs/x\n")
    save_low_bit(apply_quantization(tiny_model(dtype=torch.bfloat16), "W4A16"), None, low_bit)
    assert "recipe.yaml" not in caplog.text  # control: a user's file

    (low_bit / "recipe.yaml").write_text(LLMCOMPRESSOR_RECIPE)
    save_low_bit(apply_quantization(tiny_model(dtype=torch.bfloat16), "W4A16"), None, low_bit)

    assert "recipe.yaml of llm-compressor" in caplog.text


def test_code_that_the_configs_name_is_pushed_with_what_it_imports(low_bit):
    names = {"AutoModelForCausalLM": "modeling_mine.Mine", "AutoConfig": "me/start--configuration_mine.MineConfig"}
    auto_maps = {
        "config.json": names,
        "tokenizer_config.json": {"AutoTokenizer": [None, "tokenization_mine.MineTokenizer"]},
        "processor_config.json": {"AutoProcessor": "processing_mine.MineProcessor"},
        "preprocessor_config.json": {"AutoImageProcessor": "image_processing_mine.MineImageProcessor"},
        "video_preprocessor_config.json": {"AutoVideoProcessor": "video_processing_mine.MineVideoProcessor"},
    }
    for name in ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        (low_bit / name).write_text("{}")
    for file, auto_map in auto_maps.items():
        content = json.loads((low_bit / file).read_text()) | {"auto_map": auto_map}
        (low_bit / file).write_text(json.dumps(content))
    before = model_files(low_bit).keys()

    (low_bit / "modeling_mine.py").write_text("from .parts import NAME\n")
    of_auto_maps = {
        f"{part}_mine.py" for part in ("tokenization", "processing", "image_processing", "video_processing")
    }
    for name in ("parts.py", "configuration_mine.py", "train.py", *of_auto_maps):
        (low_bit / name).touch()

    # The code of the config is in another repository; the script is the user's.
    assert model_files(low_bit).keys() - before == {"modeling_mine.py", "parts.py", *of_auto_maps}


def test_copies_and_configs_of_a_user_are_not_pushed(low_bit):
    before = model_files(low_bit).keys()

    for name in ("model-backup.safetensors", "model_old.safetensors", "wandb_config.json", "mail.jinja", "tokenizer"):
        (low_bit / name).write_text("private")

    assert model_files(low_bit).keys() == before
    assert "tokenizer.json" in before  # control
    assert "generation_config.json" in before


# Failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("token", "reason"), [("wrong", "401"), (READER, "403")])
def test_a_token_that_may_not_write_is_refused_at_once_and_not_named(hub, token, reason):
    open_repo("me/toy")

    with pytest.raises(OSError, match=f"{reason}.*HF_TOKEN") as refused:
        open_repo("me/toy", token=token)
    assert token not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_server_that_refuses_is_one_line_with_the_way_out(hub, low_bit):
    open_repo("me/toy")
    hub.refusals = [403]

    with pytest.raises(OSError, match=f"403.*Nothing is lost: the model is in .*qarl-trl push {low_bit} me/toy"):
        push(low_bit, "me/toy", "no")


def test_a_server_that_is_down_is_one_line_with_the_way_out(hub, low_bit, monkeypatch):
    open_repo("me/toy")
    # A port at which nobody listens.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client tries again

    with pytest.raises(OSError, match="ConnectError.*Nothing is lost") as lost:
        push(low_bit, "me/toy", "lost")
    assert lost.value.__suppress_context__  # what is beneath would name addresses with signatures


# A run -----------------------------------------------------------------------------------------------------------


def test_a_run_pushes_the_low_bit_model_at_the_end_and_keeps_master_weights_at_home(hub, model, tmp_path):
    trainer = pushing(model, tmp_path, hub_token=WRITER)
    trainer.train()
    # Not before the end: a checkpoint pushes nothing.
    assert hub.messages("me/toy") == ["initial commit"]

    trainer.push_to_hub(dataset_name="someone/sums")

    files = hub.files("me/toy")
    assert hub.messages("me/toy")[0] == "End of training"
    assert holds_model(files, tmp_path)
    card = files["README.md"].decode()
    assert "vllm serve me/toy" in card
    assert "someone/sums" in card

    pushed = load(files["model.safetensors"])
    expected = dict(iter_low_bit_weights(trainer.model))
    assert pushed.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(pushed[name], tensor), name


def test_a_save_of_a_script_pushes_as_that_of_the_trainer_does(hub, model, tmp_path):
    trainer = pushing(model, tmp_path, max_steps=1)
    trainer.train()
    trainer.save_model()

    assert hub.messages("me/toy")[0] == "Model save"
    assert holds_model(hub.files("me/toy"), tmp_path)

    # Many scripts of TRL call both. Control: a run that is not to be pushed pushes nothing.
    trainer.push_to_hub()
    assert holds_model(hub.files("me/toy"), tmp_path)
    pushes = len(hub.messages("me/toy"))
    trainer.args.push_to_hub = False
    trainer.save_model()
    assert len(hub.messages("me/toy")) == pushes


def test_a_trainer_of_trl_pushes_its_low_bit_model_with_the_card_of_its_own_method(hub, model, tmp_path):
    settings = {"push_to_hub": True, "hub_model_id": "me/toy", "hub_token": WRITER, "distill_on": "answers"}
    args = LowBitDistillationConfig(**short_run(tmp_path, **settings))
    trainer = LowBitDistillationTrainer(model, None, args, train_dataset=pairs())
    trainer.train()
    trainer.push_to_hub()

    files = hub.files("me/toy")
    assert holds_model(files, tmp_path)
    card = files["README.md"].decode()
    assert "distilled from its own start in high precision with TRL's Distillation trainer" in card
    # The paper of distillation, and not that of the method.
    assert "agarwal2024on-policy" in card
    assert "gu2026qarl" not in card


# A run with an adapter on a frozen base.
FROZEN = {"lora_base": "frozen", "max_steps": 1}


def adapter():
    return LoraConfig(target_modules=["q_proj", "down_proj"])


def test_an_adapter_is_pushed_with_the_base_that_its_run_quantized(hub, model, tmp_path):
    trainer = pushing(model, tmp_path, peft_config=adapter(), **FROZEN)
    trainer.train()
    trainer.push_to_hub()

    assert holds_model(hub.files("me/toy-base"), tmp_path / "base")
    files = hub.files("me/toy")
    assert "model.safetensors" not in files
    assert "adapter_model.safetensors" in files

    # Each names its own base, so that neither needs the other.
    config_here = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config_here["base_model_name_or_path"] == "base"
    # By its commit: a later run may push another base there.
    there = {"base_model_name_or_path": "me/toy-base", "revision": commit_of("me/toy-base")}
    assert json.loads(files["adapter_config.json"]) == config_here | there

    card = files["README.md"].decode()
    assert "vllm serve me/toy-base --enable-lora --max-lora-rank 8 --lora-modules policy=me/toy" in card
    assert "vllm serve me/toy-base" in hub.files("me/toy-base")["README.md"].decode()


def save_another(kind, model, folder):
    """Save a model of a user's own into a folder: in high precision, an adapter, or quantized by another program."""
    if kind == "adapter":
        get_peft_model(AutoModelForCausalLM.from_pretrained(model), adapter()).save_pretrained(folder)
        return

    shutil.copytree(model, folder)
    if kind in ("awq", "compressed-tensors"):
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": kind}
        (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", ["high precision", "adapter", "awq", "compressed-tensors"])
def test_a_base_does_not_replace_a_model_of_the_user(hub, model, tmp_path, kind):
    """Nobody named the repository of the base: it is that of the adapter with an ending."""
    save_another(kind, model, tmp_path / "mine")
    push(tmp_path / "mine", open_repo("me/toy-base"), "mine")
    before = hub.files("me/toy-base")

    with pytest.raises(ValueError, match="base into me/toy-base, which holds another model: set hub_model_id"):
        pushing(model, tmp_path / "run", peft_config=adapter(), **FROZEN)
    assert hub.files("me/toy-base") == before
    assert "me/toy" not in hub.branches


def test_a_base_replaces_that_of_an_earlier_run(hub, model, tmp_path):
    open_repo("me/toy-base")  # also one without a model
    pushing(model, tmp_path / "run", peft_config=adapter(), **FROZEN)

    cli.main(["export", model, str(tmp_path / "base")])
    push(tmp_path / "base", "me/toy-base", "of an earlier run")
    pushing(model, tmp_path / "run", peft_config=adapter(), **FROZEN)

    # A user has edited its card, in which the line that says so is missing then.
    card = tmp_path / "base" / "README.md"
    card.write_text(card.read_text().replace(GENERATED, "") + "I like it.\n")
    push(tmp_path / "base", "me/toy-base", "with words")
    pushing(model, tmp_path / "run", peft_config=adapter(), **FROZEN)

    # Control: a model that a run trained is no base.
    trainer = make(model, tmp_path / "trained", hub_model_id="me/toy-base")
    del hub.branches["me/toy-base"]
    trainer.train()
    trainer.push_to_hub()
    with pytest.raises(ValueError, match="which holds another model"):
        pushing(model, tmp_path / "run", peft_config=adapter(), **FROZEN)


def test_a_low_bit_model_does_not_replace_the_start_of_its_run(hub, model, tmp_path):
    def begin(repository, commit=None, peft_config=None, **changes):
        loaded = AutoModelForCausalLM.from_pretrained(model)
        loaded.config._name_or_path = repository
        loaded.config._commit_hash = commit
        settings = {"push_to_hub": True, "hub_model_id": "me/toy"} | changes
        args = QaRLConfig(**without_engine(tmp_path / "run", **settings))
        tokenizer = AutoTokenizer.from_pretrained(model)
        return QaRLTrainer(
            loaded,
            distinct_characters,
            args,
            train_dataset=prompts(),
            processing_class=tokenizer,
            peft_config=peft_config,
        )

    with pytest.raises(ValueError, match="push to me/toy would replace the model that the run starts from"):
        begin("me/toy")
    begin("me/toy", hub_revision="w4")  # control: another branch
    begin("me/toy", quant_scheme="none")  # control: TRL's trainer goes on in one repository
    begin("me/another")

    # Nor does an adapter, whose push would delete the weights of its base.
    with pytest.raises(ValueError, match="push to me/toy would replace the model that the run starts from"):
        begin("me/toy", peft_config=adapter(), quant_scheme="none")

    # A script may have loaded a branch, which only the commit tells.
    open_repo("me/toy", revision="dev")
    begin("me/toy", commit_of("me/toy"), hub_revision="dev")  # control: it has the commit of main, which stays
    push(Path(model), "me/toy", "another", revision="dev")
    begin("me/toy", commit_of("me/toy"), hub_revision="dev")
    with pytest.raises(ValueError, match="push to me/toy would replace the model that the run starts from"):
        begin("me/toy", commit_of("me/toy", "dev"), hub_revision="dev")

    # Nor does a commit by which a run is pinned hide that it is that of the main branch, nor does a tag.
    for pin in (commit_of("me/toy"), "v1"):
        with pytest.raises(ValueError, match="push to me/toy would replace the model that the run starts from"):
            begin("me/toy", commit_of("me/toy"), model_init_kwargs={"revision": pin})

    # A script that calls `push_to_hub` by itself, and again after a push to another branch.
    trainer = begin("me/toy", push_to_hub=False)
    before = hub.files("me/toy")
    for _ in range(2):
        with pytest.raises(ValueError, match="push to me/toy would replace the model that the run starts from"):
            trainer.push_to_hub()
        assert hub.files("me/toy") == before
        assert trainer.push_to_hub(revision="w4a16")  # control


def test_beside_a_checkpoint_that_was_there_before_the_adapter_alone_is_pushed(hub, low_bit, tmp_path, caplog):
    trainer = pushing(str(low_bit), tmp_path / "run", peft_config=adapter(), quant_scheme="checkpoint", **FROZEN)
    trainer.train()
    trainer.push_to_hub()

    # No repository for a base, which is not the run's. Where it lies on this machine is nobody's business, and helps
    # nobody.
    assert hub.branches.keys() == {"me/toy"}
    files = hub.files("me/toy")
    assert "adapter_model.safetensors" in files
    config = json.loads(files["adapter_config.json"])
    assert config["base_model_name_or_path"] == f"path/to/{low_bit.name}"
    assert "its base is a folder of this machine: push that too" in caplog.text
    # Control: here the adapter loads.
    here = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert here["base_model_name_or_path"] == str(low_bit)


def test_a_script_names_another_branch_or_token_than_those_of_the_run(hub, model, tmp_path, monkeypatch):
    trainer = pushing(model, tmp_path, peft_config=adapter(), **FROZEN)
    trainer.train()
    trainer.push_to_hub("End", True, revision="v2", tags="sums")

    for repo in ("me/toy", "me/toy-base"):
        assert hub.messages(repo) == ["initial commit"]
        assert hub.messages(repo, "v2")[0] == "End"
    assert json.loads(hub.files("me/toy", "v2")["adapter_config.json"])["revision"] == commit_of("me/toy-base")
    card = hub.files("me/toy", "v2")["README.md"].decode()
    assert "- sums" in card
    # The commands load the main branch.
    assert "**This is the branch `v2`**" in card
    assert "hf download me/toy --revision v2" in card
    assert "the same with its base, `me/toy-base`" in card
    assert "hf download me/toy-base --revision v2" in hub.files("me/toy-base", "v2")["README.md"].decode()

    with pytest.raises(OSError, match="Nothing is lost"):
        trainer.push_to_hub(token=READER)
    monkeypatch.setenv("HF_TOKEN", READER)
    trainer.push_to_hub(token=WRITER)
    assert "adapter_model.safetensors" in hub.files("me/toy")


def test_an_argument_that_no_push_has_is_refused_before_a_save(hub, model, tmp_path):
    trainer = pushing(model, tmp_path)
    trainer.train()

    # As TRL's method: no card of it has a licence.
    with pytest.raises(TypeError, match="license"):
        trainer.push_to_hub(license="mit")
    assert not (tmp_path / "config.json").exists()


def test_a_push_that_fails_loses_nothing(hub, model, tmp_path):
    trainer = pushing(model, tmp_path)
    trainer.train()

    hub.refusals = [403]
    with pytest.raises(OSError, match="Nothing is lost"):
        trainer.push_to_hub()
    assert AutoModelForCausalLM.from_pretrained(tmp_path)

    trainer.push_to_hub()
    assert holds_model(hub.files("me/toy"), tmp_path)


@pytest.mark.parametrize(
    ("changes", "where", "again"),
    [
        ({}, "", "qarl-trl push {folder} me/toy"),
        ({"peft_config": "merged"}, "/low_bit", "qarl-trl push {folder} me/toy"),
        ({"peft_config": "frozen", "lora_base": "frozen"}, "", "trainer.push_to_hub\\(\\), or .*: auto"),
        ({"quant_scheme": "none", "loss_type": "grpo"}, "", "trainer.push_to_hub\\(\\), or .*: auto"),
    ],
)
def test_a_push_that_fails_at_its_first_request_says_where_the_model_is_and_what_to_do(
    hub, model, tmp_path, monkeypatch, changes, where, again
):
    if "peft_config" in changes:
        changes = changes | {"peft_config": adapter()}
    # It pushes at the end only: nothing asked the Hub before.
    trainer = make(model, tmp_path, hub_model_id="me/toy", **changes)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    ways_on = f"Nothing is lost: the model is in {tmp_path}{where}; .?{again.format(folder=f'{tmp_path}{where}')}"

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(OSError, match=f"ConnectError.*look at the network.*{ways_on}") as failed:
        trainer.push_to_hub()
    assert "HF_TOKEN" not in str(failed.value)
    assert "\n" not in str(failed.value)
    assert list(Path(f"{tmp_path}{where}").glob("*model.safetensors"))

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(OSError, match=f"401.*HF_TOKEN.*{ways_on}"):
        trainer.push_to_hub()


def test_the_command_too_says_it(hub, low_bit, capsys, monkeypatch):
    hub.refusals = [503] * 9
    monkeypatch.setattr("time.sleep", lambda seconds: None)

    with pytest.raises(SystemExit):
        cli.main(["push", str(low_bit), "me/toy", "--revision", "v2"])

    said = capsys.readouterr().err
    assert "try again later" in said
    assert f"`qarl-trl push {low_bit} me/toy --revision v2` tries again" in said


def test_a_token_is_in_no_file_no_log_and_no_error(hub, model, tmp_path, caplog, capfd):
    caplog.set_level("DEBUG", logger="qarl_trl")
    trainer = pushing(model, tmp_path, hub_token=WRITER)
    trainer.train()
    hub.refusals = [403]
    with pytest.raises(OSError, match="Nothing is lost") as error:
        trainer.push_to_hub()
    trainer.push_to_hub()

    # Control: the settings are among the files, which transformers pickles.
    assert list(tmp_path.rglob("training_args.bin"))
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert WRITER.encode() not in file.read_bytes(), file
    for name, content in hub.files("me/toy").items():
        assert WRITER.encode() not in content, name

    printed = "".join(capfd.readouterr())
    for text in (caplog.text, printed, str(error.value), str(trainer.args.to_dict())):
        assert WRITER not in text

    # The file of the settings is a pickle of them.
    assert pickle.loads(pickle.dumps(trainer.args)).hub_token is None
    assert WRITER.encode() in pickle.dumps(dict(vars(trainer.args)))  # control: pickle would have kept it


def test_what_cannot_be_pushed_to_is_refused_before_the_model_loads(hub, model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "wrong")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))

    with pytest.raises(OSError, match="401"):
        pushing(model, tmp_path)


# Commands --------------------------------------------------------------------------------------------------------


def test_push_writes_its_address_into_the_card(hub, model, tmp_path, capsys):
    low_bit = tmp_path / "out"
    cli.main(["export", model, str(low_bit)])

    cli.main(["push", str(low_bit), "me/toy", "--private", "--revision", "w4"])

    assert "pushed: http" in capsys.readouterr().out
    assert hub.private["me/toy"]
    assert holds_model(hub.files("me/toy", "w4"), low_bit)
    card = hub.files("me/toy", "w4")["README.md"].decode()
    assert "vllm serve me/toy\n" in card
    assert "# toy\n" in card


def test_the_card_in_a_second_repository_names_that_one(hub, low_bit):
    write_card(low_bit, base_id="me/toy-base", base="me/toy-base")
    card = low_bit / "README.md"
    here = card.read_text()

    for name in ("me/toy", "me/other"):
        cli.main(["push", str(low_bit), name])
    assert card.read_text() == here

    # A card that was written for one repository, as that of a run with hub_model_id.
    write_card(low_bit, "me/toy", base_id="me/toy-base", base="me/toy-base")
    cli.main(["push", str(low_bit), "me/third"])

    for name in ("toy", "other", "third"):
        pushed = hub.files(f"me/{name}")["README.md"].decode()
        # Each place of a card where a command or a snippet names the model.
        assert set(re.findall(r"vllm serve (\S+)|--model (\S+)|\(\"([^\"]+)\"\)", pushed)) == {
            (f"me/{name}", "", ""),
            ("", f"me/{name}", ""),
            ("", "", f"me/{name}"),
        }
        assert f"\n# {name}\n" in pushed
        assert "https://huggingface.co/me/toy-base" in pushed  # another name that begins like the first

    # What a user wrote stays, but not the address of the first repository in our commands.
    # Without the mark a card counts as the user's.
    edited = card.read_text().replace(GENERATED, "").replace("# toy", "# My sums")
    card.write_text(edited)
    cli.main(["push", str(low_bit), "me/fourth"])
    pushed = hub.files("me/fourth")["README.md"].decode()
    assert "# My sums" in pushed
    assert "vllm serve me/fourth\n" in pushed


def test_push_does_not_replace_the_model_that_a_folder_was_made_from(hub, model, low_bit, capsys):
    push(Path(model), open_repo("me/toy"), "in high precision")
    before = hub.files("me/toy")
    write_card(low_bit, base_id="me/toy", base="me/toy")

    with pytest.raises(SystemExit) as stopped:
        cli.main(["push", str(low_bit), "me/toy"])
    assert stopped.value.code == 2
    assert "A push to me/toy would replace the model that" in capsys.readouterr().err
    assert hub.files("me/toy") == before

    # Controls: another branch, another repository, and a folder without a card.
    cli.main(["push", str(low_bit), "me/toy", "--revision", "w4"])
    cli.main(["push", str(low_bit), "me/other"])
    (low_bit / "README.md").unlink()
    cli.main(["push", str(low_bit), "me/third"])


def test_push_refuses_master_weights(hub, model, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["push", model, "me/other"])
    assert stopped.value.code == 2
    assert "no low-bit model" in capsys.readouterr().err
    assert "me/other" not in hub.branches


@pytest.mark.parametrize("lacks", ["a file", "a tensor", "nothing"])
def test_push_refuses_a_model_that_is_not_complete(hub, low_bit, capsys, lacks):
    """As a copy that was broken off: an engine loads what is there, and answers garbage."""
    tensors = load_file(low_bit / "model.safetensors")
    names = sorted(tensors)
    (low_bit / "model.safetensors").unlink()
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    files = {name: file for file, part in halves.items() for name in part}
    (low_bit / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    if lacks == "a file":
        del halves["model-00002-of-00002.safetensors"]
    if lacks == "a tensor":
        scale = next(name for name in names if name.endswith("weight_scale"))
        halves[files[scale]].remove(scale)
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, low_bit / file)

    # Control: the same model in two files, with nothing missing.
    if lacks == "nothing":
        cli.main(["push", str(low_bit), "me/toy"])
        assert holds_model(hub.files("me/toy"), low_bit)
        return

    with pytest.raises(SystemExit):
        cli.main(["push", str(low_bit), "me/toy"])
    assert "lacks" in capsys.readouterr().err
    assert "me/toy" not in hub.branches


@pytest.mark.parametrize("names", [["default", "policy"], ["policy"]])
def test_an_adapter_that_is_saved_in_a_folder_of_its_own_is_not_pushed_as_another_one(hub, model, tmp_path, names):
    first, *others = names
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(model), adapter(), adapter_name=first)
    for name in others:
        policy.add_adapter(name, adapter())
    policy.set_adapter("policy")

    with pytest.raises(ValueError, match=r"must be named 'default' to be pushed, got 'policy'.* hf upload"):
        pushing(policy, tmp_path, quant_scheme="none")
    trainer = make(policy, tmp_path, quant_scheme="none", hub_model_id="me/toy")
    with pytest.raises(ValueError, match="must be named 'default'"):
        trainer.push_to_hub()
    assert "me/toy" not in hub.branches
    # A script that ends there has not lost it: this is the folder that the error names.
    assert (tmp_path / "policy" / "adapter_model.safetensors").is_file()

    # Control: a run in low bits pushes its merged model, whatever the name of the adapter.
    pushing(policy, tmp_path / "low").push_to_hub()
    assert "model.safetensors" in hub.files("me/toy")
