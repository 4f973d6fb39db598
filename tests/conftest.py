"""Models and tokenizers small enough for every test to make its own, in memory and from a seed."""

import gc
import os
import platform
from collections import Counter


# Before torch: OpenMP threads that spin make two busy processes on two cores ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Importing the quickstart would set it to 1.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from slow import toys
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from qarl_trl.cpu_exact.arithmetic import choose_arithmetic
from qarl_trl.rollout import cpu_support


# One arithmetic for tests and engines, set before anything is computed.
choose_arithmetic()
# Why vLLM's CPU engine, or its 4-bit kernel, does not run here; `None` where it does.
NO_ENGINE = cpu_support.why_no_engine(cpu_support.cpu_flags(), platform.machine())
NO_FOUR_BITS = cpu_support.why_no_engine(cpu_support.cpu_flags(), platform.machine(), four_bits=True)
CHARACTERS = " 0123456789+-*=();#abcdefghijklmnopqrstuvwxyz\n"
KINDS = {
    # Biases in q, k, v; no head_dim of its own.
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    # Another module name in the checkpoint than in the model.
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM),
}
# Sizes are multiples of 128, the groups of W4A16.
TINY = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
TINY_MOE = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128},
}


def make_model(kind="qwen3", seed=0, dtype=torch.float32, **changes):
    """A causal language model with random weights; `changes` replace fields of its config."""
    config_class, model_class = KINDS[kind]
    settings = TINY | TINY_MOE.get(kind, {}) | changes
    if kind in ("qwen2", "olmoe"):
        settings.pop("head_dim")

    torch.manual_seed(seed)
    model = model_class(config_class(**settings))
    for name, param in model.named_parameters():
        # Parameters alone, as `from_pretrained` does: rotary buffers stay float32.
        param.data = param.data.to(dtype)
        if name.endswith("bias"):
            # They start at zero, which would hide a lost one.
            torch.nn.init.normal_(param, std=0.1)
    return model


# The text model of a model with an eye.
TEXT_BESIDE_EYE = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def make_vision_model(**changes):
    """A Qwen2.5-VL with a text model of one layer and an eye of one; `changes` replace fields of its config."""
    rotation = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e4}
    text = TEXT_BESIDE_EYE | {"rope_parameters": rotation}
    eye = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=eye, **changes))


def make_neox_model():
    """A GPT-NeoX of one layer. In its files the head has another name than in the model."""
    config = GPTNeoXConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    torch.manual_seed(0)
    return GPTNeoXForCausalLM(config)


def make_tokenizer(characters=CHARACTERS):
    """One token a character, after `<pad>` = 0 and `<eos>` = 1."""
    return toys.make_tokenizer(characters)


def save_chat_model(folder):
    """A toy with a chat template, saved in a folder, which is returned."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"

    make_model(max_position_embeddings=512).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def several_threads():
    """As engines have them: kernels divide their work by the number of threads, and so may their sums."""
    number = torch.get_num_threads()
    torch.set_num_threads(max(2, number))
    yield
    torch.set_num_threads(number)


@pytest.fixture(scope="session")
def tiny_model():
    """Factory, see `make_model`."""
    return make_model


@pytest.fixture(scope="session")
def tiny_tokenizer():
    return make_tokenizer()


# Folders of small models, for trainers: tests only read them.


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory):
    """A Qwen3 of one block."""
    return toys.save_model(tmp_path_factory.mktemp("dense"), layers=1)


@pytest.fixture(scope="session")
def mixture_model(tmp_path_factory):
    """A Qwen3-MoE of one block with four experts."""
    return toys.save_model(tmp_path_factory.mktemp("mixture"), layers=1, experts=4)


@pytest.fixture(scope="session")
def gptq_model(dense_model, tmp_path_factory):
    """`dense_model` in W4A16, by llm-compressor's GPTQ."""
    pytest.importorskip("llmcompressor")
    return toys.save_gptq(dense_model, tmp_path_factory.mktemp("gptq"))


def starts_engine(item):
    return item.get_closest_marker("engine") or item.path.parent.name == "slow"


@pytest.fixture(autouse=NO_FOUR_BITS is not None)
def cpu_of_settings(request, monkeypatch):
    """Where an engine does not run, settings and refusals are tested as on a CPU where it does."""
    if not starts_engine(request.node):
        monkeypatch.setattr(cpu_support, "why_no_engine", lambda *_, **__: None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A test that met this CPU's lack of a 4-bit kernel, as our refusal or as vLLM's missing operation, is skipped."""
    report = yield
    if not (NO_FOUR_BITS and report.failed):
        return report

    if NO_FOUR_BITS in report.longreprtext or "'cpu_gemm_wna16'" in report.longreprtext:
        _, line, _ = item.location
        report.outcome = "skipped"
        report.longrepr = (str(item.path), line, f"Skipped: {NO_FOUR_BITS}")
    return report


def pytest_configure(config):
    # Toys gain nothing from a second thread. Beside another process of tests it has to wait for a core, and the first
    # one for it: thousands of times in a short training. In a hook, because processes of tests import this file, too.
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)


def pytest_collection_finish():
    # What is imported stays until the end, 700,000 objects. Every trainer ends with a `gc.collect()`, which would look
    # at them all, for 0.4 s of processor.
    gc.freeze()


def pytest_unconfigure():
    # Otherwise Triton's bindings report at the end of the process that they were never freed.
    gc.unfreeze()


def pytest_collection_modifyitems(items):
    """What this machine has no device or CPU for: skipped, and counted as such."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if NO_FOUR_BITS and item.get_closest_marker("avx512"):
            item.add_marker(pytest.mark.skip(reason=NO_FOUR_BITS))
        elif NO_ENGINE and starts_engine(item):
            item.add_marker(pytest.mark.skip(reason=NO_ENGINE))

    # Files with slow tests first, then those with many. With two processes, each taking a whole file at a time, a long
    # file at the end would leave one of them idle; xdist's own order is by the number of tests alone.
    tests_of = Counter(item.path for item in items)
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow_files, -tests_of[item.path], item.path))
