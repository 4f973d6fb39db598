"""`qarl_trl.rollout.sync_check.engine_logps` on an answer of vLLM. The real engine is in tests/slow."""

from types import SimpleNamespace

import pytest

from qarl_trl.rollout.sync_check.engine_logps import engine_logps


def test_the_engine_is_read_at_the_tokens_of_the_prompt():
    pytest.importorskip("vllm")
    # vLLM gives log-probs by token. The most probable one may be among them, and is not the one that is asked for.
    step = {5: SimpleNamespace(logprob=-1.5), 9: SimpleNamespace(logprob=-0.5)}
    # Nothing predicts the first token.
    output = SimpleNamespace(prompt_logprobs=[None, step, step])
    llm = SimpleNamespace(generate=lambda prompts, params, use_tqdm: [output])

    assert engine_logps(llm, [9, 5, 9]).tolist() == [-1.5, -0.5]
