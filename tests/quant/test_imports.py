"""What `qarl_trl.quant` needs: nothing above it, and no kernels of numba."""

import subprocess
import sys


ARROWS = """
import sys
import qarl_trl
above = ("trl", "vllm", "numba", "qarl_trl.config", "qarl_trl.trainer", "qarl_trl.rollout", "qarl_trl.tools")

def loaded():
    return sorted({name for name in sys.modules if name in above or name.startswith(tuple(f"{a}." for a in above))})

import torch
before = loaded()
import qarl_trl.quant, qarl_trl.quant.lora
from qarl_trl.quant import quantize_weight, resolve_scheme
quantize_weight(torch.randn(8, 128), resolve_scheme("W4A16"))
print(sorted(set(loaded()) - set(before)))
import qarl_trl.rollout.gemm
print(loaded())
"""


def test_the_package_loads_nothing_that_is_above_it_and_no_numba():
    result = subprocess.run([sys.executable, "-c", ARROWS], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    quant, rollout = result.stdout.splitlines()
    assert quant == "[]"
    assert "'qarl_trl.rollout.gemm'" in rollout and "'trl'" in rollout  # control
