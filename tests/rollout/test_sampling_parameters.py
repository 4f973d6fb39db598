"""What an engine is asked beside the user's arguments: ends of answers, no text that nobody reads."""

import pytest

from qarl_trl.rollout.sampling_parameters import sampling_parameters


def test_answers_end_at_the_tokens_of_trainer_and_user_and_at_no_others():
    parameters = sampling_parameters({"stop_token_ids": [7, 2]}, [2, None], is_colocated=True)

    assert parameters["stop_token_ids"] == [2, 7]
    assert parameters["ignore_eos"]


def test_without_a_list_of_the_trainer_those_of_the_models_files_end_an_answer():
    parameters = sampling_parameters({"stop_token_ids": [7]}, None, is_colocated=True)

    assert parameters["stop_token_ids"] == [7]
    assert "ignore_eos" not in parameters


def test_a_user_may_ignore_the_end_tokens_but_not_the_stop_tokens():
    parameters = sampling_parameters({"ignore_eos": True, "stop_token_ids": [7]}, [2], is_colocated=True)

    assert parameters["stop_token_ids"] == [7]


@pytest.mark.parametrize(("of_user", "needs_text"), [({}, False), ({"stop": ["\n"]}, True), ({"stop": []}, False)])
def test_only_stop_strings_need_text(of_user, needs_text):
    assert sampling_parameters(of_user, [2], is_colocated=False)["detokenize"] is needs_text
    # The user decides.
    asked = sampling_parameters({**of_user, "detokenize": True}, [2], is_colocated=False)
    assert asked["detokenize"]


@pytest.mark.parametrize("is_colocated", [True, False])
def test_only_an_engine_of_this_process_answers_with_lists(is_colocated):
    assert ("flat_logprobs" in sampling_parameters({}, [2], is_colocated)) is is_colocated
