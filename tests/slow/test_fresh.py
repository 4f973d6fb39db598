"""What an engine answers after weight syncs is what a fresh engine of that checkpoint answers.

Here are the kernels that need a repair for it.
"""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from slow.isolated import isolated
from slow.toys import engine_logprobs, save_model


pytestmark = pytest.mark.slow
# Model, scheme, group size: what tests/slow/test_invariants.py, which has every scheme on a plain model, has not.
CASES: dict[str, tuple[str, str | None, int | None]] = {
    "W8A8 with biases": ("qwen2", "W8A8", None),
    "W4A8 per channel, with biases": ("qwen2", "W4A8", -1),
    "bf16, tied embeddings": ("qwen3 tied", None, None),
    "W4A16, tied embeddings": ("qwen3 tied", "W4A16", None),
    "bf16 experts": ("qwen3_moe", None, None),
    "bf16 experts, padded": ("qwen3_moe padded", None, None),
}
# The outcome of an engine that answers with the weights of the last sync.
RIGHT = {"a_b_a": True, "b_differs": True, "fresh": True, "finite": True}
# Without the repair of `reload_engine` these answer from old or freed weights, or are refused.
BROKEN_BY_VLLM = set(CASES) - {"W4A16, tied embeddings", "bf16 experts, padded"}
ENGINE = {
    "max_model_len": 64,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 4096,
    "enforce_eager": True,
    "logprobs_mode": "processed_logprobs",
    "dtype": "bfloat16",
    "num_gpu_blocks_override": 64,  # a small cache: all engines of this file live in one process
}


def _all_cases(folder: str, names: list[str], repaired: bool) -> dict[str, dict[str, bool] | str]:
    """What [`_case`] says of each, or the message of the engine's refusal."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # `reload_engine` writes to a model in this process
    from qarl_trl.rollout.vllm import reloading

    reload: Any = nullcontext()
    if not repaired:
        reload = patch.object(reloading, "refresh_cpu_kernels", nullcontext)

    outcomes: dict[str, dict[str, bool] | str] = {}
    torch.manual_seed(1)
    with reload:
        for name in names:
            try:
                outcomes[name] = _case(f"{folder}/{len(outcomes)}", *CASES[name])
            except RuntimeError as error:
                outcomes[name] = str(error)
    return outcomes


def _case(folder: str, kind: str, scheme: str | None, group_size: int | None) -> dict[str, bool]:
    """Sync A, B and A again. Compare the engine's answers with each other and with those of a fresh engine of A."""
    from safetensors.torch import save_file
    from vllm import LLM

    model = _save_source(folder, kind, scheme, group_size)
    checkpoint_a = _checkpoint(model)
    with torch.no_grad():
        for param in model.parameters():
            # Norms and embeddings too, which are not quantized.
            param.add_(0.02 * torch.randn_like(param))
    checkpoint_b = _checkpoint(model)

    llm = LLM(folder, load_format="dummy", **ENGINE)
    first = _answers_after_sync(llm, checkpoint_a)
    of_b = _answers_after_sync(llm, checkpoint_b)
    again = _answers_after_sync(llm, checkpoint_a)
    # The next engine needs its memory.
    del llm
    gc.collect()

    # In place of the high-precision weights; the configuration is that of the low-bit checkpoint already.
    save_file(checkpoint_a, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    fresh = engine_logprobs(LLM(folder, **ENGINE))
    gc.collect()

    _, logps = first
    return {
        "a_b_a": first == again,
        "b_differs": first != of_b,
        "fresh": first == fresh,
        # Neither NaN nor infinite, nor what freed memory makes of a log-prob.
        "finite": bool((torch.tensor(logps).abs() < 1e3).all()),
    }


def _save_source(folder: str, kind: str, scheme: str | None, group_size: int | None) -> Any:
    """A quantized model, with its configuration and tokenizer in `folder`, where the engine reads them."""
    from conftest import make_model

    from qarl_trl.export import quantization_config
    from qarl_trl.quant import apply_quantization

    changes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.05,
        "tie_word_embeddings": kind.endswith("tied"),
    }
    if kind.endswith("padded"):
        changes["moe_intermediate_size"] = 80  # the CPU kernel pads it
    save_model(Path(folder))  # for its tokenizer
    model = make_model(kind.split()[0], **changes)
    model.save_pretrained(folder)

    if scheme is not None:
        apply_quantization(model, scheme, group_size=group_size)
        model.config.quantization_config = quantization_config(model)
        model.config.save_pretrained(folder)
    return model


def _checkpoint(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a weight sync."""
    from qarl_trl.quant import iter_low_bit_weights

    return dict(iter_low_bit_weights(model))


def _answers_after_sync(llm: Any, checkpoint: dict[str, torch.Tensor]) -> tuple[list[list[int]], list[list[float]]]:
    from qarl_trl.rollout.vllm import reloading

    reloading.reload_engine(llm, checkpoint.items())
    reloading.reset_prefix_cache(llm)
    return engine_logprobs(llm)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return isolated(_all_cases, str(tmp_path_factory.mktemp("fresh")), list(CASES), True)


@pytest.mark.parametrize("case", CASES)
def test_after_a_sync_the_engine_answers_as_a_fresh_one(outcomes, case):
    assert outcomes[case] == RIGHT


@pytest.mark.avx512  # that for AVX2 packs no tied embedding
def test_without_the_repair_some_are_stale(tmp_path):
    """The control. When this fails vLLM has been repaired, and the case can leave `refresh_cpu_kernels`."""
    outcomes = isolated(_all_cases, str(tmp_path), sorted(BROKEN_BY_VLLM), False)

    assert outcomes.keys() == BROKEN_BY_VLLM
    for name, outcome in outcomes.items():
        assert outcome != RIGHT, name
