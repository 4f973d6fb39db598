"""Suites of the table and from files, and their prompts."""

import json

import pytest
from conftest import make_tokenizer

from qarl_trl.tools.evaluate.suites import MATH, SUITES, find_suites, load_problems


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROWS = [{"problem": "1 + 1 =", "answer": "2"}, {"problem": "2 + 2 =", "answer": "4"}]


def test_suites_come_from_the_table_or_from_files(tmp_path):
    own = write(tmp_path / "own.jsonl", ROWS)
    assert list(find_suites(["math"])) == list(MATH) and len(MATH) == 6
    assert find_suites([own, "gsm8k"]) == {"own": (own, "test", None), "gsm8k": SUITES["gsm8k"]}
    for entries, message in {("math50",): "'math50' must be", (own, own): "'own' twice"}.items():
        with pytest.raises(ValueError, match=message):
            find_suites(entries)


def test_prompts_are_those_of_the_trainer(tmp_path):
    """Against TRL's own tokenization, with a chat template and without."""
    from trl import GRPOTrainer

    from qarl_trl.data import load_math_dataset

    source = write(tmp_path / "sums.jsonl", ROWS)
    for template in (
        None,
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if think %} hm{% endif %}",
    ):
        tokenizer = make_tokenizer()
        tokenizer.chat_template = template
        kwargs = {"think": True}
        trainer = object.__new__(GRPOTrainer)
        trainer.__dict__ |= {
            **{"processing_class": tokenizer, "tools": None, "chat_template": None, "chat_template_kwargs": kwargs},
            **{"_is_vlm": False, "environment_factories": None},
        }
        rows = load_math_dataset(source, prompt_template="{problem} #", conversational=template is not None)
        expected = trainer._tokenize_prompts(rows["prompt"][:])[0]
        problems = load_problems(source, "test", None, tokenizer, kwargs, prompt_template="{problem} #")
        assert [problem["prompt_ids"] for problem in problems] == expected
        assert all("#" in problem["prompt"] for problem in problems)
        assert ("hm" in problems[0]["prompt"]) == (template is not None)  # control: the template's arguments arrive


def test_problems_whose_reference_cannot_be_read_are_left_out(tmp_path):
    unreadable = r"x_{0} \cos (\omega t)+$ $\dot{x}_{0} \sin (\omega t) / \omega"  # of Minerva
    rows = [*ROWS, {"problem": "q", "answer": unreadable}]
    problems = load_problems(write(tmp_path / "a.jsonl", rows), "test", None, make_tokenizer(), {})
    assert [problem["answer"] for problem in problems] == ["2", "4"]
    with pytest.raises(ValueError, match="none of the 1 answers"):
        load_problems(write(tmp_path / "b.jsonl", rows[2:]), "test", None, make_tokenizer(), {})
