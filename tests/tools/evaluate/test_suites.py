"""Suites of the table and from files, and their prompts."""

import json

import pytest
from conftest import make_tokenizer

from qarl_trl.tools.evaluate.suites import MATH, SUITES, find_suites, load_problems


ROWS = [{"problem": "1 + 1 =", "answer": "2"}, {"problem": "2 + 2 =", "answer": "4"}]
UNREADABLE = r"x_{0} \cos (\omega t)+$ $\dot{x}_{0} \sin (\omega t) / \omega"  # of Minerva
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if think %} hm{% endif %}"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_math_stands_for_the_six_suites_of_the_paper():
    assert list(find_suites(["math"])) == list(MATH)
    assert len(MATH) == 6


def test_suites_come_from_the_table_or_from_files(tmp_path):
    file = write_rows(tmp_path / "sums.jsonl", ROWS)

    assert find_suites([file, "gsm8k"]) == {"sums": (file, "test", None), "gsm8k": SUITES["gsm8k"]}


def test_unknown_suites_and_doubles_are_refused(tmp_path):
    file = write_rows(tmp_path / "sums.jsonl", ROWS)

    with pytest.raises(ValueError, match="'math50' must be"):
        find_suites(["math50"])
    with pytest.raises(ValueError, match="'sums' twice"):
        find_suites([file, file])


def prompt_ids_of_trl(tokenizer, template_kwargs, rows):
    """Token ids of the prompts as TRL's trainer makes them."""
    from trl import GRPOTrainer

    trainer = object.__new__(GRPOTrainer)
    trainer.__dict__ |= {
        "processing_class": tokenizer,
        "tools": None,
        "chat_template": None,
        "chat_template_kwargs": template_kwargs,
        "_is_vlm": False,
        "environment_factories": None,
    }
    return trainer._tokenize_prompts(rows["prompt"][:])[0]


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["text", "chat"])
def test_prompts_are_those_of_the_trainer(tmp_path, template):
    """Against TRL's own tokenization, with a chat template and without."""
    from qarl_trl.data import load_math_dataset

    source = write_rows(tmp_path / "sums.jsonl", ROWS)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    template_kwargs = {"think": True}
    rows = load_math_dataset(source, prompt_template="{problem} #", conversational=template is not None)

    problems = load_problems(source, "test", None, tokenizer, template_kwargs, prompt_template="{problem} #")

    expected = prompt_ids_of_trl(tokenizer, template_kwargs, rows)
    assert [problem["prompt_ids"] for problem in problems] == expected
    assert all("#" in problem["prompt"] for problem in problems)
    assert ("hm" in problems[0]["prompt"]) == (template is not None)  # control: the template's arguments arrive


def test_problems_whose_reference_cannot_be_read_are_left_out(tmp_path):
    rows = [*ROWS, {"problem": "q", "answer": UNREADABLE}]
    source = write_rows(tmp_path / "a.jsonl", rows)

    problems = load_problems(source, "test", None, make_tokenizer(), {})

    assert [problem["answer"] for problem in problems] == ["2", "4"]


def test_a_suite_without_a_readable_reference_is_refused(tmp_path):
    source = write_rows(tmp_path / "b.jsonl", [{"problem": "q", "answer": UNREADABLE}])

    with pytest.raises(ValueError, match="none of the 1 answers"):
        load_problems(source, "test", None, make_tokenizer(), {})
