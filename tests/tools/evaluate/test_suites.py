"""Suites of the table and from files, and their prompts."""

import json

import pytest
from conftest import make_tokenizer
from lines import write_rows

from qarl_trl.methods import QaRLScriptArguments
from qarl_trl.tools.evaluate.command import _load_problems
from qarl_trl.tools.evaluate.options import make_parser
from qarl_trl.tools.evaluate.suites import MATH, SUITES, find_suites, load_problems
from qarl_trl.train import load_datasets


ROWS = [{"problem": "1 + 1 =", "answer": "2"}, {"problem": "2 + 2 =", "answer": "4"}]
# An answer of Minerva, which math_verify does not parse.
UNREADABLE = r"x_{0} \cos (\omega t)+$ $\dot{x}_{0} \sin (\omega t) / \omega"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if think %} hm{% endif %}"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


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

    # Without its constructor, which would load a model. These are the attributes that the method reads.
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


CONVERSATION = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "1 + 1 ="},
]
# Of a recipe: what it says about prompts, by its fields.
RECIPES = {
    "text": {"conversational": False},
    "text with a template": {"conversational": False, "prompt_template": "{problem} #"},
    "chat": {},
    "chat with a template": {"prompt_template": "{problem} #"},
    "system": {"system_prompt": "Think."},
    "template's arguments": {"chat_template_kwargs": {"think": True}},
    "other columns": {"problem_column": "task", "answer_column": "result"},
    "messages": {"problem_column": "messages"},
    "messages as text": {"problem_column": "messages", "conversational": False},
    "another system message": {"problem_column": "messages", "system_prompt": "Think."},
}


def prompts_of_training(source, tokenizer, recipe):
    """Token ids of the prompts of a run with a recipe."""
    settings = dict(recipe)
    # A field of TRL's config, where all others are of the script's arguments.
    template_kwargs = settings.pop("chat_template_kwargs", {})
    script_args = QaRLScriptArguments(dataset_name_or_path=source, **settings)
    rows, _ = load_datasets(script_args, with_eval=False)
    return prompt_ids_of_trl(tokenizer, template_kwargs, rows)


def prompts_of_eval(source, tokenizer, recipe):
    """Token ids of the prompts of `eval` with options of the same names."""
    argv = ["model", "--suite", source]
    for key, value in recipe.items():
        argv += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    options = make_parser().parse_args(argv)
    problems = _load_problems(find_suites(options.suite), tokenizer, options)
    return [problem["prompt_ids"] for problem in problems["sums"]]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_prompts_are_those_of_training_with_the_same_settings(tmp_path, recipe):
    """Against TRL's own tokenization, of a model with a chat template: also text is completed as text."""
    rows = []
    for row in ROWS:
        others = {"task": f"task {row['problem']}", "result": row["answer"], "messages": CONVERSATION}
        rows.append(row | others)
    source = write_rows(tmp_path / "sums.jsonl", rows)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE

    expected = prompts_of_training(source, tokenizer, recipe)

    assert prompts_of_eval(source, tokenizer, recipe) == expected
    # Control: the settings change the prompts.
    if recipe:
        assert prompts_of_training(source, tokenizer, {}) != expected


def test_without_a_chat_template_prompts_are_text(tmp_path):
    """As of a base model, with `conversational: false` in its recipe."""
    source = write_rows(tmp_path / "sums.jsonl", ROWS)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None

    assert prompts_of_eval(source, tokenizer, {}) == prompts_of_training(source, tokenizer, {"conversational": False})
    with pytest.raises(ValueError, match="--conversational true needs a chat template"):
        prompts_of_eval(source, tokenizer, {"conversational": True})


def test_problems_whose_reference_cannot_be_read_are_left_out(tmp_path):
    rows = [*ROWS, {"problem": "q", "answer": UNREADABLE}]
    source = write_rows(tmp_path / "a.jsonl", rows)

    problems = load_problems(source, "test", None, make_tokenizer(), {})

    assert [problem["answer"] for problem in problems] == ["2", "4"]
    # A reward of the user may read it.
    assert len(load_problems(source, "test", None, make_tokenizer(), {}, needs_math=False)) == 3


def test_a_suite_without_a_readable_reference_is_refused(tmp_path):
    source = write_rows(tmp_path / "b.jsonl", [{"problem": "q", "answer": UNREADABLE}])

    with pytest.raises(ValueError, match="none of the 1 answers"):
        load_problems(source, "test", None, make_tokenizer(), {})


@pytest.mark.parametrize("template", ["{% for %}", "{{ nothing.of.this }}", "{{ raise_exception('no system') }}"])
def test_a_template_that_fails_is_one_line(tmp_path, template):
    source = write_rows(tmp_path / "sums.jsonl", ROWS)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template

    with pytest.raises(ValueError, match="cannot render the prompt.*1 \\+ 1.*--conversational false") as error:
        load_problems(source, "test", None, tokenizer, {})
    assert "\n" not in str(error.value)

    # Control: the advice of the error works.
    assert len(load_problems(source, "test", None, tokenizer, {}, conversational=False)) == 2
