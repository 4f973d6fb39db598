"""`load_math_dataset` and `load_prompts`: columns, answers, prompts, and what they refuse."""

import json
import logging
import math
import os
import shutil
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from datasets import ClassLabel, Dataset, Features, Value
from lines import write_rows

from qarl_trl.data import final_answer, load_math_dataset, load_prompts, load_rows, local_path


BOXED = "{problem}\nAnswer in \\boxed{}."


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache of data sets for each test."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def write(tmp_path):
    """A function that writes rows to a file, and returns its path."""

    def to_file(rows, name="set.jsonl"):
        path = tmp_path / name
        if path.suffix == ".parquet":
            Dataset.from_list(rows).to_parquet(path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows))
        else:
            write_rows(path, rows)
        return str(path)

    return to_file


def user(text):
    """A prompt of one message."""
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("name", ["set.jsonl", "set.json", "set.parquet"])
def test_file_becomes_prompt_and_answer_only(write, name):
    path = write([{"id": 7, "problem": "1+1?", "answer": "2"}, {"id": 8, "problem": "2+2?", "answer": "4"}], name)

    dataset = load_math_dataset(path)

    assert dataset.column_names == ["prompt", "answer"]
    assert dataset[:] == {"prompt": [user("1+1?"), user("2+2?")], "answer": ["2", "4"]}


@pytest.mark.parametrize("name", ["set[1].jsonl", "a*b.json", "q?.parquet", "s[0-9]/[x].jsonl"])
def test_a_name_with_wildcards_is_that_file_alone(write, tmp_path, monkeypatch, name):
    (tmp_path / "s[0-9]").mkdir()
    (tmp_path / "s1").mkdir()
    write([{"problem": "right", "answer": "1"}], name)
    # What the names match as patterns, which is how `datasets` takes a path.
    others = ["set1.jsonl", "axb.json", "qq.parquet", "s1/x.jsonl"]
    for other in others:
        write([{"problem": "wrong", "answer": "1"}], other)

    assert load_math_dataset(str(tmp_path / name))["prompt"] == [user("right")]

    # Also in a folder with such a name.
    monkeypatch.chdir((tmp_path / name).parent)
    assert load_math_dataset(Path(name).name)["prompt"] == [user("right")]


@pytest.mark.parametrize("how", ["a copy", "a link", "in a folder"])
def test_another_file_of_the_same_time_is_read_anew(write, tmp_path, how):
    """As `cp -p`, an archive or a link leaves it: datasets keeps rows by path and time, and would return the old."""
    first = Path(write([{"problem": "1+1", "answer": "2"}]))
    second = tmp_path / "other.jsonl"
    second.write_text('{"problem": "1+2", "answer": "3"}\n')
    time = first.stat().st_mtime
    os.utime(second, (time, time))

    name = tmp_path / "train.jsonl"
    if how == "in a folder":
        name = tmp_path / "folder" / "train.jsonl"
        name.parent.mkdir()
    answers = []
    for file in (first, second):
        name.unlink(missing_ok=True)
        if how == "a link":
            name.symlink_to(file)
        else:
            shutil.copy2(file, name)
        source = name.parent if how == "in a folder" else name
        answers += load_math_dataset(str(source))["answer"]
    assert answers == ["2", "3"]


def test_a_folder_with_wildcards_is_refused_because_datasets_would_read_another(write, tmp_path):
    for folder in ("data[1]", "data1"):
        (tmp_path / folder).mkdir()
        write([{"problem": folder, "answer": "1"}], f"{folder}/x.jsonl")

    with pytest.raises(ValueError, match=r"must have no .* in its path, got '.*/data\[1\]'"):
        load_math_dataset(str(tmp_path / "data[1]"))
    # Control: a folder as such is read.
    assert load_math_dataset(str(tmp_path / "data1"))["prompt"] == [user("data1")]


