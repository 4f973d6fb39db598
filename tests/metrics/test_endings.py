"""`qarl_trl.metrics.endings`: answers that ended on a stop string are not cut off."""

from types import SimpleNamespace

import pytest
import torch
from slow.toys import make_tokenizer

from qarl_trl import QaRLConfig
from qarl_trl.metrics.endings import Endings, ending_metrics
from qarl_trl.trainers.configs import LowBitRLOOConfig
from qarl_trl.trainers.measured import MeasuredMixin


# Tokens of one and of two characters, so that a string may end inside of one, and a token without any text.
TOKENS = ("a", "b;", ";c", "d", "")


def decode(token_ids):
    return "".join(TOKENS[token] for token in token_ids)


@pytest.mark.parametrize(
    ("stop", "token_ids", "ended"),
    [
        (["b"], [0, 1], True),
        # A part of the last token, and one that began in the token before.
        ("b;", [0, 0, 1], True),
        (["x", ";;"], [0, 1, 2], True),
        (["d"], [3], True),
        # The answer went on, as an earlier turn of a tool call does; it is not there; the last token has no text.
        (["b"], [0, 1, 0], False),
        (["x"], [0, 1], False),
        (["d"], [3, 4], False),
    ],
)
def test_an_answer_ended_if_the_string_ends_in_its_last_token(stop, token_ids, ended):
    assert Endings({"stop": stop}, decode).ended(token_ids) is ended


def test_stop_tokens_end_an_answer_too():
    endings = Endings({"stop_token_ids": [3]}, decode)

    assert endings.ended([0, 3])
    assert not endings.ended([3, 0])


@pytest.mark.parametrize("settings", [None, {}, {"stop": []}, {"ignore_eos": True}])
def test_a_run_without_them_has_none(settings):
    assert not Endings(settings, decode)


def test_the_metrics_are_those_of_trl():
    lengths = torch.tensor([4, 6, 8, 10])

    metrics = ending_metrics(lengths, torch.tensor([True, True, False, False]))
    assert list(metrics.values()) == [0.5, 5.0, 4.0, 6.0]
    assert list(ending_metrics(lengths, torch.zeros(4, dtype=torch.bool)).values()) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("config_class", [QaRLConfig, LowBitRLOOConfig])
@pytest.mark.parametrize("stop", [{"stop": ["#"]}, {"stop_token_ids": [2]}])
def test_answers_that_end_there_cannot_be_masked_as_cut_off(tmp_path, stop, config_class):
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "use_vllm": True, "report_to": "none"}

    with pytest.raises(ValueError, match="mask_truncated_completions must be False"):
        config_class(**settings, mask_truncated_completions=True, generation_kwargs=stop)

    # Controls: each of the two alone, beside another setting of the engine.
    config_class(**settings, generation_kwargs=stop)
    config_class(**settings, mask_truncated_completions=True, generation_kwargs={"max_tokens": 8})


@pytest.mark.parametrize("skips", [None, True, False])
def test_a_special_token_that_is_a_stop_string_ends_an_answer(skips):
    """Also where the text of the engine has none: it stops at its id."""
    tokenizer = make_tokenizer()
    settings = {"stop": [tokenizer.eos_token]}
    if skips is not None:
        settings["skip_special_tokens"] = skips
    trainer = MeasuredMixin()
    trainer.args = SimpleNamespace(use_vllm=True, generation_kwargs=settings)
    trainer._tokenizer = tokenizer

    trainer._choose_endings()

    assert trainer._endings.ended([*tokenizer("1+1")["input_ids"], tokenizer.eos_token_id])
    assert not trainer._endings.ended(tokenizer("1+1")["input_ids"])


def test_the_decoder_of_a_tokenizer_makes_the_text_of_the_engine():
    tokenizer = make_tokenizer()
    endings = Endings({"stop": "=1"}, lambda ids: tokenizer.decode(ids, skip_special_tokens=True))

    assert endings.ended(tokenizer("1+1=1")["input_ids"])
    assert not endings.ended(tokenizer("1+1=2")["input_ids"])
