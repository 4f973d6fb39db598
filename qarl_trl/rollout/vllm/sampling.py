"""Seeds of requests, which all ranks of one engine must draw alike.

With tensor parallelism each rank samples for itself, and a different token in one of them is a different text from
there on. vLLM's model runner V2, which GPUs use, takes the seed of a request from numpy's global generator
(`v1/worker/gpu/sample/states.py: SamplingStates.add_request`). In a colocated engine that generator is the trainer's:
a reward function that draws a number in one process would shift it there.
"""

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