@pytest.mark.parametrize(
    ("row", "problem", "answer"),
    [
        ({"question": "q", "answer": "so 6*7\n#### 1,042"}, "q", "1042"),
        ({"problem": "p", "solution": r"then \boxed{\frac{1}{2}}."}, "p", r"\frac{1}{2}"),
        # The column of the answer goes first: a solution may box more than the answer.
        ({"problem": "p", "solution": r"\boxed{1}", "answer": "2"}, "p", "2"),
        # AMC has its answers as floats, and "27.0" is not what a model writes.
        ({"problem": "p", "question": "p", "answer": 27.0}, "p", "27"),
        ({"prompt": "p", "target": "5"}, "p", "5"),
        ({"prompt": "p", "target": "worked", "reward_model": {"ground_truth": "5", "style": "rule"}}, "p", "5"),
    ],
    ids=["GSM8K", "Minerva", "MATH-500", "AMC", "prompt and target", "verl"],
)
def test_columns_and_answers_of_known_sets_are_found(write, row, problem, answer):
    assert load_math_dataset(write([row]))[0] == {"prompt": user(problem), "answer": answer}


def test_messages_of_the_data_are_kept_around_the_template(write):
    system = {"role": "system", "content": "Think."}
    row = {
        "prompt": [system, *user("1+1?")],
        "target": [{"role": "assistant", "content": r"Hm. \boxed{3}"}],
        "reward_model": {"ground_truth": "2", "style": "rule"},
    }
    path = write([row], "verl.parquet")

    def first(**settings):
        return load_math_dataset(path, **settings)[0]

    assert first() == {"prompt": [system, *user("1+1?")], "answer": "2"}
    assert first(answer_column="target")["answer"] == "3"

    question = "1+1?\nAnswer in \\boxed{}."
    assert first(prompt_template=BOXED)["prompt"] == [system, *user(question)]
    assert first(prompt_template=BOXED, conversational=False)["prompt"] == question

    replaced = {"role": "system", "content": "Be brief."}
    assert first(system_prompt="Be brief.")["prompt"] == [replaced, *user("1+1?")]


def test_no_file_is_left_that_a_later_version_would_read_in_place_of_the_data(write, tmp_path):
    """datasets knows such a file by the code of one function, and of those that this one calls by their names."""
    file = write([{"problem": "1+1", "answer": "2"}])
    rows = load_math_dataset(file)
    prompts = load_prompts(file)
    assert not list(tmp_path.rglob("cache-*.arrow"))

    # What is made of them stays in memory, too.
    rows.map(lambda row: {"answer": "3"})
    prompts.map(lambda row: {"prompt": "3"})
    assert not list(tmp_path.rglob("cache-*.arrow"))
    # Control: rows in a file.
    load_rows(file, "train").map(lambda row: {"answer": "3"})
    assert list(tmp_path.rglob("cache-*.arrow"))


def test_an_answer_after_the_question_is_no_part_of_the_prompt(write):
    example = [*user("1+1?"), {"role": "assistant", "content": "2"}]
    row = {"messages": [*example, *user("2+2?"), {"role": "assistant", "content": r"\boxed{4}"}], "answer": "4"}
    path = write([row])

    # The answer to an example stays: it stands before the question.
    expected = [*example, *user("2+2?")]
    assert load_math_dataset(path, problem_column="messages")[0]["prompt"] == expected
    assert load_prompts(path, problem_column="messages")[0]["prompt"] == expected


