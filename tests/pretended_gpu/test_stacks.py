"""Experts synced as stacks: vLLM's code for GPUs makes the same bytes of them as of experts one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from slow.isolated import isolated, isolated_group
from slow.toys import copies

from qarl_trl.quant.supported import GPU_GENERATIONS

from .engine import WHOLE_TILES, Engine, make_learner
from .test_reload import EXPERTS, HOPPER, SCHEMES, different, stream_of


pytestmark = pytest.mark.slow
# vLLM has no experts in NVFP4A16. Without a scheme the stream has no stacks: TRL's names are its own.
STACKED = [scheme for scheme in SCHEMES if scheme not in ("NVFP4A16", "none")]
# Tensors of a layer of experts in `conftest.KINDS`: those of each projection, without the shape of `up_proj`.
CALLS = {"W4A16": 8, "W4A16_ASYM": 11, "W8A16": 8, "W8A8": 6, "FP8_DYNAMIC": 6, "FP8_BLOCK": 6}
# Two ranks have whole groups and blocks of each expert.
SIZES = {**WHOLE_TILES, "moe_intermediate_size": 256}
LAYERS = 2
EXPERTS_OF_LAYER = 4


@dataclass(frozen=True)
class Loaded:
    """
    What two syncs of the same weights left of an engine, with a sleep between them: one by one, and as stacks.

    Attributes:
        calls: Number of calls of vLLM's loader of experts in each sync.
        differing: Tensors of the engine that differ afterwards.
        differing_exchanged: The same after stacks whose experts were exchanged.
    """

    calls: tuple[int, int]
    differing: list[str]
    differing_exchanged: list[str]


def load_both_ways(
    folder: str, scheme: str, capability: tuple[int, int] = HOPPER, expert_parallel: bool = True
) -> Loaded:
    from qarl_trl.quant import iter_low_bit_weights

    learner = make_learner(EXPERTS, scheme, SIZES)
    engine = Engine(folder, learner, capability, expert_parallel)
    one_by_one = copies(iter_low_bit_weights(learner))
    stacks = stream_of(learner)
    assert len(stacks) < len(one_by_one)

    calls_one_by_one = calls_of_expert_loaders(engine, lambda: engine.sync(one_by_one))
    expected = engine.copies()

    # Between the two, so that nothing is equal because nobody wrote it.
    engine.sleep()
    calls_of_stacks = calls_of_expert_loaders(engine, lambda: engine.sync(stacks))
    differing = differing_tensors(expected, engine)

    # Control: stacks in which the experts have changed their places.
    of_other_experts = {}
    for name, tensor in stacks.items():
        of_other_experts[name] = exchanged(name, tensor)
    engine.sync(of_other_experts)
    return Loaded((calls_one_by_one, calls_of_stacks), differing, differing_tensors(expected, engine))


def calls_of_expert_loaders(engine: Engine, sync: Callable[[], None]) -> int:
    """Number of calls during a sync."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader.reload import layerwise

    calls = []
    # vLLM's reload asks this of each call of a loader.
    load = layerwise.get_numel_loaded

    def counted(loader: Any, arguments: Any) -> Any:
        if isinstance(getattr(loader, "__self__", None), RoutedExperts):
            calls.append(loader)
        return load(loader, arguments)

    with patch.object(layerwise, "get_numel_loaded", counted):
        sync()
    return len(calls)


def exchanged(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A stack whose experts have changed their places, so that every rank gets others."""
    return tensor[[3, 2, 1, 0]] if ".*." in name else tensor


def differing_tensors(expected: dict[str, torch.Tensor], engine: Engine) -> list[str]:
    tensors = engine.tensors()
    assert tensors.keys() == expected.keys()
    return different(expected, tensors)


def load_all_schemes(folder: str, capability: tuple[int, int]) -> dict[str, Loaded]:
    results = {}
    for scheme in STACKED:
        place = Path(folder) / scheme
        place.mkdir()
        results[scheme] = load_both_ways(str(place), scheme, capability)
    return results


def load_without(folder: str, lost: str) -> str:
    """What a sync says that lacks one tensor of a stream with stacks."""
    learner = make_learner(EXPERTS, "W4A16")
    engine = Engine(folder, learner, HOPPER)
    stacks = stream_of(learner)
    del stacks[lost]

    with pytest.raises(RuntimeError) as error:
        engine.sync(stacks)
    return str(error.value)


@pytest.mark.parametrize("generation", GPU_GENERATIONS)
def test_stacks_become_the_same_bytes(generation, tmp_path):
    results = isolated(load_all_schemes, str(tmp_path), GPU_GENERATIONS[generation])

    assert len(results) == 6
    for scheme, loaded in results.items():
        assert loaded.differing == [], scheme
        one_by_one, stacked = loaded.calls
        # What stacks are for: each call of a loader takes Python's time.
        assert stacked == LAYERS * CALLS[scheme], scheme
        assert one_by_one >= EXPERTS_OF_LAYER * stacked, scheme
        # Control.
        assert len(loaded.differing_exchanged) >= LAYERS * 2, scheme


@pytest.mark.parametrize(
    ("lost", "parameter"),
    [("up_proj.weight_packed", "w13_weight_packed"), ("down_proj.weight_scale", "w2_weight_scale")],
)
def test_a_stack_that_did_not_come_is_an_error(lost, parameter, tmp_path):
    message = isolated(load_without, str(tmp_path), f"model.layers.1.mlp.experts.*.{lost}")

    assert "old values for 1 tensors" in message
    assert f"model.layers.1.mlp.experts.routed_experts.{parameter}" in message


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC"])
def test_a_rank_with_a_part_of_each_expert_takes_stacks(scheme, tmp_path):
    ranks = isolated_group(load_both_ways, 2, str(tmp_path), scheme, HOPPER, False)

    for loaded in ranks:
        assert loaded.differing == []
        assert loaded.differing_exchanged
        _, stacked = loaded.calls
        assert stacked == LAYERS * CALLS[scheme]


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC"])
def test_a_rank_with_some_of_the_experts_gets_them_one_by_one(scheme, tmp_path):
    ranks = isolated_group(load_both_ways, 2, str(tmp_path), scheme)

    # `load_stacks` leaves them to vLLM's loader, which knows which experts a rank has.
    for loaded in ranks:
        assert loaded.differing == []
        assert loaded.differing_exchanged
        _, one_by_one = loaded.calls
        assert one_by_one > LAYERS * CALLS[scheme]
