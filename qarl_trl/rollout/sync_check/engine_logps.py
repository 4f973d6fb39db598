"""The engine's log-probs of the prompt.

This is for prompts alone. The log-probs of sampled tokens come with the completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


# What to ask vLLM for, as arguments of `SamplingParams` and as fields of a request to a server
# (`ServerClient.prompt_logps`): log-probs of the prompt's own tokens, without alternatives. vLLM samples at least one
# token, which nobody reads. For such a request it computes the whole prompt again, without the prefix cache.
# With a seed, because for a request without one a GPU's model runner (vLLM 0.31) draws from numpy's generator: checks
# come at other syncs in a resumed run, whose later answers would then be other ones.
REQUEST: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "seed": 0}


def engine_logps(llm: Any, token_ids: Sequence[int]) -> Tensor:
    """
    A colocated engine's log-probs of a prompt's tokens after the first, at temperature 1.

    Args:
        llm: A colocated `vllm.LLM`.
        token_ids: The prompt, `T` tokens.

    Returns:
        `(T - 1,)` float32, in nats.
    """
    from vllm import SamplingParams

    params = SamplingParams(**REQUEST, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": list(token_ids)}], params, use_tqdm=False)

    # Each step maps tokens to log-probs. The first token has no prediction.
    steps = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
    return torch.tensor([step[token].logprob for step, token in steps])
