"""What data sheets say of GPUs. Only the standard library, so that `--help` is instant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """
    A GPU, as its data sheet has it: dense products, without sparsity.

    Attributes:
        memory: GiB, as torch reports it.
        capability: CUDA compute capability.
        bandwidth: Bytes/s of its memory.
        bf16: Flop/s of products in bfloat16 with float32 sums.
        eight_bits: Flop/s of products of 8-bit numbers: float8, on Ampere int8.
        link: Bytes/s to another GPU of the machine, in one direction: NVLink, or PCIe.
        measured: Whether steps were measured on one, so that an estimate is surer.
    """

    memory: float
    capability: tuple[int, int]
    bandwidth: float
    bf16: float
    eight_bits: float
    link: float
    measured: bool = False


# NVIDIA's data sheets and white papers (GA102, Ada, A100, H100 and H200). A100 of 80 GB, H100 and H200 are SXM.
GPUS = {
    "4090": Gpu(23.5, (8, 9), 1008e9, 165.2e12, 330.3e12, 32e9),
    "a10": Gpu(22, (8, 6), 600e9, 125e12, 250e12, 32e9),
    "l4": Gpu(22, (8, 9), 300e9, 121e12, 242e12, 32e9),
    "a100": Gpu(79, (8, 0), 2039e9, 312e12, 624e12, 300e9),
    "h100": Gpu(79, (9, 0), 3350e9, 989e12, 1979e12, 450e9),
    "h200": Gpu(139, (9, 0), 4800e9, 989e12, 1979e12, 450e9, measured=True),
}
