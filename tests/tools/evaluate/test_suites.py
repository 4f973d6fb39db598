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


def test_math_is_the_papers_six():
    assert [suite.name for suite in find_suites(["math", "aime24"], [])] == list(MATH)
    assert len(MATH) == 6 and all(find_suites([name], []) == [SUITES[name]] for name in MATH)


def test_files_and_folders_take_the_place_of_the_hub(tmp_path):
    own, aime = write(tmp_path / "own.jsonl", ROWS), write(tmp_path / "aime24.jsonl", ROWS)
    assert find_suites([], [own]) == [Suite("own", own)]
    assert find_suites(["aime24"], [str(tmp_path)]) == [Suite("aime24", aime)]
    assert find_suites(["aime24", "amc23"], [f"aime24={own}"]) == [Suite("aime24", own), SUITES["amc23"]]
    assert find_suites(["aime24"], [str(tmp_path), own]) == [Suite("aime24", aime), Suite("own", own)]


@pytest.mark.parametrize(
    ("names", "data", "error", "message"),
    [
        (["math50"], [], ValueError, "'math50' must be math, or of math500, aime24"),
        ([], [], ValueError, "nothing to evaluate on"),
        ([], ["."], ValueError, "one folder without a name, for the suites that --suite names"),
        (["math500"], [".", "."], ValueError, "one folder"),
        (["math500"], ["own=."], ValueError, "one folder"),
        ([], ["a.jsonl", "a/a.jsonl"], ValueError, "there is a suite 'a' already"),
        (["math500"], ["."], FileNotFoundError, "has no math500.jsonl"),
        ([], ["none.jsonl"], FileNotFoundError, "none.jsonl"),
        ([], ["empty.jsonl"], ValueError, "empty file"),
        ([], ["sums.csv"], ValueError, "'.csv' file"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, monkeypatch, names, data, error, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "a").mkdir()
    for name in ("a.jsonl", "a/a.jsonl"):
        write(tmp_path / name, ROWS)
    (tmp_path / "sums.csv").write_text("a,b\n")
    with pytest.raises(error, match=message):
        find_suites(names, data)


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
        problems, left_out = load_problems(suite, tokenizer, kwargs, prompt_template="{problem} #")
        assert [list(problem.prompt_ids) for problem in problems] == expected and left_out == 0
        assert all("#" in problem.prompt for problem in problems)
        assert ("hm" in problems[0].prompt) == (template is not None)  # control: the template's arguments arrive


def test_problems_whose_reference_cannot_be_read_are_counted(tmp_path):
    unreadable = r"x_{0} \cos (\omega t)+$ $\dot{x}_{0} \sin (\omega t) / \omega"  # of Minerva
    rows = [*ROWS, {"problem": "q", "answer": unreadable}]
    problems, left_out = load_problems(Suite("sums", write(tmp_path / "a.jsonl", rows)), make_tokenizer(), {})
    assert ([problem.answer for problem in problems], left_out) == (["2", "4"], 1)
    with pytest.raises(ValueError, match="none of the 1 answers"):
        load_problems(Suite("sums", write(tmp_path / "b.jsonl", rows[2:])), make_tokenizer(), {})


def test_a_set_without_answers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="None of the 1 rows"):
        load_problems(Suite("s", write(tmp_path / "a.jsonl", [{"problem": "a", "answer": ""}])), make_tokenizer(), {})
    with pytest.raises(ValueError, match="answer_column"):
        load_problems(Suite("s", write(tmp_path / "b.jsonl", [{"problem": "a"}])), make_tokenizer(), {})


def test_without_network_the_suite_and_the_way_out_are_named(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="HuggingFaceH4/MATH-500.*--data math500=FILE"):
        load_problems(SUITES["math500"], make_tokenizer(), {})