def test_what_messages_hold_beside_role_and_content_is_said_to_be_left_out(write, caplog):
    thoughts = [{"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}]
    plain = [{"role": "assistant", "content": "6", "reasoning_content": None}]
    rows = [{"prompt": "2+2", "completion": thoughts}, {"prompt": "3+3", "completion": plain}]
    with caplog.at_level(logging.WARNING, logger="qarl_trl.data"):
        load_prompts(write(rows), completion_column="completion")
    assert "1 of 2 rows have ['reasoning_content'] in the messages of 'completion'" in caplog.text


def test_messages_that_a_prompt_as_text_leaves_out_are_said(write, caplog):
    question = [{"role": "user", "content": "2+2"}]
    system = [{"role": "system", "content": "Use boxes."}]
    answered = [*question, {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}]
    path = write([{"prompt": system + question, "answer": "4"}, {"prompt": answered, "answer": "4"}])
    with caplog.at_level(logging.WARNING, logger="qarl_trl.data"):
        load_math_dataset(path)
    # Messages keep all, and an answer is left out of every prompt.
    assert not caplog.records

    with caplog.at_level(logging.WARNING, logger="qarl_trl.data"):
        load_math_dataset(path, conversational=False)
    assert "1 of 2 rows have a system message or earlier turns in 'prompt'" in caplog.text


def test_messages_that_are_json_in_a_text_are_refused(write):
    """The model would read the JSON."""
    path = write([{"prompt": json.dumps(user("1+1?")), "answer": "2"}])

    with pytest.raises(ValueError, match="must be text, or a list of messages, got messages that are JSON in a text"):
        load_math_dataset(path)

    # Controls: lists that are part of a problem.
    problems = ["[1, 2] reversed?", "[{'content': 3}, {'content': 4}]: what is the sum?", "[1, 2]"]
    others = write([{"prompt": problem, "answer": "1"} for problem in problems], "lists.jsonl")
    assert load_math_dataset(others)["prompt"] == [user(problem) for problem in problems]


def test_an_answer_of_a_class_is_its_name(tmp_path):
    """As MMLU has them; the number would be another answer."""
    classes = Features({"question": Value("string"), "answer": ClassLabel(names=["A", "B", "C"])})
    rows = [{"question": "Which is second?", "answer": 1}, {"question": "None?", "answer": None}]
    # Hidden, as in a test set.
    rows.append({"question": "Which?", "answer": -1})
    path = str(tmp_path / "set.parquet")
    Dataset.from_list(rows, features=classes).to_parquet(path)

    assert load_math_dataset(path)[:]["answer"] == ["B"]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"choices": ["1", "2"]}, "['choices']"),
        ({"choices": {"text": ["1"], "label": ["A"]}}, "['choices.text', 'choices.label']"),
        ({"Images": ["a.png"]}, "['Images']"),
        # Control: a column without which a question is whole.
        ({"subject": "algebra"}, None),
    ],
)
def test_columns_that_belong_to_a_question_are_said_to_be_left_out(write, caplog, columns, said):
    path = write([{"problem": "Which?", "answer": "2"} | columns])

    load_math_dataset(path)
    load_prompts(path)

    warnings = [text for text in caplog.messages if "are left out: the model sees 'problem' alone" in text]
    assert len(warnings) == (0 if said is None else 2)
    assert all(said in text for text in warnings)


def test_named_columns_win(write):
    path = write([{"problem": "a", "text": "b", "answer": "1", "meta": {"gold": "2"}}])

    # A dot goes into a column of objects.
    dataset = load_math_dataset(path, problem_column="text", answer_column="meta.gold")

    assert dataset[0] == {"prompt": user("b"), "answer": "2"}


def test_single_file_is_whatever_split_is_asked_for(write):
    # A file has no splits. A recipe that says "test" for a set of the Hub goes on working with a copy of it.
    path = write([{"problem": str(i), "answer": str(i)} for i in range(5)])

    assert load_math_dataset(path, "test[1:3]")["answer"] == ["1", "2"]
    assert load_math_dataset(path, max_samples=2)["answer"] == ["0", "1"]


@pytest.mark.parametrize("number", [0, -1])
def test_no_rows_at_all_are_refused(write, number):
    # -1 means all elsewhere.
    path = write([{"problem": "1+1?", "answer": "2"}])

    with pytest.raises(ValueError, match=f"max_samples must be at least 1, or None for all rows, got {number}"):
        load_math_dataset(path, max_samples=number)


@pytest.mark.parametrize(
    ("template", "is_said"),
    [
        (r"{problem}\n\nAnswer:", True),
        (r"{problem}\nthe answer", True),
        ("{problem}\n\nAnswer:", False),
        # Commands of LaTeX.
        (r"{problem} with $x \neq 0$", False),
        (r"$\nabla f$ of {problem}, $\nu \notin A$, $\ne 1$", False),
        (r"\noindent {problem}\newline $a \nsubseteq b \nrightarrow c \nearrow d \nless e$", False),
        (BOXED, False),
    ],
)
def test_a_line_break_that_yaml_did_not_read_is_said(write, caplog, template, is_said):
    path = write([{"problem": "1+1?", "answer": "2"}])

    with caplog.at_level(logging.WARNING, logger="qarl_trl.data"):
        load_math_dataset(path, prompt_template=template)

    assert ("a backslash and an n" in caplog.text) == is_said


