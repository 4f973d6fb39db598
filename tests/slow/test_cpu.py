"""No kernel of an engine that was started is one for AMX.

This holds for every scheme of the CPU engine, for layers that are not quantized, and for experts.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from slow.isolated import isolated
from slow.toys import save_model


pytestmark = pytest.mark.slow
ENGINE = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "num_gpu_blocks_override": 16,
}
# What is the same in all: attention, and the output layer, which is not quantized.
ALWAYS = {"isa": {"vec"}, "cpu_linear": {"onednn_mm"}}
EXPECTED = {
    "experts": ALWAYS | {"kernel": {"CPUUnquantizedExperts"}},
    "W4A16": ALWAYS | {"kernel": {"CPUWNA16LinearKernel"}, "isa_hint": {"vec"}, "use_w4a8": {False}},
    "W4A8": ALWAYS | {"kernel": {"Dynamic4bitLinearKernel"}},
    "W8A8": ALWAYS | {"kernel": {"CPUInt8ScaledMMLinearKernel"}, "linear_method": {"_apply_weights_onednn"}},
    "FP8_DYNAMIC": ALWAYS | {"kernel": {"ChannelWiseTorchFP8ScaledMMLinearKernel"}},
}
# Attributes of a layer of vLLM, and of what they hold: the objects that compute for it.
PARTS = ("quant_method", "scheme", "kernel", "fp8_linear", "moe_kernel", "fused_experts")


def choices(model: torch.nn.Module) -> dict[str, set[Any]]:
    """What vLLM chose for the layers of an engine: names of kernels and operations, and instruction sets."""
    chosen: dict[str, set[Any]] = {}

    def add(kind: str, *values: Any) -> None:
        chosen.setdefault(kind, set()).update(values)

    for module in model.modules():
        for part in [module, *_parts(module)]:
            for name in ("isa", "isa_hint", "use_w4a8"):
                if hasattr(part, name):
                    add(name, getattr(part, name))
            if hasattr(part, "linear_method"):
                add("linear_method", part.linear_method.__name__)

        for part in _parts(module):
            name = type(part).__name__
            if name.endswith(("LinearKernel", "Experts")):
                add("kernel", name)

        if hasattr(module, "cpu_linear"):
            # A lambda; the name of the operation that it calls in `ops` is all that tells which one it is.
            add("cpu_linear", *set(module.cpu_linear.__code__.co_names) - {"ops"})
    return chosen


def _parts(module: torch.nn.Module) -> list[Any]:
    """The objects of vLLM that compute for a module."""
    parts: list[Any] = []
    unseen: list[Any] = [module]
    while unseen:
        holder = unseen.pop()
        for name in PARTS:
            part = getattr(holder, name, None)
            if part is not None and part is not module and part not in parts:
                parts.append(part)
                unseen.append(part)
    return parts


def _start_all(folder: str) -> dict[str, dict[str, set[Any]]]:
    """What vLLM chooses on a CPU with AMX: without `choose_arithmetic` for a layer, with it for all engines."""
    from qarl_trl.cpu_exact.arithmetic import choose_arithmetic
    from qarl_trl.quant import quantize_weight, resolve_scheme
    from qarl_trl.rollout.vllm import linear_layer

    chosen = {}
    # vLLM asks nothing else about AMX, so the test is the same on every CPU. The first layer is only built: a CPU
    # without AMX could not run its kernel.
    pretend_amx = patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True)
    with pretend_amx, patch.object(linear_layer, "choose_arithmetic", lambda: None):
        weight = quantize_weight(torch.randn(64, 128), resolve_scheme("W4A16"))
        chosen["without a choice"] = choices(linear_layer.engine_layer(weight))

    with pretend_amx:
        choose_arithmetic()
        source = save_model(Path(folder) / "model")  # for its tokenizer
        for name in EXPECTED:
            chosen[name] = _choices_of_engine(source, name)
    return chosen


def _choices_of_engine(source: str, name: str) -> dict[str, set[Any]]:
    """What vLLM chooses for an engine of a scheme, or of unquantized experts."""
    from conftest import make_model
    from vllm import LLM

    from qarl_trl.export import quantization_config
    from qarl_trl.quant import apply_quantization
    from qarl_trl.rollout.vllm import reloading

    kind = "qwen3_moe" if name == "experts" else "qwen3"
    model = make_model(kind, initializer_range=0.05)
    model.save_pretrained(source)

    overrides = {}
    if name != "experts":
        apply_quantization(model, name)
        overrides["quantization_config"] = quantization_config(model)
    llm = LLM(source, load_format="dummy", hf_overrides=overrides, **ENGINE)
    chosen = choices(reloading.engine_model(llm))

    # All engines live in one process.
    del llm
    gc.collect()
    return chosen


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    return isolated(_start_all, str(tmp_path_factory.mktemp("cpu")))


@pytest.mark.avx512  # that for AVX2 leaves bfloat16 products to torch
@pytest.mark.parametrize("scheme", EXPECTED)
def test_with_amx_no_kernel_of_an_engine_is_one_for_it(chosen, scheme):
    # Equal, not a part: a kernel that vLLM adds is looked at here first.
    assert chosen[scheme] == EXPECTED[scheme]


def test_a_kernel_for_amx_would_be_found(chosen):
    """The control."""
    assert chosen["without a choice"]["isa_hint"] == {"amx"}
