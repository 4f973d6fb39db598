"""`qarl_trl.rollout.vllm.sampling`: ranks of an engine draw alike, in two real processes."""

import numpy as np
import pytest
import torch
from slow.isolated import isolated_group

from qarl_trl.rollout.vllm import sampling


def _draws():
    """
    What numpy's generator gives inside of two contexts, and its position after a third one that fails.

    Before them, a reward function has drawn from it in the second process.
    """
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    np.random.seed(0)
    np.random.random(rank)

    drawn = []
    for _ in range(2):
        with sampling.same_draws(torch.distributed.group.WORLD):
            drawn.append(np.random.randint(2**60, size=3).tolist())

    with pytest.raises(KeyError), sampling.same_draws(torch.distributed.group.WORLD):
        np.random.random(rank)
        raise KeyError

    position = np.random.get_state()[2]
    return drawn, position


@pytest.mark.slow
def test_ranks_of_an_engine_draw_the_same_seeds_and_keep_their_own_generator():
    """vLLM's model runner V2 takes the seeds of requests from it."""
    (first, first_position), (second, second_position) = isolated_group(_draws, 2)

    assert first == second
    # The next batch has other seeds.
    assert first[0] != first[1]
    # Control: the second process has drawn once more.
    assert second_position > first_position
