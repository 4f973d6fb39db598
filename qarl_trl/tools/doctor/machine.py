"""Check versions and devices."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import torch

from ..._compat.versions import installed_version, requirements, why_untested
from ...quant.supported import SchemeSupport, gpu_generation
from ...rollout.cpu_support import cpu_flags, why_no_engine
from ..plan.run import GIB
from . import FAIL, OK, SKIPPED, WARN, CheckResult


# Seconds for the compilation of one line.
COMPILER_LIMIT_S = 60
# Where NVIDIA's packages install the CUDA toolkit.
TOOLKIT = Path("/usr/local/cuda")


def compare_versions() -> Iterator[CheckResult]:
    """Yield one result with the installed packages, and one for each whose version is outside the tested window."""
    needed = requirements()

    versions = [f"Python {platform.python_version()}"]
    for name in needed:
        version = installed_version(name)
        # Packages of extras may be missing.
        if version:
            versions.append(f"{name} {version}")
    yield CheckResult(OK, "versions", ", ".join(versions))

    for name, requirement in needed.items():
        reason = why_untested(requirement)
        if reason:
            yield CheckResult(FAIL, name, reason)


def describe_devices() -> Iterator[CheckResult]:
    """
    Yield one result per GPU and one for each compiler; without GPUs one of the CPU, and a warning if the
    engine does not run on it.
    """
    # Whatever GPU the recipe is for: what follows runs on the devices that are here.
    number_of_gpus = torch.cuda.device_count()
    for index in range(number_of_gpus):
        yield _check_gpu(index)
    if number_of_gpus:
        yield check_compiler()
        yield check_nvcc()
        return

    yield CheckResult(SKIPPED, "GPU", "no CUDA device: also a recipe for GPUs is checked as a run on this CPU")
    yield _describe_cpu()

    reason = why_no_engine(cpu_flags(), platform.machine())
    if reason is not None:
        yield _warn_of_engine(reason)


def check_cpu_engine(schemes: Iterable[SchemeSupport]) -> Iterator[CheckResult]:
    """
    Yield at most one warning: what this CPU lacks for the engine to run these schemes, or to run them exactly.

    Args:
        schemes: Those of the run, or all. [`describe_devices`] says whether the engine runs at all.
    """
    flags = cpu_flags()
    if torch.cuda.device_count() or why_no_engine(flags, platform.machine()) is not None:
        return

    schemes = list(schemes)
    # Of the packed schemes the CPU engine has those of 4 bits, with inputs in bfloat16.
    four_bits = any(scheme.cpu_engine and scheme.format == "pack-quantized" for scheme in schemes)
    reason = why_no_engine(flags, platform.machine(), four_bits=four_bits)
    if reason is not None:
        yield _warn_of_engine(reason)
        return

    # With VNNI oneDNN sums int8 products in 32 bits, without it in 16.
    symmetric_int8 = any(scheme.activations == "int8_token" for scheme in schemes)
    if symmetric_int8 and "avx512_vnni" not in flags:
        yield _warn_of_engine("without VNNI W8A8 sums saturate in oneDNN (docs/numerics.md); other schemes are exact")


def _warn_of_engine(reason: str) -> CheckResult:
    """Not a failure, because users check recipes for GPUs on laptops. The settings refuse a run that needs it."""
    return CheckResult(WARN, "engine on the CPU", reason)


def _check_gpu(index: int) -> CheckResult:
    """Name, generation and memory of a GPU. One without bfloat16 fails."""
    free, total = torch.cuda.mem_get_info(index)
    memory = f"{free / GIB:.0f} of {total / GIB:.0f} GiB free"
    device = torch.cuda.get_device_name(index)

    # The learner's autocast and vLLM's quantized kernels need bfloat16, which older GPUs have not.
    generation = gpu_generation(torch.cuda.get_device_capability(index))
    if generation is None:
        return CheckResult(FAIL, f"GPU {index}", f"{device}, older than Ampere: no bfloat16, {memory}")
    return CheckResult(OK, f"GPU {index}", f"{device}, {generation}, {memory}")


def check_compiler() -> CheckResult:
    """Whether Triton can compile: each of its kernels needs a module of Python, which it builds in C at run time."""
    name = "C compiler"
    # As Triton looks for one (`triton.runtime.build`).
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    advice = "vLLM and the learner need it for Triton's kernels: apt install gcc python3-dev, or set CC"
    if compiler is None:
        return CheckResult(FAIL, name, f"there is no gcc or clang. {advice}")

    headers = sysconfig.get_path("include", "posix_prefix")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "module.c")
        source.write_text("#include <Python.h>\n")
        command = [compiler, str(source), "-shared", "-fPIC", f"-I{headers}", "-o", str(source.with_suffix(".so"))]

        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILER_LIMIT_S)
        except subprocess.CalledProcessError as error:
            return CheckResult(FAIL, name, f"{compiler} cannot build a module of Python: {error.stderr} {advice}")
        except (OSError, subprocess.TimeoutExpired) as error:
            return CheckResult(FAIL, name, f"{compiler} does not run: {error}. {advice}")
    return CheckResult(OK, name, f"{compiler}, with Python.h")


def check_nvcc() -> CheckResult:
    """Whether FlashInfer can compile. Not a failure without it: most runs reach none of its kernels."""
    name = "nvcc"
    nvcc = _find_nvcc()
    if nvcc is not None:
        return CheckResult(OK, name, nvcc)
    return CheckResult(
        WARN,
        name,
        f"there is none by CUDA_HOME, on the PATH or in {TOOLKIT}, and FlashInfer compiles with it. Install the CUDA "
        "toolkit, or do without FlashInfer: VLLM_USE_FLASHINFER_SAMPLER=0 for `vllm serve`, and "
        "vllm_engine_kwargs: {attention_backend: TRITON_ATTN} where vLLM attends by it: on Ada and Blackwell with "
        "kv_cache_dtype: fp8, on Blackwell 10.x with any cache. Ampere needs the toolkit for an FP8 cache",
    )


def _find_nvcc() -> str | None:
    """The path of nvcc as FlashInfer looks for it (`flashinfer.jit.cpp_ext`): it does not know that of pip."""
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if not toolkit:
        on_path = shutil.which("nvcc")
        if on_path is not None:
            return on_path

    nvcc = Path(toolkit or TOOLKIT, "bin", "nvcc")
    return str(nvcc) if nvcc.is_file() else None


def _describe_cpu() -> CheckResult:
    """Architecture, cores and memory of this machine."""
    # The cores that this process may use: a container may have fewer than the machine.
    cores = len(os.sched_getaffinity(0))
    available = psutil.virtual_memory().available / GIB
    return CheckResult(OK, "CPU", f"{platform.machine()}, {cores} cores, {available:.0f} GiB available")
