"""Suites from files and from the Hub, their prompts, and what is refused."""

import json

import pytest
from conftest import make_tokenizer

from qarl_trl.tools.evaluate.suites import MATH, SUITES, Suite, find_suites, load_problems


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROWS = [{"problem": "1 + 1 =", "answer": "2"}, {"problem": "2 + 2 =", "answer": "4"}]


def test_suites_come_from_the_table_or_from_files(tmp_path):
    own = write(tmp_path / "own.jsonl", ROWS)
    assert [suite.name for suite in find_suites(["math"])] == list(MATH) and len(MATH) == 6
    assert find_suites([own, "gsm8k"]) == [Suite("own", own), SUITES["gsm8k"]]
    assert find_suites([f"aime24={own}", "amc23"]) == [Suite("aime24", own), SUITES["amc23"]]


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        (["math50"], ValueError, "--suite 'math50' must be math, one of math500, aime24"),
        (["math", "aime24"], ValueError, "'aime24' twice"),
        (["a.jsonl", "a/a.jsonl"], ValueError, "'a' twice"),
        (["none.jsonl"], FileNotFoundError, "none.jsonl"),
        (["sums.csv"], ValueError, "'.csv' file"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, monkeypatch, entries, error, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    for name in ("a.jsonl", "a/a.jsonl"):
        write(tmp_path / name, ROWS)
    (tmp_path / "sums.csv").write_text("a,b\n")
    with pytest.raises(error, match=message):
        find_suites(entries)


def test_prompts_are_those_of_the_trainer(tmp_path):
    """Against TRL's own tokenization, with a chat template and without."""
    from trl import GRPOTrainer

    from qarl_trl.data import load_math_dataset

    suite = Suite("sums", write(tmp_path / "sums.jsonl", ROWS))
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
        rows = load_math_dataset(suite.source, prompt_template="{problem} #", conversational=template is not None)
        expected = trainer._tokenize_prompts(rows["prompt"][:])[0]
        problems = load_problems(suite, tokenizer, kwargs, prompt_template="{problem} #")
        assert [list(problem.prompt_ids) for problem in problems] == expected
        assert all("#" in problem.prompt for problem in problems)
        assert ("hm" in problems[0].prompt) == (template is not None)  # control: the template's arguments arrive


def test_problems_whose_reference_cannot_be_read_are_counted(tmp_path, capsys):
    unreadable = r"x_{0} \cos (\omega t)+$ $\dot{x}_{0} \sin (\omega t) / \omega"  # of Minerva
    rows = [*ROWS, {"problem": "q", "answer": unreadable}]
    problems = load_problems(Suite("sums", write(tmp_path / "a.jsonl", rows)), make_tokenizer(), {})
    assert [problem.answer for problem in problems] == ["2", "4"]
    assert "sums: 1 problems left out" in capsys.readouterr().out
    with pytest.raises(ValueError, match="none of the 1 answers"):
        load_problems(Suite("sums", write(tmp_path / "b.jsonl", rows[2:])), make_tokenizer(), {})


def test_without_network_the_suite_and_the_way_out_are_named(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="HuggingFaceH4/MATH-500.*--suite math500=FILE"):
        load_problems(SUITES["math500"], make_tokenizer(), {})
