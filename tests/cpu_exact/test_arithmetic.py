"""`qarl_trl.cpu_exact.arithmetic`: a CPU with AMX computes as one without. CPUs are made up."""

import os
import platform

import pytest
import torch
from quant.schemes import normal, same_bytes
from torch import nn

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.cpu_exact.arithmetic import choose_arithmetic
from qarl_trl.cpu_exact.ops import use_engine_ops
from qarl_trl.tools.evaluate.sample import start_engine


pytestmark = pytest.mark.usefixtures("several_threads")
CHOSEN_VARIABLES = ("VLLM_CPU_INT4_W4A8", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_ATTN_SPLIT_KV")


@pytest.fixture
def a_cpu(monkeypatch):
    """Let this process run on a CPU with or without AMX; all that a choice changes is put back afterwards."""
    # conftest.py has chosen already.
    stock = getattr(torch._scaled_mm, "__wrapped__", torch._scaled_mm)
    monkeypatch.setattr(torch, "_scaled_mm", stock)
    for name in CHOSEN_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def become(amx):
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)

    return become


# What the choice changes --------------------------------------------------------------------------------------------


def test_the_choice_holds_for_what_vllm_and_torch_ask(a_cpu):
    a_cpu(amx=True)
    stock = torch._scaled_mm
    # Control: the made-up CPU has it.
    assert torch.cpu._is_amx_tile_supported()

    choose_arithmetic()

    assert not torch.cpu._is_amx_tile_supported()
    assert torch._scaled_mm.__wrapped__ is stock
    for name in CHOSEN_VARIABLES:
        assert os.environ[name] == "0", name


def test_a_second_choice_changes_nothing_that_the_user_set(a_cpu, monkeypatch):
    a_cpu(amx=True)
    choose_arithmetic()
    chosen = torch._scaled_mm
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "1")

    choose_arithmetic()

    assert torch._scaled_mm is chosen
    assert os.environ["VLLM_CPU_ATTN_SPLIT_KV"] == "1"


# Who makes it -------------------------------------------------------------------------------------------------------


def by_the_trainer(tmp_path, monkeypatch):
    # Before it loads a model: that would compute something.
    args = QaRLConfig(str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(OSError, match="find them in the cached files"):
        QaRLTrainer("no/such-model", args=args)


def by_the_learners_operations(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="cannot run a Linear"):
        use_engine_ops(nn.Linear(2, 2))


def by_a_fresh_engine(tmp_path, monkeypatch):
    vllm = pytest.importorskip("vllm")
    answers = []

    def ask(*args, **kwargs):
        answers.append(torch.cpu._is_amx_tile_supported())

    monkeypatch.setattr(vllm, "LLM", ask)
    # Asked where vLLM would choose its kernels.
    start_engine(str(tmp_path))
    assert answers == [False]


@pytest.mark.parametrize(
    "start",
    [by_the_trainer, by_the_learners_operations, pytest.param(by_a_fresh_engine, marks=pytest.mark.slow)],
)
def test_the_choice_is_made(a_cpu, monkeypatch, tmp_path, start):
    a_cpu(amx=True)

    start(tmp_path, monkeypatch)

    assert not torch.cpu._is_amx_tile_supported()


# Float8 products ----------------------------------------------------------------------------------------------------


X8 = normal(8, 64, seed=8).to(torch.float8_e4m3fn)
W8 = normal(32, 64, seed=32).to(torch.float8_e4m3fn)


def float8_gemm(width=64):
    one = torch.ones(1)
    return torch._scaled_mm(X8, W8[:, :width].t(), scale_a=one, scale_b=one, out_dtype=torch.float32)


def test_a_float8_gemm_has_the_same_values_without_onednn(a_cpu, monkeypatch):
    a_cpu(amx=True)
    stock = torch._scaled_mm
    onednn_was_on = []

    def spy(*args, **kwargs):
        onednn_was_on.append(torch.backends.mkldnn.enabled)
        return stock(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", spy)
    expected = float8_gemm()

    choose_arithmetic()

    assert same_bytes(float8_gemm(), expected)
    # A product that fails must not leave oneDNN off: all other ones are oneDNN's.
    with pytest.raises(RuntimeError):
        float8_gemm(width=32)
    # The first is the control: stock torch takes oneDNN.
    assert onednn_was_on == [True, False, False]
    assert torch.backends.mkldnn.enabled


def test_a_compiler_traces_the_float8_gemm_whole(a_cpu):
    expected = float8_gemm()
    a_cpu(amx=True)

    choose_arithmetic()

    # `fullgraph`: a graph break is an error.
    compiled = torch.compile(float8_gemm, backend="eager", fullgraph=True)
    assert same_bytes(compiled(), expected)


# What vLLM chooses --------------------------------------------------------------------------------------------------


def choices_of_vllm():
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import _get_isa_hint
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import X86CPUUnquantizedExperts
    from vllm.model_executor.layers.utils import check_cpu_sgl_kernel
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return {
        "4-bit": _get_isa_hint(torch.bfloat16),
        "attention": _get_attn_isa(torch.bfloat16, 128, 64),
        "sgl, bfloat16": check_cpu_sgl_kernel(64, 64, torch.bfloat16),
        "sgl, int8": check_cpu_sgl_kernel(64, 64, torch.int8),
        "experts": X86CPUUnquantizedExperts._supports_current_device(),
    }


WITHOUT_AMX = {"4-bit": "vec", "attention": "vec", "sgl, bfloat16": False, "sgl, int8": False, "experts": False}
WITH_AMX = {"4-bit": "amx", "attention": "amx", "sgl, bfloat16": True, "sgl, int8": True, "experts": True}


@pytest.mark.slow
def test_with_amx_vllm_chooses_as_without(a_cpu):
    a_cpu(amx=False)
    assert choices_of_vllm() == WITHOUT_AMX
    a_cpu(amx=True)
    # Control: the choices depend on AMX.
    assert choices_of_vllm() == WITH_AMX

    choose_arithmetic()

    assert choices_of_vllm() == WITHOUT_AMX
