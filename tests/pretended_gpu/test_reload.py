"""Weight syncs through vLLM's code for GPUs, on a pretended one: every tensor keeps its place and gets its bytes."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from slow.isolated import isolated, isolated_group

from qarl_trl.quant.scheme import GPU_GENERATIONS

from .engine import Engine, make_learner


pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "dev" / "gpu.md"
HOPPER = GPU_GENERATIONS["Hopper"]
DENSE = ("qwen2", "qwen3", "llama")
EXPERTS = "qwen3_moe"
SCHEMES = ("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16", "FP8_BLOCK", "none")
# Family and scheme. The experts first: vLLM makes the group of their ranks with the first model of a process alone.
CELLS = [(kind, scheme) for kind in (EXPERTS, *DENSE) for scheme in SCHEMES]
CELLS.remove((EXPERTS, "NVFP4A16"))  # vLLM has none
RANKED = (("qwen2", "W4A16"), ("qwen3", "NVFP4A16"), (EXPERTS, "W4A16"), (EXPERTS, "FP8_DYNAMIC"))
# They do not depend on the weights.
ALIKE_IN_ALL_SYNCS = ("weight_shape", "cos_sin_cache")


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
    folder: str, kind: str, scheme: str, capability: tuple[int, int] = HOPPER, repacked_twice: bool = False
) -> Syncs:
    """`repacked_twice`: a fault of the second A."""
    learner = make_learner(kind, scheme)
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

    return {name: tensor.clone() for name, tensor in iter_low_bit_weights(learner)}


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


def sync_with_deep_gemm(folder: str, kind: str) -> Syncs:
    """FP8_BLOCK with a DeepGEMM, whose layout of scales is another permutation."""
    import vllm.utils.deep_gemm
    from vllm.platforms import current_platform

    from qarl_trl.rollout import _vllm

    def transform(sf: torch.Tensor, **_: Any) -> torch.Tensor:
        return sf.flip(-1).clone()

    sys.modules["deep_gemm"] = types.SimpleNamespace(fp8_gemm_nt=None, transform_sf_into_required_layout=transform)
    vllm.utils.deep_gemm.has_deep_gemm = lambda: True
    type(current_platform).support_deep_gemm = classmethod(lambda cls: True)
    _vllm.keep_block_scales()
    return sync_a_b_a(folder, kind, "FP8_BLOCK")


def sync_without_bias_loaders(folder: str, kind: str, scheme: str) -> Syncs:
    from qarl_trl.rollout import _vllm

    _vllm._prepare_biases = lambda model: {}
    return sync_a_b_a(folder, kind, scheme)


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


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_block_scales_survive_the_layout_of_deep_gemm(kind, tmp_path):
    syncs = isolated(sync_with_deep_gemm, str(tmp_path), kind)

    assert_faultless(syncs)
    assert syncs.kernel == "DeepGemmFp8BlockScaledMMKernel"


def test_a_second_repack_is_found(tmp_path):
    """A control."""
    syncs = isolated(sync_a_b_a, str(tmp_path), "qwen2", "W4A16", HOPPER, True)

    assert syncs.not_a_again == [f"model.layers.{i}.mlp.down_proj.weight_packed" for i in (0, 1)]


@pytest.mark.parametrize("scheme", ["NVFP4A16", "FP8_BLOCK"])
def test_without_its_loader_a_permuted_bias_stops_the_first_sync(scheme, tmp_path):
    """A control. Marlin puts a permuted bias without a loader in its place. When this fails vLLM has been repaired."""
    with pytest.raises(AssertionError):
        isolated(sync_without_bias_loaders, str(tmp_path), "qwen2", scheme)
