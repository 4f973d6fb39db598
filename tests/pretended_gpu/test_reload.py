"""Weight syncs through vLLM's code for GPUs, on a pretended one: every tensor keeps its place and gets its bytes."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from slow.isolated import isolated, isolated_group

from qarl_trl.quant.supported import GPU_GENERATIONS

from .cuda import cuda
from .engine import PADDED, WHOLE_TILES, Engine, make_learner


pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "dev" / "gpu.md"
AMPERE = GPU_GENERATIONS["Ampere"]
HOPPER = GPU_GENERATIONS["Hopper"]
DENSE = ("qwen2", "qwen3", "llama")
EXPERTS = "qwen3_moe"
SCHEMES = ("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16", "FP8_BLOCK", "none")
# Family and scheme. The experts first: vLLM makes the group of their ranks with the first model of a process alone.
CELLS = [(kind, scheme) for kind in (EXPERTS, *DENSE) for scheme in SCHEMES]
CELLS.remove((EXPERTS, "NVFP4A16"))  # vLLM has none
# Kernels for them pad: by `layer.bias.data = ...` for W8A16, with a new parameter for the others.
PADDED_SCHEMES = ("W8A16", "NVFP4A16", "FP8_DYNAMIC")
RANKED = (("qwen2", "W4A16"), ("qwen3", "NVFP4A16"), (EXPERTS, "W4A16"), (EXPERTS, "FP8_DYNAMIC"))
# They do not depend on the weights.
ALIKE_IN_ALL_SYNCS = ("weight_shape", "cos_sin_cache")
# What a kernel of FP8 experts holds: constants, and its scales, which are parameters of the layer.
STRIDES = tuple(
    f"moe_kernel.impl.fused_experts.experts.{name}"
    for name in ("ab_strides1", "ab_strides2", "c_strides1", "c_strides2")
)
SCALES = ("moe_quant_config._w1.scale", "moe_quant_config._w2.scale")


@dataclass(frozen=True)
class Syncs:
    """
    What syncs A, B, A left of an engine, with a sleep before B and before the second A.

    Attributes:
        kernel: The class that multiplies in an MLP.
        elements: Number of elements of the engine's parameters.
        moved: Tensors that are no longer at their address, which CUDA graphs would read.
        scales: Scales of the queries, before and after each sync.
        same_in_b: Tensors that are the same after A and after B, though their weights are not.
        not_a_again: Tensors that are not the same after both A.
    """

    kernel: str
    elements: int
    moved: list[str]
    scales: set[float]
    same_in_b: list[str]
    not_a_again: list[str]


def assert_faultless(syncs: Syncs, label: Any = "") -> None:
    assert syncs.moved == [], label
    assert syncs.scales == {1.0}, label
    assert syncs.same_in_b == [], label
    assert syncs.not_a_again == [], label


# In a process of its own --------------------------------------------------------------------------------------------


def sync_a_b_a(
    folder: str,
    kind: str,
    scheme: str,
    capability: tuple[int, int] = HOPPER,
    sizes: dict[str, int] = WHOLE_TILES,
    repacked_twice: bool = False,
) -> Syncs:
    """`repacked_twice`: a fault of the second A."""
    learner = make_learner(kind, scheme, sizes)
    engine = Engine(folder, learner, capability)
    places = engine.places()
    scales = {engine.query_scale()}

    weights_a = stream_of(learner)
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    weights_b = stream_of(learner)

    engine.sync(weights_a)
    scales.add(engine.query_scale())
    after_a = engine.copies()

    engine.sleep()
    engine.sync(weights_b)
    scales.add(engine.query_scale())
    after_b = engine.copies()

    engine.sleep()
    engine.sync(weights_a)
    scales.add(engine.query_scale())
    again = engine.copies()
    if repacked_twice:
        again = {name: _repacked_again(name, tensor) for name, tensor in again.items()}

    return Syncs(
        kernel=engine.kernel(),
        elements=sum(parameter.numel() for parameter in engine.model.parameters()),
        moved=moved(places, engine),
        scales=scales,
        same_in_b=same_in_b(after_a, after_b),
        not_a_again=[name for name, tensor in after_a.items() if name not in again or not same(tensor, again[name])],
    )


def stream_of(learner: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of what a sync sends."""
    from qarl_trl.quant import iter_low_bit_weights

    return {name: tensor.clone() for name, tensor in iter_low_bit_weights(learner, stacked=True)}