@pytest.mark.parametrize(
    ("solution", "is_said"),
    [
        ("We add 2 and 3. Then $x = 5$, so the answer is $5$", True),
        ("First $2 + 3 = 5$.\nThen 10.", True),
        # Final answers: in a box, as words, a choice, a matrix, a number of several parts.
        (r"We add 2 and 3. So it is \boxed{5}.", False),
        ("So \\boxed{\\begin{pmatrix} 1 & 2 \\\\\n3 & 4 \\end{pmatrix}}", False),
        ("We add.\nIt is five.\n#### 5", False),
        ("not enough information", False),
        ("A. Paris", False),
        ("5 p.m. Monday", False),
        ("x = 1\ny = 2", False),
        ("\\begin{pmatrix} 1 & 2 \\\\\n3 & 4 \\end{pmatrix}", False),
        ("3.5, 4.", False),
    ],
)
def test_references_that_are_explanations_are_said(write, caplog, solution, is_said):
    """Where `solution` is the only column, a formula in the middle of it would be what completions are graded by."""
    path = write([{"problem": "What is it?", "solution": solution}])

    with caplog.at_level(logging.WARNING, logger="qarl_trl.data"):
        load_math_dataset(path)

    assert ("1 of 1 answers in 'solution' are sentences" in caplog.text) == is_said


def test_rows_without_problem_or_answer_are_left_out_and_counted(write, caplog):
    rows = []
    for problem, answer in [("a", ""), ("b", "1"), ("c", None), (None, "2"), ("", "3"), (" ", "4")]:
        rows.append({"problem": problem, "answer": answer})
    path = write(rows)

    with caplog.at_level(logging.WARNING, logger="qarl_trl.data"):
        assert load_math_dataset(path)["answer"] == ["1"]

    assert "5 of 6 rows" in caplog.text


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        ({"problem": "a", "answer": ""}, {}, "answer_column"),
        ({"task": "a", "gold": "1"}, {}, r"columns \['task', 'gold'\].*problem_column"),
        ({"task": "a", "gold": "1"}, {"problem_column": "task"}, "answer_column"),
        ({"problem": "a", "answer": "1"}, {"prompt_template": "{question}"}, "prompt_template"),
        ({"problem": "a", "answer": "1"}, {"system_prompt": "x", "conversational": False}, "system_prompt"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, {}, "A prompt must be text, or messages"),
        ({"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}, {}, "A prompt has no user message"),
        (
            {"prompt": [{"role": "user", "content": [{"text": "x"}]}], "answer": "1"},
            {},
            "content of a message must be",
        ),
    ],
)
def test_data_without_a_problem_or_an_answer_are_refused_by_the_settings_that_name_them(write, row, settings, words):
    with pytest.raises(ValueError, match=words):
        load_math_dataset(write([row]), **settings)


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("none.jsonl", None, FileNotFoundError, "none"),
        ("a.csv", b"problem,answer\n1,2\n", ValueError, r"\.csv"),
        ("a.jsonl", b"\xff\xfe\x00", ValueError, "a.jsonl.* cannot be read: JSON parse error"),
    ],
)
def test_files_that_are_missing_or_unreadable_are_named(tmp_path, name, content, error, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)

    with pytest.raises(error, match=words):
        load_math_dataset(str(tmp_path / name))


def test_dates_stay_as_they_are_written(write):
    """pyarrow reads a column of them as times."""
    path = write([{"problem": "1999-12-31", "answer": "2024-01-05"}])
    chat = write([{"problem": "When?", "completion": [{"role": "assistant", "content": "2024-01-05"}]}], "chat.jsonl")
    times = write([{"problem": "When?", "answer": "2024-01-05 10:30:00"}], "times.jsonl")

    assert load_math_dataset(path)[0] == {"prompt": user("1999-12-31"), "answer": "2024-01-05"}
    assert load_prompts(chat, completion_column="completion")[0]["completion"][0]["content"] == "2024-01-05"
    assert load_math_dataset(times)[0]["answer"] == "2024-01-05 10:30:00"


