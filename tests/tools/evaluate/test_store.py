"""Completions on disk: a second call finds them, and never those of other settings."""

import json

import pytest

from qarl_trl.tools.evaluate.store import Completion, CompletionStore
from qarl_trl.tools.evaluate.suites import Problem


SETTINGS = {"model_sha256": "a1", "k": 2, "temperature": 0.6, "engine_kwargs": {"max_num_seqs": 8}}
FIRST, SECOND = Problem((1, 2), "1+1=", "2"), Problem((1, 3), "1+2=", "3")
ANSWERS = [Completion("it is \u2028 2\n", 7, False), Completion("\udce2", 9, True)]


def test_a_second_call_finds_what_the_first_one_stored(tmp_path):
    CompletionStore(tmp_path / "out", SETTINGS).add(FIRST, ANSWERS)
    again = CompletionStore(tmp_path / "out", json.loads(json.dumps(SETTINGS)))
    assert again == {FIRST.prompt_ids: ANSWERS}
    again.add(SECOND, ANSWERS[::-1])
    assert CompletionStore(tmp_path / "out", SETTINGS) == {FIRST.prompt_ids: ANSWERS, SECOND.prompt_ids: ANSWERS[::-1]}


def test_a_line_that_was_not_finished_is_sampled_again(tmp_path):
    """At every byte at which the call before may have been killed."""
    store = CompletionStore(tmp_path, SETTINGS)
    file = tmp_path / "completions.jsonl"
    store.add(FIRST, ANSWERS)
    whole = len(file.read_bytes())
    store.add(SECOND, ANSWERS)
    content = file.read_bytes()
    for end in range(whole, len(content)):
        file.write_bytes(content[:end])
        store = CompletionStore(tmp_path, SETTINGS)
        assert set(store) == {FIRST.prompt_ids}
    store.add(SECOND, ANSWERS)
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"temperature": 1.0}, "other temperature .temperature: 0.6 there, 1.0 now"),
        ({"model_sha256": "b2"}, "other model_sha256"),
        ({"engine_kwargs": {}}, "other engine_kwargs"),
        ({"vllm": "0.32"}, "other vllm"),
    ],
)
def test_other_settings_are_refused(tmp_path, change, named):
    CompletionStore(tmp_path, SETTINGS).add(FIRST, ANSWERS)
    with pytest.raises(ValueError, match=named):
        CompletionStore(tmp_path, SETTINGS | change)
    assert FIRST.prompt_ids in CompletionStore(tmp_path, SETTINGS)  # control: the same settings are taken


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="not of an earlier evaluation"):
        CompletionStore(tmp_path, SETTINGS)
    assert not (tmp_path / "settings.json").exists()
