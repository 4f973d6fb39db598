"""`qarl_trl.rollout.cpu_support`: which CPUs the engine can run on. CPUs are made up from flags."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from configs import config
from conftest import make_model
from quant.schemes import low_bit_of

from qarl_trl import QaRLTrainer
from qarl_trl.export import quantization_config
from qarl_trl.quant import apply_quantization
from qarl_trl.rollout import cpu_support
from qarl_trl.rollout.cpu_support import check_engine_cpu, cpu_flags, why_no_engine
from qarl_trl.rollout.engine_gemm import EngineGemm, engine_gemm
from qarl_trl.tools.evaluate.checkpoint import precision
from qarl_trl.validate import check_arguments


ROOT = Path(__file__).resolve().parents[2]
# Intel's generations: before AVX2, AVX2, another AVX-512, the one that is needed, with bfloat16, with AMX.
SANDY_BRIDGE = frozenset({"fpu", "avx"})
HASWELL = SANDY_BRIDGE | {"avx2", "f16c", "fma"}
KNIGHTS_LANDING = HASWELL | {"avx512f", "avx512cd", "avx512er", "avx512pf"}
SKYLAKE = HASWELL | {"avx512f", "avx512bw", "avx512dq", "avx512cd", "avx512vl"}
COOPER_LAKE = SKYLAKE | {"avx512_vnni", "avx512_bf16"}
SAPPHIRE_RAPIDS = COOPER_LAKE | {"avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"}


def cpuinfo(flags):
    """What Linux says of a CPU with two cores and these flags."""
    core = f"model name\t: made up\nflags\t\t: {' '.join(sorted(flags))}\nbugs\t\t: spectre_v1\n\n"
    return f"processor\t: 0\n{core}processor\t: 1\n{core}"


@pytest.fixture
def a_cpu(monkeypatch):
    """Let this process run on a CPU with the flags given; all that a choice changes is put back afterwards."""
    # The tests' own CPU may be replaced in conftest.py, and a choice may have been made.
    monkeypatch.setattr(cpu_support, "why_no_engine", why_no_engine)
    # `choose_arithmetic` may have wrapped it for this CPU.
    monkeypatch.setattr(torch, "_scaled_mm", getattr(torch._scaled_mm, "__wrapped__", torch._scaled_mm))
    for name in ("VLLM_CPU_INT4_W4A8", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_ATTN_SPLIT_KV"):
        monkeypatch.delenv(name, raising=False)

    def become(flags, machine="x86_64"):
        monkeypatch.setattr(cpu_support, "cpu_flags", lambda *_: frozenset(flags))
        monkeypatch.setattr(cpu_support.platform, "machine", lambda: machine)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: "amx_tile" in flags)

    return become


def test_the_flags_are_those_of_the_first_core(tmp_path):
    x86 = tmp_path / "x86"
    x86.write_text(cpuinfo(SAPPHIRE_RAPIDS))
    arm = tmp_path / "arm"
    # ARM calls its flags features.
    arm.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    missing = tmp_path / "missing"

    assert cpu_flags(str(x86)) == SAPPHIRE_RAPIDS
    assert cpu_flags(str(arm)) == frozenset()
    assert cpu_flags(str(missing)) == frozenset()


# What the engine needs ------------------------------------------------------------------------------------------


CPUS = {
    "Haswell": (HASWELL, "x86_64"),
    "Knights Landing": (KNIGHTS_LANDING, "x86_64"),
    "Sandy Bridge": (SANDY_BRIDGE, "x86_64"),
    "ARM": (frozenset(), "aarch64"),
}


@pytest.mark.parametrize(
    ("name", "four_bits", "reason"),
    [
        ("Haswell", True, "AVX-512 for W4A16, got x86_64 without avx512f, avx512bw, avx512dq, avx512vl: use FP8"),
        ("Knights Landing", True, "got x86_64 without avx512bw, avx512dq, avx512vl:"),
        ("Sandy Bridge", False, "AVX2, got x86_64 without avx2, f16c, fma: use another"),
        ("Sandy Bridge", True, "AVX2, got x86_64 without avx2, f16c, fma: use another"),
        ("ARM", False, "AVX2, got aarch64 without"),
        ("ARM", True, "AVX2, got aarch64 without"),
    ],
)
def test_a_cpu_that_the_engine_cannot_run_on_says_why(a_cpu, name, four_bits, reason):
    a_cpu(*CPUS[name])

    with pytest.raises(ValueError, match=reason):
        check_engine_cpu("cpu", four_bits)
    check_engine_cpu("cuda", four_bits)


@pytest.mark.parametrize(
    ("flags", "four_bits"), [(SKYLAKE, False), (SKYLAKE, True), (HASWELL, False), (KNIGHTS_LANDING, False)]
)
def test_a_cpu_that_the_engine_runs_on_passes(a_cpu, flags, four_bits):
    a_cpu(flags)

    check_engine_cpu("cpu", four_bits)
    check_engine_cpu("cuda", four_bits)


def test_a_run_with_the_engine_is_refused_before_a_model_loads(a_cpu, tmp_path):
    a_cpu(HASWELL)
    with pytest.raises(ValueError, match=r"needs an x86-64 CPU with AVX-512.*got x86_64 without avx512f"):
        QaRLTrainer("no/such-model", reward_funcs=[], args=config(tmp_path, use_vllm=True, quant_scheme="W4A16"))

    # Controls: with 8 bits it is not, and without the engine it trains.
    check_arguments("org/model", config(tmp_path, use_vllm=True, quant_scheme="FP8_DYNAMIC"), {})
    check_arguments("org/model", config(tmp_path, quant_scheme="W4A16"), {})

    a_cpu(SAPPHIRE_RAPIDS)
    check_arguments("org/model", config(tmp_path, use_vllm=True, quant_scheme="W8A8"), {})


def test_without_avx512_kernels_and_checkpoints_of_w4a16_are_refused(a_cpu):
    pytest.importorskip("vllm")
    device = torch.device("cpu")
    scheme = low_bit_of("W4A16").scheme
    model = apply_quantization(make_model(), "W4A16")
    stored = SimpleNamespace(quantization_config=quantization_config(model))

    a_cpu(HASWELL)
    with pytest.raises(ValueError, match="AVX-512 for W4A16.*quant_kernel='auto'"):
        engine_gemm(scheme, device)
    with pytest.raises(ValueError, match="AVX-512 for W4A16.*quant_kernel='auto'"):
        precision(stored)

    # Control: with AVX-512.
    a_cpu(SKYLAKE)
    assert isinstance(engine_gemm(scheme, device), EngineGemm)
    assert "W4A16" in precision(stored)


def test_make_asks_before_it_installs_anything(tmp_path):
    (tmp_path / "old").write_text(cpuinfo(SANDY_BRIDGE))
    (tmp_path / "new").write_text(cpuinfo(HASWELL))

    # As `make` finds the CPU, but from a file, and with a folder for packages that must stay empty.
    def make(target, cpu_name):
        command = ["make", target, f"CPUINFO={tmp_path / cpu_name}", f"VENV={tmp_path / 'venv'}"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    refused = make("quickstart", "old")
    assert refused.returncode != 0
    assert "without avx2" in refused.stderr
    assert "`make test` runs what needs no engine" in refused.stderr
    assert not (tmp_path / "venv").exists()

    # This one has AVX2, but a real model is sampled in W4A16.
    assert "AVX-512 for W4A16" in make("real-model", "new").stderr

    # `make` asks this machine for its kind, which no file says.
    expected = 0 if cpu_support.platform.machine() == "x86_64" else 2
    assert make("engine", "new").returncode == expected
