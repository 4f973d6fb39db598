"""`qarl_trl.rollout.cpu`: which CPU the engine runs on, and what of it is left unused. CPUs are made up from their flags."""

import os
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from configs import config
from conftest import make_model
from quant.schemes import low_bit_of, normal, same_bytes
from torch import nn

from qarl_trl import QaRLTrainer
from qarl_trl.cpu_exact.arithmetic import choose_arithmetic
from qarl_trl.cpu_exact.ops import use_engine_ops
from qarl_trl.export import quantization_config
from qarl_trl.quant import apply_quantization
from qarl_trl.rollout import cpu
from qarl_trl.rollout.cpu import check_engine_cpu, cpu_flags, why_no_engine
from qarl_trl.rollout.engine_gemm import EngineGemm, engine_gemm
from qarl_trl.tools.evaluate.checkpoint import precision
from qarl_trl.tools.evaluate.sample import start_engine
from qarl_trl.validate import check_arguments


ROOT = Path(__file__).resolve().parents[2]
SANDY_BRIDGE = frozenset({"fpu", "avx"})
HASWELL = SANDY_BRIDGE | {"avx2", "f16c", "fma"}
KNIGHTS_LANDING = HASWELL | {"avx512f", "avx512cd", "avx512er", "avx512pf"}
SKYLAKE = HASWELL | {"avx512f", "avx512bw", "avx512dq", "avx512cd", "avx512vl"}
COOPER_LAKE = SKYLAKE | {"avx512_vnni", "avx512_bf16"}
SAPPHIRE_RAPIDS = COOPER_LAKE | {"avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"}


def cpuinfo(flags):
    core = f"processor\t: 0\nmodel name\t: made up\nflags\t\t: {' '.join(sorted(flags))}\nbugs\t\t: spectre_v1\n\n"
    return core + core.replace("processor\t: 0", "processor\t: 1")


@pytest.fixture
def a_cpu(monkeypatch):
    """Let this process run on a CPU with the flags given; all that a choice changes is put back afterwards."""
    monkeypatch.setattr(cpu, "why_no_engine", why_no_engine)
    monkeypatch.setattr(torch, "_scaled_mm", getattr(torch._scaled_mm, "__wrapped__", torch._scaled_mm))
    for name in ("VLLM_CPU_INT4_W4A8", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_ATTN_SPLIT_KV"):
        monkeypatch.delenv(name, raising=False)

    def become(flags, machine="x86_64"):
        monkeypatch.setattr(cpu, "cpu_flags", lambda *_: frozenset(flags))
        monkeypatch.setattr(cpu.platform, "machine", lambda: machine)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: "amx_tile" in flags)

    return become


def test_the_flags_are_those_of_the_first_core(tmp_path):
    (tmp_path / "x86").write_text(cpuinfo(SAPPHIRE_RAPIDS))
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert cpu_flags(str(tmp_path / "x86")) == SAPPHIRE_RAPIDS
    assert cpu_flags(str(tmp_path / "arm")) == cpu_flags(str(tmp_path / "none")) == frozenset()


def test_the_choice_holds_for_what_vllm_and_torch_ask(a_cpu):
    a_cpu(SAPPHIRE_RAPIDS)
    stock = torch._scaled_mm
    assert torch.cpu._is_amx_tile_supported()  # control
    choose_arithmetic()
    assert not torch.cpu._is_amx_tile_supported()
    assert os.environ["VLLM_CPU_INT4_W4A8"] == os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_CPU_ATTN_SPLIT_KV"] == "0"
    assert torch._scaled_mm.__wrapped__ is stock
    os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "1"  # by the user
    chosen = torch._scaled_mm
    choose_arithmetic()
    assert torch._scaled_mm is chosen and os.environ["VLLM_CPU_ATTN_SPLIT_KV"] == "1"


def by_the_trainer(tmp_path, monkeypatch):
    with pytest.raises(TypeError, match="needs a QaRLConfig"):
        QaRLTrainer("no/such-model", args=SimpleNamespace(device=torch.device("cpu")))


def by_the_learners_operations(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="cannot run a Linear"):
        use_engine_ops(nn.Linear(2, 2))


def by_a_fresh_engine(tmp_path, monkeypatch):
    vllm, asked = pytest.importorskip("vllm"), []
    monkeypatch.setattr(vllm, "LLM", lambda *_, **__: asked.append(torch.cpu._is_amx_tile_supported()))
    start_engine(str(tmp_path))
    assert asked == [False]


@pytest.mark.parametrize(
    "start",
    [by_the_trainer, by_the_learners_operations, pytest.param(by_a_fresh_engine, marks=pytest.mark.slow)],
)
def test_the_choice_is_made(a_cpu, monkeypatch, tmp_path, start):
    a_cpu(SAPPHIRE_RAPIDS)
    start(tmp_path, monkeypatch)
    assert not torch.cpu._is_amx_tile_supported()


X8, W8 = (normal(rows, 64, seed=rows).to(torch.float8_e4m3fn) for rows in (8, 32))


def float8_gemm(width=64):
    x, w, one = X8, W8[:, :width], torch.ones(1)
    return torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)


