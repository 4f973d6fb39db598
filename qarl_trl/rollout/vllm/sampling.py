"""The seeds of requests, which the ranks of one engine must draw alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def same_draws(group: Any) -> Iterator[None]:
    """
    Make numpy's global generator draw the same numbers in all processes of a group; restore it afterwards.

    vLLM's model runner V2, which GPUs use, takes the seeds of requests from it (`SamplingStates.add_request`). Each
    rank of an engine samples for itself: if a reward function drew a number in one of them, their tokens would differ.

    Args:
        group: A torch process group, all of whose processes enter this context.
    """
    # Every process draws, although only the first one's number counts: so the next seed differs from this one.
    seed = [int(np.random.randint(2**32, dtype=np.uint64))]
    torch.distributed.broadcast_object_list(seed, group=group, group_src=0)

    state = np.random.get_state()
    np.random.seed(seed[0])
    try:
        yield
    finally:
        np.random.set_state(state)
