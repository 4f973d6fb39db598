"""
A kernel for W4A16 on CPUs without AVX-512, where vLLM has none, so that arms.py and real_arms.py run there too.

    python benchmarks/portable_engine.py eval ...      `qarl-trl eval ...` with this kernel

It dequantizes the packed weights when they load and multiplies in float32: the engine's own arithmetic for these
weights, without its rounding of each product's inputs. Only the benchmarks use it.
"""

from __future__ import annotations

import os

from torch import Tensor, nn
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from qarl_trl.cli import main
from qarl_trl.rollout import cpu_support


KERNEL_TO_REPLACE = "CPUWNA16LinearKernel"


class Float32LinearKernel(MPLinearKernel):
    """4-bit weights in the form of compressed-tensors, symmetric, as a float32 matrix."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if c.weight_type != scalar_types.uint4b8:
            return False, f"weights must be symmetric and of 4 bits, got {c.weight_type}"
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        # `(out, in / 8)` and `(out, groups)`, as a checkpoint has them.
        packed = getattr(layer, self.w_q_name)
        scales = getattr(layer, self.w_s_name)

        # Stored from 0 to 15 for -8 to 7.
        values = unpack_quantized_values_into_int32(packed.data, self.config.weight_type, packed.packed_dim) - 8
        groups = values.to(scales.dtype).unflatten(-1, (scales.shape[-1], -1))
        # In bfloat16, as the learner dequantizes.
        products = groups * scales.data.unsqueeze(-1)
        layer.float32_matrix = products.flatten(-2).float()

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = nn.functional.linear(x.float(), layer.float32_matrix)
        if bias is not None:
            y = y + bias
        return y.to(x.dtype)


def install() -> None:
    """Let engines of this process run W4A16 without AVX-512."""
    os.environ["VLLM_DISABLED_KERNELS"] = KERNEL_TO_REPLACE
    register_linear_kernel(Float32LinearKernel, PlatformEnum.CPU, "mp")
    # What the library refuses such a CPU by.
    cpu_support.AVX512 = ()


if __name__ == "__main__":
    install()
    main()
