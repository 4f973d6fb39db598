"""`qarl_trl.rollout.vllm.flat_logprobs`: what TRL reads from vLLM's objects, read from its flat lists."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
from trl.generation import vllm_generation
from vllm.logprobs import FlatLogprobs, append_logprobs_for_next_position, create_sample_logprobs

from qarl_trl._compat.rollout_batch import extracted_by
from qarl_trl.rollout.vllm import flat_logprobs
from qarl_trl.rollout.vllm.flat_logprobs import extract_logprobs


# Of each token: ids and log-probs of the sampled token and the most probable ones, and the sampled one's rank.
SAMPLED = [([7], [-0.5], 1), ([3], [math.nan], 4), ([7], [-2.25], 9), ([0], [-math.inf], 12)]
# The sampled token first: outside of the two most probable ones, the first of them, and the second.
WITH_CANDIDATES = [
    ([7, 1, 2], [-5.0, -0.5, -1.0], 4),
    ([1, 1, 2], [-0.5, -0.5, -1.0], 1),
    ([2, 1, 2], [-1.0, -0.5, -1.0], 2),
]


def outputs(completions, flat):
    """vLLM's outputs with these log-probs, built by vLLM's functions; two completions to a request."""
    built = []
    for steps in completions:
        logprobs = None
        if steps is not None:
            logprobs = create_sample_logprobs(flat)
            for token_ids, values, rank in steps:
                candidates = len(token_ids) - 1
                # vLLM decodes tokens for its objects. Nobody reads that, so there is nothing to decode.
                append_logprobs_for_next_position(
                    logprobs, token_ids, values, itertools.repeat(None), rank, candidates
                )
        built.append(SimpleNamespace(logprobs=logprobs))

    return [SimpleNamespace(outputs=built[first : first + 2]) for first in range(0, len(built), 2)]


@pytest.mark.parametrize(
    "completions",
    [
        [SAMPLED, SAMPLED[:1], SAMPLED[2:]],
        [WITH_CANDIDATES, WITH_CANDIDATES[1:]],
        [SAMPLED, WITH_CANDIDATES],
        [SAMPLED, []],
        [SAMPLED, None],
        [],
    ],
    ids=["sampled token", "candidates", "both", "empty", "none", "no completion"],
)
def test_flat_lists_give_what_trl_reads_from_objects(completions):
    expected = vllm_generation.extract_logprobs(outputs(completions, flat=False))

    given = extract_logprobs(outputs(completions, flat=True))

    assert given == expected
    # Control: these are the flat lists. An older vLLM would have given objects to both.
    if completions and completions[-1]:
        assert isinstance(outputs(completions, flat=True)[0].outputs[0].logprobs, FlatLogprobs)


def test_a_nan_is_none_and_the_comparison_would_notice_a_wrong_token():
    """Control of the test above, in which a NaN is equal to nothing."""
    logprobs, token_ids = extract_logprobs(outputs([SAMPLED], flat=True))

    assert logprobs == [[[-0.5], [None], [-2.25], [-math.inf]]]
    assert token_ids == [[[7], [3], [7], [0]]]
    # The same log-probs for another token.
    other = [([8], [-0.5], 1), *SAMPLED[1:]]
    assert extract_logprobs(outputs([other], flat=True)) != (logprobs, token_ids)


def test_one_log_prob_a_token_is_not_sorted(monkeypatch):
    def refuse(requests):
        raise AssertionError

    monkeypatch.setattr(flat_logprobs, "extract_from_objects", refuse)
    assert extract_logprobs(outputs([SAMPLED], flat=True))[1] == [[[7], [3], [7], [0]]]
    # Control: several are.
    with pytest.raises(AssertionError):
        extract_logprobs(outputs([WITH_CANDIDATES], flat=True))


def test_trl_reads_log_probs_by_our_function():
    # TRL calls it by this name from this module. If not, replacing it would do nothing, and say nothing.
    assert "extract_logprobs" in vllm_generation.VLLMGeneration.generate.__code__.co_names
    with extracted_by(extract_logprobs):
        assert vllm_generation.extract_logprobs is extract_logprobs
    assert vllm_generation.extract_logprobs is not extract_logprobs