def test_times_that_are_written_anew_are_said(write, caplog):
    path = write([{"problem": "When?", "answer": "2024-01-05T10:30"}])

    assert load_math_dataset(path)[0]["answer"] == "2024-01-05 10:30:00"
    assert "All of answer are dates or times" in caplog.text

    # Control: beside another text the reader leaves them.
    caplog.clear()
    mixed = write([{"problem": "When?", "answer": answer} for answer in ("2024-01-05T10:30", "noon")], "mixed.jsonl")
    assert load_math_dataset(mixed)[0]["answer"] == "2024-01-05T10:30"
    assert "dates or times" not in caplog.text


def test_a_hub_id_is_no_path():
    # "a/b" may be either. What is not on this disk is looked up on the Hub.
    assert local_path("openai/gsm8k") is None


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        # The last one counts: a working may hold others.
        ("a #### b #### 7", "7"),
        (r"\boxed{1} \boxed{2}", "2"),
        (" 3 ", "3"),
        (2.5, "2.5"),
        (4, "4"),
        (None, ""),
        (math.nan, ""),
        ([], ""),
        # OlympiadBench: the parts of one answer.
        (["$2$", "$-3$"], "$2$, $-3$"),
        ([1, 2.0], "1, 2"),
        # Skywork-OR1: the same as JSON in a text. A matrix of texts is one answer.
        ('["1", "-2"]', "1, -2"),
        ('["$\\frac{1}{2}$"]', '["$\\frac{1}{2}$"]'),
        (r'["\\frac{1}{2}"]', r"\frac{1}{2}"),
        ("[1, 2]", "[1, 2]"),
        # Not 1e-05, which is 1 e - 5 for the grader.
        (1e-05, "0.00001"),
        (-2.5e-07, "-0.00000025"),
        ("so #### (1,2)", "(1,2)"),
        ("so #### 1,234,567", "1234567"),
        ("#### Step 1\n\\boxed{5}\n#### Remark\nThe 7 is odd.", "5"),
    ],
)
def test_final_answer(reference, answer):
    assert final_answer(reference) == answer


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("set.jsonl", "null", "line 1"),
        ("set.jsonl", '{"problem": "1", "answer": "2"}\n\n null\n', "line 3"),
        ("set.json", "null", "line 1"),
        ("set.json", '[{"problem": "1", "answer": "2"}, null]', "row 1"),
    ],
)
def test_a_row_that_is_null_is_refused(tmp_path, name, text, where):
    """pyarrow may end the whole process at one."""
    path = tmp_path / name
    path.write_text(text)

    with pytest.raises(ValueError, match=f"must have an object in {where}, got null"):
        load_math_dataset(str(path))

    # Control: a null inside of a row.
    rows = [{"problem": "1", "answer": "2", "note": None}]
    path.write_text(json.dumps(rows, indent=1) if name.endswith(".json") else json.dumps(rows[0]))
    assert load_math_dataset(str(path))["answer"][:] == ["2"]