def test_a_float8_gemm_has_the_same_values_without_onednn(a_cpu, monkeypatch):
    stock, seen = torch._scaled_mm, []

    def spy(*args, **kwargs):
        seen.append(torch.backends.mkldnn.enabled)
        return stock(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", spy)
    expected = float8_gemm()
    a_cpu(SAPPHIRE_RAPIDS)
    choose_arithmetic()
    assert same_bytes(float8_gemm(), expected)
    with pytest.raises(RuntimeError):
        float8_gemm(width=32)
    assert seen == [True, False, False]  # the first is the control
    assert torch.backends.mkldnn.enabled


def test_a_compiler_traces_the_float8_gemm_whole(a_cpu):
    expected = float8_gemm()
    a_cpu(SAPPHIRE_RAPIDS)
    choose_arithmetic()
    assert same_bytes(torch.compile(float8_gemm, backend="eager", fullgraph=True)(), expected)


# What the engine needs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "machine", "eight_bits", "four_bits"),
    [
        (SKYLAKE, "x86_64", None, None),
        (
            HASWELL,
            "x86_64",
            None,
            "AVX-512 for W4A16, got x86_64 without avx512f, avx512bw, avx512dq, avx512vl: use FP8",
        ),
        (KNIGHTS_LANDING, "x86_64", None, "got x86_64 without avx512bw, avx512dq, avx512vl:"),
        (SANDY_BRIDGE, "x86_64", *2 * ("AVX2, got x86_64 without avx2, f16c, fma: use another",)),
        (frozenset(), "aarch64", *2 * ("AVX2, got aarch64 without",)),
    ],
)
def test_a_cpu_that_the_engine_cannot_run_on_says_why(a_cpu, flags, machine, eight_bits, four_bits):
    a_cpu(flags, machine)
    for asked, got in ((False, eight_bits), (True, four_bits)):
        with pytest.raises(ValueError, match=got) if got else nullcontext():
            check_engine_cpu("cpu", asked)
        check_engine_cpu("cuda", asked)


def test_a_run_with_the_engine_is_refused_before_a_model_loads(a_cpu, tmp_path):
    a_cpu(HASWELL)
    with pytest.raises(ValueError, match=r"needs an x86-64 CPU with AVX-512.*got x86_64 without avx512f"):
        QaRLTrainer("no/such-model", reward_funcs=[], args=config(tmp_path, use_vllm=True, quant_scheme="W4A16"))
    check_arguments("org/model", config(tmp_path, use_vllm=True, quant_scheme="FP8_DYNAMIC"), {})  # control: 8 bits
    check_arguments("org/model", config(tmp_path, quant_scheme="W4A16"), {})  # control: without the engine it trains
    a_cpu(SAPPHIRE_RAPIDS)
    check_arguments("org/model", config(tmp_path, use_vllm=True, quant_scheme="W8A8"), {})


def test_without_avx512_kernels_and_checkpoints_of_w4a16_are_refused(a_cpu):
    pytest.importorskip("vllm")
    scheme, device = low_bit_of("W4A16").scheme, torch.device("cpu")
    stored = SimpleNamespace(quantization_config=quantization_config(apply_quantization(make_model(), "W4A16")))
    a_cpu(HASWELL)
    for ask in (lambda: engine_gemm(scheme, device), lambda: precision(stored)):
        with pytest.raises(ValueError, match="AVX-512 for W4A16.*quant_kernel='auto'"):
            ask()
    a_cpu(SKYLAKE)  # control
    assert isinstance(engine_gemm(scheme, device), EngineGemm) and "W4A16" in precision(stored)


def test_make_asks_before_it_installs_anything(tmp_path):
    (tmp_path / "old").write_text(cpuinfo(SANDY_BRIDGE))
    (tmp_path / "new").write_text(cpuinfo(HASWELL))

    def make(target, cpu):
        command = ["make", target, f"CPUINFO={tmp_path / cpu}", f"VENV={tmp_path / 'venv'}"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    refused = make("quickstart", "old")
    assert refused.returncode != 0 and not (tmp_path / "venv").exists()
    assert "without avx2" in refused.stderr and "`make test` runs what needs no engine" in refused.stderr
    assert "AVX-512 for W4A16" in make("real-model", "new").stderr
    assert make("engine", "new").returncode == (0 if cpu.platform.machine() == "x86_64" else 2)


# What vLLM chooses --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_with_amx_vllm_chooses_as_without(a_cpu):
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import _get_isa_hint
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import X86CPUUnquantizedExperts
    from vllm.model_executor.layers.utils import check_cpu_sgl_kernel
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    def choices():
        return {
            "4-bit": _get_isa_hint(torch.bfloat16),
            "attention": _get_attn_isa(torch.bfloat16, 128, 64),
            "sgl": [check_cpu_sgl_kernel(64, 64, dtype) for dtype in (torch.bfloat16, torch.int8)],
            "experts": X86CPUUnquantizedExperts._supports_current_device(),
        }

    a_cpu(SKYLAKE)
    without = choices()
    assert without == {"4-bit": "vec", "attention": "vec", "sgl": [False, False], "experts": False}
    a_cpu(SAPPHIRE_RAPIDS)
    assert choices() == {"4-bit": "amx", "attention": "amx", "sgl": [True, True], "experts": True}  # control
    choose_arithmetic()
    assert choices() == without
