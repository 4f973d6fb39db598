"""No kernel of an engine that was started is one for AMX: every scheme of the CPU engine, unquantized layers and experts."""

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


def choices(model: torch.nn.Module) -> dict[str, set[Any]]:
    """What vLLM chose for the layers of an engine: names of kernels and operations, and instruction sets."""
    found: dict[str, set[Any]] = {}
    for module in model.modules():
        for part in _parts(module):
            for name in ("isa", "isa_hint", "use_w4a8"):
                if hasattr(part, name):
                    found.setdefault(name, set()).add(getattr(part, name))
            if part is not module and type(part).__name__.endswith(("LinearKernel", "Experts")):
                found.setdefault("kernel", set()).add(type(part).__name__)
            if hasattr(part, "linear_method"):
                found.setdefault("linear_method", set()).add(part.linear_method.__name__)
        if hasattr(module, "cpu_linear"):
            found.setdefault("cpu_linear", set()).update(set(module.cpu_linear.__code__.co_names) - {"ops"})
    return found


def _parts(module: torch.nn.Module) -> list[Any]:
    """The module and the objects of vLLM that compute for it."""
    parts, names = [module], ("quant_method", "scheme", "kernel", "fp8_linear", "moe_kernel", "fused_experts")
    for part in parts:
        parts += [value for name in names if (value := getattr(part, name, None)) is not None and value not in parts]
    return parts


def _start_all(folder: str) -> dict[str, Any]:
    from conftest import make_model
    from vllm import LLM

    from qarl_trl.cpu_exact.arithmetic import choose_arithmetic
    from qarl_trl.export import quantization_config
    from qarl_trl.quant import apply_quantization, quantize_weight, resolve_scheme
    from qarl_trl.rollout import _vllm, _vllm_layer

    amx = patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True)
    with amx, patch.object(_vllm_layer, "choose_arithmetic", lambda: None):
        layer = _vllm_layer.engine_layer(quantize_weight(torch.randn(64, 128), resolve_scheme("W4A16")))
    found: dict[str, Any] = {"without a choice": choices(layer)}
    with amx:
        choose_arithmetic()
        source = save_model(Path(folder) / "model")
        for name in EXPECTED:
            model = make_model("qwen3_moe" if name == "experts" else "qwen3", initializer_range=0.05)
            model.save_pretrained(source)
            config = (
                {}
                if name == "experts"
                else {"quantization_config": quantization_config(apply_quantization(model, name))}
            )
            llm = LLM(source, load_format="dummy", hf_overrides=config, **ENGINE)
            found[name] = choices(_vllm.engine_model(llm))
            del llm
            gc.collect()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return isolated(_start_all, str(tmp_path_factory.mktemp("cpu")))


@pytest.mark.avx512  # that for AVX2 leaves bfloat16 products to torch
@pytest.mark.parametrize("scheme", EXPECTED)
def test_with_amx_no_kernel_of_an_engine_is_one_for_it(found, scheme):
    assert found[scheme] == EXPECTED[scheme]


def test_a_kernel_for_amx_would_be_found(found):
    """The control."""
    assert found["without a choice"]["isa_hint"] == {"amx"}