@pytest.mark.parametrize("name", ["set.jsonl", "set.json", "set.parquet"])
@pytest.mark.parametrize(
    "content", [b"", b"\x1f\x8b\x08", b"\x00" * 50, b"PAR1"], ids=["empty", "cut", "zeros", "other"]
)
def test_a_file_of_another_content_is_named_in_one_line(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(ValueError, match=f"{path}.*cannot be read: .") as error:
        load_math_dataset(str(path))
    assert "\n" not in str(error.value)


# Prompts with completions --------------------------------------------------------------------------------------------


def test_prompts_and_completions_are_messages_or_text(write):
    rows = [{"problem": "1+1?", "solution": "It is 2.", "id": 1}]
    path = write(rows)

    prompts_alone = load_prompts(path, prompt_template="Say: {problem}")
    # As fine-tuning and distillation read them: the whole solution, of which a reward reads the final answer alone.
    as_messages = load_prompts(path, completion_column="solution")
    as_text = load_prompts(path, completion_column="solution", conversational=False)

    assert prompts_alone[:] == {"prompt": [user("Say: 1+1?")]}
    assert as_messages[:] == {
        "prompt": [user("1+1?")],
        "completion": [[{"role": "assistant", "content": "It is 2."}]],
    }
    assert as_text[:] == {"prompt": ["1+1?"], "completion": ["It is 2."]}


def test_a_completion_of_messages_stays_or_becomes_its_text(write):
    messages = [{"role": "assistant", "content": "2"}]
    path = write([{"prompt": user("1+1?"), "completion": messages}])

    assert load_prompts(path, completion_column="completion")["completion"] == [messages]
    assert load_prompts(path, completion_column="completion", conversational=False)["completion"] == ["2"]


def test_rows_without_a_completion_are_left_out_and_counted(write, caplog):
    path = write([{"problem": "1+1?", "solution": "2"}, {"problem": "2+2?", "solution": ""}])

    with caplog.at_level(logging.WARNING):
        dataset = load_prompts(path, completion_column="solution")

    assert len(dataset) == 1
    assert "1 of 2 rows" in caplog.text
    # Control: without completions both are read.
    assert len(load_prompts(path)) == 2
    with pytest.raises(ValueError, match="no answer. Set completion_column"):
        load_prompts(path, completion_column="answer")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompt_template": "no slot"}, "must have {problem}"),
        ({"problem_column": "task"}, "no task. Set problem_col"),
    ],
)
def test_prompts_are_refused_as_problems_are(write, settings, words):
    path = write([{"problem": "1+1?", "solution": "2"}])

    with pytest.raises(ValueError, match=words):
        load_prompts(path, **settings)


def test_dates_of_rows_that_are_trained_on_as_they_are_stay_text(write):
    """`qarl-trl sft` takes them so."""
    dated = {"messages": [{"content": "2024-01-05"}], "completion": "2024-01-05"}
    path = write([dated | {"created": "2024-01-05"}])

    (row,) = load_rows(str(path), "train")

    # Other columns stay as the reader has them: a resume compares them.
    assert row == dated | {"created": datetime(2024, 1, 5)}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_answers_of_a_column_with_few_bits_have_the_digits_of_the_column(tmp_path, dtype):
    """Python reads 199.9 in 32 bits as 199.89999389648438, and no answer of a model is that."""
    path = str(tmp_path / "set.parquet")
    numbers = pyarrow.array(np.array([199.9, 0.1, 27.0], dtype))
    lists = pyarrow.ListArray.from_arrays([0, 1, 2, 3], numbers)
    problems = pyarrow.array(["a", "b", "c"])
    table = pyarrow.table({"problem": problems, "answer": numbers, "solution": lists})
    pyarrow.parquet.write_table(table, path)

    for column in ("answer", "solution"):
        answers = load_math_dataset(path, answer_column=column)["answer"]
        assert answers == ["199.9", "0.1", "27"]
    # Control.
    assert math.isclose(199.9, load_rows(path, "train")[0]["answer"], rel_tol=1e-3)
    assert load_rows(path, "train")[0]["answer"] != 199.9


def test_texts_that_a_writer_stored_as_bytes_are_texts(tmp_path):
    path = str(tmp_path / "set.parquet")
    columns = {"problem": pyarrow.array([b"6 \xc2\xb7 7?"]), "answer": pyarrow.array([b"42"])}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)

    (row,) = load_math_dataset(path)
    assert (row["prompt"], row["answer"]) == (user("6 · 7?"), "42")

    columns["answer"] = pyarrow.array([b"\xff"])
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(ValueError, match="must hold text in UTF-8"):
        load_math_dataset(path)


def test_answers_that_a_column_of_floats_may_have_shortened_are_said(write, caplog):
    def said(answers):
        caplog.clear()
        path = write([{"problem": "p", "answer": answer} for answer in answers])
        load_math_dataset(str(path))
        return "1 of 2 answers in 'answer' are floats above" in caplog.text

    # The reader makes floats of all, and 12345678901234568 of the first.
    assert said([12345678901234567, 0.5])
    # Controls.
    assert not said([12345678901234567, 5])
    assert not said([1234567890123456, 0.5])
    assert not said(["12345678901234567", "0.5"])
