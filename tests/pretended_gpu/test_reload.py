"""Weight syncs through vLLM's code for GPUs, on a pretended one: every tensor keeps its place and gets its bytes."""

from __future__ import annotations

import itertools
import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from quant.schemes import as_bytes
from slow.isolated import isolated, isolated_group
from slow.toys import copies

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
CELLS = list(itertools.product((EXPERTS, *DENSE), SCHEMES))
CELLS.remove((EXPERTS, "NVFP4A16"))  # vLLM has none
# Kernels for them pad: by `layer.bias.data = ...` for W8A16, with a new parameter for the others.
PADDED_SCHEMES = ("W8A16", "NVFP4A16", "FP8_DYNAMIC")
RANKED = (("qwen2", "W4A16"), ("qwen3", "NVFP4A16"), (EXPERTS, "W4A16"), (EXPERTS, "FP8_DYNAMIC"))
# They do not depend on the weights.
ALIKE_IN_ALL_SYNCS = ("weight_shape", "cos_sin_cache")
# What a kernel of FP8 experts holds: constants, and its scales, which are parameters of the layer.
STRIDES = (
    "moe_kernel.impl.fused_experts.experts.ab_strides1",
    "moe_kernel.impl.fused_experts.experts.ab_strides2",
    "moe_kernel.impl.fused_experts.experts.c_strides1",
    "moe_kernel.impl.fused_experts.experts.c_strides2",
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
    # The learner's own weights are those of B from here on.
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    weights_b = stream_of(learner)

    # Copies after each sync: what the engine has is written in place by the next one.
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
        _repack_again(again)

    return Syncs(
        kernel=engine.kernel(),
        elements=sum(parameter.numel() for parameter in engine.model.parameters()),
        moved=moved(places, engine),
        scales=scales,
        same_in_b=same_in_b(after_a, after_b),
        not_a_again=different(after_a, again),
    )


def stream_of(learner: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of what a sync sends."""
    from qarl_trl.quant import iter_low_bit_weights

    return copies(iter_low_bit_weights(learner, stacked=True))


def _repack_again(tensors: dict[str, torch.Tensor]) -> None:
    """Permute those of one layer in each block once more."""
    for name, tensor in tensors.items():
        if name.endswith("down_proj.weight_packed"):
            tensors[name] = tensor.flip(0)


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
        # Of a few numbers, as a scale of a layer, two syncs may have the same by chance.
        depends_on_weights = tensor.numel() > 4 and not name.endswith(ALIKE_IN_ALL_SYNCS)
        if depends_on_weights and same(tensor, after_b[name]):
            names.append(name)
    return names


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same bytes, in whatever shape."""
    # A tensor without dimensions cannot be viewed as bytes.
    return torch.equal(as_bytes(one.flatten()), as_bytes(other.flatten()))


def different(expected: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> list[str]:
    """The names in `expected` whose bytes are others, or missing, in `tensors`."""
    names = []
    for name, tensor in expected.items():
        if name not in tensors or not same(tensor, tensors[name]):
            names.append(name)
    return names


def sync_all_cells(folder: str, capability: tuple[int, int]) -> dict[tuple[str, str], Syncs]:
    results = {}
    for kind, scheme in CELLS:
        place = Path(folder) / kind / scheme
        place.mkdir(parents=True)
        results[kind, scheme] = sync_a_b_a(str(place), kind, scheme, capability)
    return results


def sync_without_deep_gemm(folder: str, kind: str, capability: tuple[int, int]) -> Syncs:
    """FP8_BLOCK on the kernels that vLLM chooses next."""
    # Of the process, which is this engine's own.
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
        # One after the other in one process: an answer that vLLM has cached would be the one before.
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
    column = None
    kernels = {}
    for line in PAGE.read_text().splitlines():
        cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
        if line.startswith("| scheme |"):
            # The header of the only table of kernels: "Hopper (9.0)" and so on.
            (heading,) = [cell for cell in cells if cell.startswith(generation)]
            column = cells.index(heading)
        elif line.startswith("| `") and column is not None:
            kernels[cells[0].strip("`")] = cells[column]
    return kernels


def kernels_of(results: dict[tuple[str, str], Syncs], scheme: str) -> str:
    """The kernel of dense models, which is one, and that of experts."""
    kernel = results[DENSE[0], scheme].kernel
    for kind in DENSE:
        assert results[kind, scheme].kernel == kernel, kind
    if (EXPERTS, scheme) not in results:
        return kernel
    return f"{kernel}, {results[EXPERTS, scheme].kernel}"


@pytest.mark.parametrize("generation", GPU_GENERATIONS)
def test_after_syncs_and_sleeps_every_tensor_is_in_its_place_with_its_bytes(generation, tmp_path):
    results = isolated(sync_all_cells, str(tmp_path), GPU_GENERATIONS[generation])

    for cell, syncs in results.items():
        assert_faultless(syncs, cell)
    # A test that syncs into another kernel than users get would show nothing, and the page tells users which it is.
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
        # Half of the layers; norms are whole in each.
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

    first = "model.layers.0.mlp.down_proj.weight_packed"
    second = "model.layers.1.mlp.down_proj.weight_packed"
    assert syncs.not_a_again == [first, second]


def test_a_reload_of_vllm_moves_what_graphs_of_experts_read(tmp_path):
    """When this fails vLLM has been repaired."""
    syncs = isolated(sync_with_reload_of_vllm, str(tmp_path), EXPERTS, "FP8_DYNAMIC", WHOLE_TILES, HOPPER)

    for part in (*STRIDES, *SCALES):
        assert f"model.layers.0.mlp.experts.routed_experts.quant_method.{part}" in syncs.moved


def test_constants_of_a_kept_kernel_must_be_filled(tmp_path):
    syncs = isolated(sync_without_constants, str(tmp_path))

    # In their places, so that addresses alone would not show it.
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
        yes[generation] = set(filter(answer.get, answer))

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
