"""`qarl_trl.cpu_exact.kernels`: what vLLM's kernel writes into an FP8 cache, and how it attends to it."""

import pytest
import torch
from quant.schemes import normal, same_bytes

from qarl_trl.cpu_exact import kernels
from qarl_trl.quant.kv_cache import FORMATS, round_to_cache


pytestmark = [pytest.mark.avx512, pytest.mark.usefixtures("several_threads")]


@pytest.fixture(autouse=True)
def fresh():
    # A process checks each format once.
    kernels.check_cache.cache_clear()
    yield
    kernels.check_cache.cache_clear()


@pytest.mark.parametrize("cache_dtype", FORMATS)
def test_the_engine_stores_what_the_learner_rounds_to(cache_dtype):
    """Every bfloat16 number; the kernel is the oracle."""
    kernels.check_cache(cache_dtype)


def test_an_engine_that_rounds_to_the_nearest_number_is_refused(monkeypatch):
    # As torch converts. The kernel for CPUs cuts off.
    def nearest(x, cache_dtype):
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)

    monkeypatch.setattr(kernels, "round_to_cache", nearest)

    with pytest.raises(ValueError, match="kv_cache_dtype='fp8': this vLLM rounds [0-9]+ of 65536 numbers") as error:
        kernels.check_cache("fp8")
    assert "\n" not in str(error.value)


def heads(tokens, number, size, seed):
    return normal(tokens, number, size, seed=seed, dtype=torch.bfloat16)


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e5m2"])
def test_attention_reads_rounded_keys_and_values(cache_dtype, size):
    """Against the formula in float64."""
    # Neither is a multiple of the cache's blocks.
    lengths = [40, 70]
    query = heads(110, 4, size, seed=1)
    key = heads(110, 2, size, seed=2)
    value = heads(110, 2, size, seed=3)

    def exact(key, value):
        outputs = []
        for tokens in (slice(0, 40), slice(40, 110)):
            outputs.append(causal_attention(query[tokens], key[tokens], value[tokens], size**-0.5))
        return torch.cat(outputs)

    output = kernels.attention(query, key, value, lengths, size**-0.5, cache_dtype).double()

    rounded = exact(round_to_cache(key, cache_dtype), round_to_cache(value, cache_dtype))
    error = (output - rounded).abs().max()
    assert error < 0.01
    # Control: with keys and values as they are it is another attention.
    assert (output - exact(key, value)).abs().max() > 5 * error
    # Keys and values that are rounded already are stored as they are.
    again = kernels.attention(
        query, round_to_cache(key, cache_dtype), round_to_cache(value, cache_dtype), lengths, size**-0.5, cache_dtype
    )
    assert same_bytes(again.double(), output)


def causal_attention(query, key, value, scale):
    """By whole matrices in float64, `(tokens, heads, head_dim)`."""
    per_head = query.shape[1] // key.shape[1]
    query = query.double().transpose(0, 1)
    key = key.double().repeat_interleave(per_head, dim=1).transpose(0, 1)
    value = value.double().repeat_interleave(per_head, dim=1).transpose(0, 1)
    scores = query @ key.transpose(1, 2) * scale
    visible = torch.ones(scores.shape[-2:]).tril().bool()
    return (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value).transpose(0, 1)