def _repacked_again(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flip(0) if name.endswith("down_proj.weight_packed") else tensor


def moved(places: dict[str, torch.Tensor], engine: Engine) -> list[str]:
    """The tensors of the engine's start that are no longer at their address, under the same name."""
    now = engine.places()
    names = []
    for name, place in places.items():
        if name not in now or now[name].data_ptr() != place.data_ptr():
            names.append(name)
    return names


def same_in_b(after_a: dict[str, torch.Tensor], after_b: dict[str, torch.Tensor]) -> list[str]:
    """Tensors of more than a few elements that should differ and do not."""
    names = []
    for name, tensor in after_a.items():
        depends_on_weights = tensor.numel() > 4 and not name.endswith(ALIKE_IN_ALL_SYNCS)
        if depends_on_weights and same(tensor, after_b[name]):
            names.append(name)
    return names


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same bytes, in whatever shape."""
    one = one.contiguous().flatten().view(torch.uint8)
    other = other.contiguous().flatten().view(torch.uint8)
    return torch.equal(one, other)


def sync_all_cells(folder: str, capability: tuple[int, int]) -> dict[tuple[str, str], Syncs]:
    results = {}
    for kind, scheme in CELLS:
        place = Path(folder) / kind / scheme
        place.mkdir(parents=True)
        results[kind, scheme] = sync_a_b_a(str(place), kind, scheme, capability)
    return results


def sync_without_deep_gemm(folder: str, kind: str, capability: tuple[int, int]) -> Syncs:
    """FP8_BLOCK on the kernels that vLLM chooses next."""
    os.environ["VLLM_USE_DEEP_GEMM"] = "0"
    return sync_a_b_a(folder, kind, "FP8_BLOCK", capability)


def sync_with_reload_of_vllm(
    folder: str, kind: str, scheme: str, sizes: dict[str, int], capability: tuple[int, int]
) -> Syncs:
    """Neither kernels of experts nor biases are looked after."""
    from qarl_trl.rollout.vllm import reloading

    reloading.keep_expert_kernels = lambda model: nullcontext()
    reloading.biases_of_checkpoint = nullcontext
    return sync_a_b_a(folder, kind, scheme, capability, sizes)


def sync_without_constants(folder: str) -> Syncs:
    """FP8 experts whose first kernels come back without the constants of the new ones."""
    from qarl_trl.rollout.vllm import reload_experts

    reload_experts._take_over = lambda layer, first, new: None
    return sync_a_b_a(folder, EXPERTS, "FP8_DYNAMIC")


def answers() -> dict[str, dict[str, bool]]:
    """For each generation what vLLM asks before it chooses a kernel for FP8."""
    of_generations = {}
    for generation, capability in GPU_GENERATIONS.items():
        with cuda(capability):
            from vllm.model_executor.layers.quantization.utils import w8a8_utils
            from vllm.platforms import current_platform
            from vllm.utils.deep_gemm import is_deep_gemm_supported

            of_generations[generation] = {
                "CPU": current_platform.is_cpu(),
                "FP8": current_platform.supports_fp8(),
                "CUTLASS": w8a8_utils.cutlass_fp8_supported(),
                "CUTLASS for blocks": w8a8_utils.cutlass_block_fp8_supported(),
                "CUTLASS for experts": w8a8_utils.cutlass_group_gemm_supported(),
                "DeepGEMM": is_deep_gemm_supported(),
            }
    return of_generations


def errors_of_questions() -> dict[str, str]:
    """The names of the errors that questions raise; empty for an answer."""
    errors = {}
    with cuda(HOPPER):
        from vllm import _custom_ops as ops
        from vllm.platforms import current_platform

        questions = {
            "FP8": current_platform.supports_fp8,
            "name of the GPU": current_platform.get_device_name,
            "MXFP4": lambda: ops.mxfp4_experts_quant_supported(90),
            "an operation": lambda: torch.ops._C.marlin_gemm,
        }
        for question, ask in questions.items():
            try:
                ask()
                errors[question] = ""
            except Exception as error:
                errors[question] = type(error).__name__
    return errors


# Tests --------------------------------------------------------------------------------------------------------------


def kernels_on_the_page(generation: str) -> dict[str, str]:
    """What dev/gpu.md says of each scheme."""
    rows = [line.removesuffix(" |").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    header = next(row for row in rows if row[0] == "| scheme")
    (column,) = [index for index, name in enumerate(header) if name.startswith(generation)]
    return {row[0].removeprefix("| ").strip("`"): row[column] for row in rows if row[0].startswith("| `")}


def kernels_of(results: dict[tuple[str, str], Syncs], scheme: str) -> str:
    """The kernel of dense models, which is one, and that of experts."""
    (kernel,) = {results[kind, scheme].kernel for kind in DENSE}
    if (EXPERTS, scheme) not in results:
        return kernel
    return f"{kernel}, {results[EXPERTS, scheme].kernel}"


@pytest.mark.parametrize("generation", GPU_GENERATIONS)
def test_after_syncs_and_sleeps_every_tensor_is_in_its_place_with_its_bytes(generation, tmp_path):
    results = isolated(sync_all_cells, str(tmp_path), GPU_GENERATIONS[generation])

    for cell, syncs in results.items():
        assert_faultless(syncs, cell)
    on_the_page = kernels_on_the_page(generation)
    for scheme in SCHEMES:
        assert on_the_page[scheme] == kernels_of(results, scheme), f"dev/gpu.md: {scheme} on {generation}"


@pytest.mark.parametrize(("kind", "scheme"), RANKED, ids=map("-".join, RANKED))
def test_ranks_of_an_engine_keep_their_parts(kind, scheme, tmp_path):
    """Tensor parallel; of experts each rank has half."""
    alone = isolated(sync_a_b_a, str(tmp_path), kind, scheme)
    ranks = isolated_group(sync_a_b_a, 2, str(tmp_path), kind, scheme)

    assert len(ranks) == 2
    for rank in ranks:
        assert_faultless(rank)
        assert rank.kernel == alone.kernel
        assert rank.elements < 0.75 * alone.elements


@pytest.mark.parametrize(
    ("kind", "capability", "kernel"),
    [
        ("qwen2", HOPPER, "CutlassFp8BlockScaledMMKernel"),
        ("qwen3", HOPPER, "CutlassFp8BlockScaledMMKernel"),
        (EXPERTS, GPU_GENERATIONS["Blackwell"], "TritonExperts"),
    ],
)
def test_block_scales_survive_other_kernels(kind, capability, kernel, tmp_path):
    syncs = isolated(sync_without_deep_gemm, str(tmp_path), kind, capability)

    assert_faultless(syncs)
    assert syncs.kernel == kernel


@pytest.mark.parametrize("scheme", PADDED_SCHEMES)
def test_padded_biases_are_filled(scheme, tmp_path):
    syncs = isolated(sync_a_b_a, str(tmp_path), "qwen2", scheme, AMPERE, PADDED)

    assert_faultless(syncs)
    assert "Marlin" in syncs.kernel


# Controls -----------------------------------------------------------------------------------------------------------


def test_a_second_repack_is_found(tmp_path):
    syncs = isolated(sync_a_b_a, str(tmp_path), "qwen2", "W4A16", HOPPER, WHOLE_TILES, True)

    assert syncs.not_a_again == [f"model.layers.{i}.mlp.down_proj.weight_packed" for i in (0, 1)]


def test_a_reload_of_vllm_moves_what_graphs_of_experts_read(tmp_path):
    """When this fails vLLM has been repaired."""
    syncs = isolated(sync_with_reload_of_vllm, str(tmp_path), EXPERTS, "FP8_DYNAMIC", WHOLE_TILES, HOPPER)

    method = "model.layers.0.mlp.experts.routed_experts.quant_method"
    assert {f"{method}.{part}" for part in (*STRIDES, *SCALES)} <= set(syncs.moved)


def test_constants_of_a_kept_kernel_must_be_filled(tmp_path):
    syncs = isolated(sync_without_constants, str(tmp_path))

    assert syncs.moved == []
    assert syncs.not_a_again
    assert all(name.endswith(STRIDES) for name in syncs.not_a_again)


@pytest.mark.parametrize(
    ("scheme", "sizes"),
    [("NVFP4A16", WHOLE_TILES), ("FP8_DYNAMIC", WHOLE_TILES), *((scheme, PADDED) for scheme in PADDED_SCHEMES)],
    ids=["NVFP4A16", "FP8_DYNAMIC", *(f"{scheme}-padded" for scheme in PADDED_SCHEMES)],
)
def test_a_reload_of_vllm_stops_at_biases(scheme, sizes, tmp_path):
    """Marlin puts a permuted or padded bias in its place. When this fails vLLM has been repaired."""
    with pytest.raises(AssertionError):
        isolated(sync_with_reload_of_vllm, str(tmp_path), "qwen2", scheme, sizes, AMPERE)


# The pretence -------------------------------------------------------------------------------------------------------


def test_the_pretended_gpu_answers_as_one_of_its_generation():
    yes = {}
    for generation, answer in isolated(answers).items():
        yes[generation] = {question for question in answer if answer[question]}

    newest = {"FP8", "CUTLASS", "CUTLASS for blocks", "CUTLASS for experts", "DeepGEMM"}
    assert yes == {"Ampere": set(), "Ada": {"FP8", "CUTLASS"}, "Hopper": newest, "Blackwell": newest}


def test_a_question_without_an_answer_fails():
    errors = isolated(errors_of_questions)

    assert errors == {
        "FP8": "",  # a control
        "name of the GPU": "NotImplementedError",
        "MXFP4": "NoAnswer",  # vLLM takes an `AttributeError` for "no"
        "an operation": "NoAnswer",
    }
