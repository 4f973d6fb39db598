"""Prompts whose image tokens the processor has repeated. A colocated run with images needs torchvision: by hand."""

import pytest

from qarl_trl.rollout.images import check_engine_prompts, with_single_tokens


IMAGE = 9


def test_vllm_gets_one_token_for_each_image():
    # One image of three features, two images, and text.
    prompts = [[1, IMAGE, IMAGE, IMAGE, 2], [IMAGE, IMAGE, 3, IMAGE], [4, 4, 4]]

    assert with_single_tokens(prompts, IMAGE) == [[1, IMAGE, 2], [IMAGE, 3, IMAGE], [4, 4, 4]]
    # Other tokens may repeat, and a processor without an image token changes nothing.
    assert with_single_tokens(prompts, None) == prompts


def test_a_prompt_that_vllm_makes_otherwise_is_refused():
    prompts = [[1, IMAGE, IMAGE, 2], [3]]

    # vLLM may answer with tuples.
    check_engine_prompts(prompts, [(1, IMAGE, IMAGE, 2), [3]])

    # As without `with_single_tokens`: it repeats the first one again.
    with pytest.raises(RuntimeError, match="Prompt 0 has 4 tokens for the learner and 5 for vLLM"):
        check_engine_prompts(prompts, [[1, IMAGE, IMAGE, IMAGE, 2], [3]])
    # As many tokens, but others.
    with pytest.raises(RuntimeError, match="Prompt 1 has 1 tokens for the learner and 1 for vLLM, or others"):
        check_engine_prompts(prompts, [[1, IMAGE, IMAGE, 2], [4]])
