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
    "4090": Gpu(memory=23.5, capability=(8, 9), bandwidth=1008e9, bf16=165.2e12, eight_bits=330.3e12, link=32e9),
    "a10": Gpu(memory=22, capability=(8, 6), bandwidth=600e9, bf16=125e12, eight_bits=250e12, link=32e9),
    "l4": Gpu(memory=22, capability=(8, 9), bandwidth=300e9, bf16=121e12, eight_bits=242e12, link=32e9),
    "a100": Gpu(memory=79, capability=(8, 0), bandwidth=2039e9, bf16=312e12, eight_bits=624e12, link=300e9),
    "h100": Gpu(memory=79, capability=(9, 0), bandwidth=3350e9, bf16=989e12, eight_bits=1979e12, link=450e9),
    "h200": Gpu(
        memory=139, capability=(9, 0), bandwidth=4800e9, bf16=989e12, eight_bits=1979e12, link=450e9, measured=True
    ),
}
