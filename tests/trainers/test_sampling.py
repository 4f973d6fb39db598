"""`qarl_trl.trainers.sampling`: end tokens that TRL does not know. Noise and seeds: test_rloo.py, test_config.py."""

import json
import shutil
from pathlib import Path

import pytest
from slow.toys import distinct_characters, make_tokenizer, prompts, save_model
from slow.toys import settings as qarl_settings

from qarl_trl import LowBitRLOOConfig, LowBitRLOOTrainer, QaRLConfig, QaRLTrainer
from qarl_trl.trainers.sampling import with_stop_tokens
from trainers.runs import settings


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a small model, whose end token is 1."""
    return save_model(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture(params=["QaRL", "RLOO"])
def make(request, model, tmp_path):
    """Make a trainer with these `generation_kwargs`, without an engine."""

    def build(**generation_kwargs):
        if request.param == "QaRL":
            changes = {"use_vllm": False, "bf16": False, "max_steps": 1, "generation_kwargs": generation_kwargs}
            config = QaRLConfig(**qarl_settings(tmp_path / "run", **changes))
            return QaRLTrainer(model, distinct_characters, config, train_dataset=prompts())
        config = LowBitRLOOConfig(**settings(tmp_path / "run", num_generations=4, generation_kwargs=generation_kwargs))
        return LowBitRLOOTrainer(model, distinct_characters, config, train_dataset=prompts())

    return build


def test_an_end_token_that_the_trainer_does_not_know_is_refused(make):
    """Padding after it would be a part of the answers, and trained on."""
    with pytest.raises(ValueError, match=r"eos_token_id \[5\], and the tokenizer and the model have \[1\]"):
        make(eos_token_id=[1, 5])

    # Controls: those that it knows, as a number and as a list, and none.
    for known in ({"eos_token_id": 1}, {"eos_token_id": [1]}, {"eos_token_id": None}, {}):
        make(**known)


def test_an_end_token_of_the_models_generation_config_is_known(model, tmp_path):
    """The advice of the error works."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    changes = {"use_vllm": False, "bf16": False, "generation_kwargs": {"eos_token_id": [1, 5]}}

    config = QaRLConfig(**qarl_settings(tmp_path / "run", **changes))
    trainer = QaRLTrainer(str(folder), distinct_characters, config, train_dataset=prompts())

    assert trainer.eos_token_ids == [1, 5]


def test_what_transformers_takes_from_the_models_generation_config_is_said(model, tmp_path, caplog):
    """TRL leaves it open, and the loss knows nothing of it."""

    def warning(fields, **generation_kwargs):
        caplog.clear()
        folder = Path(shutil.copytree(model, tmp_path / "model", dirs_exist_ok=True))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "do_sample": True} | fields))
        changes = {"use_vllm": False, "bf16": False, "generation_kwargs": generation_kwargs}
        config = QaRLConfig(**qarl_settings(tmp_path / "run", **changes))
        QaRLTrainer(str(folder), distinct_characters, config, train_dataset=prompts())
        return [record.message for record in caplog.records if "by which transformers samples" in record.message]

    assert "{'min_p': 0.5}" in warning({"min_p": 0.5})[0]
    # Controls: what draws no other token, what TRL sets itself, and what the user does.
    assert not warning({"use_cache": True, "typical_p": 1.0, "no_repeat_ngram_size": 0})
    assert not warning({"temperature": 0.6, "top_k": 20, "top_p": 0.9})
    assert not warning({"min_p": 0.5}, min_p=0.1)


@pytest.mark.parametrize(
    ("of_user", "stops"),
    [
        # Two that the engine's text lacks: a special token, and one that was added in memory.
        ({"stop": ["<pad>", "</a>", "#"]}, [0, 64]),
        ({"stop": "</a>", "stop_token_ids": [5]}, [5, 64]),
        ({"stop": ["#"]}, None),
        ({"stop_token_ids": [5]}, [5]),
        (None, None),
    ],
)
def test_a_stop_string_that_is_an_added_token_stops_by_its_id(of_user, stops):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["</a>"])
    ids = tokenizer.convert_tokens_to_ids(["<pad>", "</a>"])
    expected = None if stops is None else [dict(zip([0, 64], ids, strict=True)).get(stop, stop) for stop in stops]

    settings = with_stop_tokens(of_user, tokenizer)

    assert (settings or {}).get("stop_token_ids") == expected
    # The strings stay, for tokens that spell them.
    assert (settings or {}).get("stop") == (of_user or {}).get("stop")


def test_a_tokenizer_may_know_nothing_of_added_tokens():
    """Mistral's own, which transformers takes for a folder with `tekken.json`."""
    assert with_stop_tokens({"stop": ["#"]}, object()) == {"stop": ["#"]}
    assert with_stop_tokens(None, object()) is None
