"""What stays as its model has made it when vLLM's own loader draws random weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.fusion.mm_input_norm import FusedMMInputNorm
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from qarl_trl.rollout.vllm.random_start import keep_constants
from qarl_trl.rollout.vllm.reloading import reload_model


BFLOAT16 = SimpleNamespace(dtype=torch.bfloat16)


class Tower(torch.nn.Module):
    """As the start of Qwen2.5-VL's vision tower in vLLM: pixels are normalized by buffers that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm = FusedMMInputNorm([0.48, 0.46, 0.41], [0.27, 0.26, 0.28], 1 / 255)
        self.projection = torch.nn.Linear(2, 2, bias=False)
        # Buffers that a checkpoint has, and that a state dict has not.
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("positions", torch.arange(2.0), persistent=False)
        self.requires_grad_(False)

    def load_weights(self, weights):
        """vLLM's method."""
        places = dict(self.named_parameters()) | dict(self.named_buffers())
        for name, tensor in weights:
            place = places[name]
            getattr(place, "weight_loader", default_weight_loader)(place, tensor)


@pytest.fixture
def tower(monkeypatch):
    # Restored afterwards, whether it was replaced before or not.
    monkeypatch.setattr(DummyModelLoader, "load_weights", DummyModelLoader.load_weights)
    with set_current_vllm_config(VllmConfig()):
        tower = Tower()
        record_metadata_for_reloading(tower)
        yield tower


def draw(tower: Tower) -> None:
    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(tower, BFLOAT16)


def tensors_of(tower: Tower) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in (*tower.named_parameters(), *tower.named_buffers())}


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


def test_random_weights_leave_the_buffers_of_a_model(tower):
    before = tensors_of(tower)
    keep_constants()

    draw(tower)

    assert changed(before, tensors_of(tower)) == {"projection.weight"}


def test_control_vllm_itself_draws_buffers_too(tower, monkeypatch):
    load = DummyModelLoader.load_weights
    monkeypatch.setattr(DummyModelLoader, "load_weights", getattr(load, "__wrapped__", load))
    before = tensors_of(tower)

    draw(tower)

    of_pixels = {"input_norm.weight", "input_norm.bias"}
    assert changed(before, tensors_of(tower)) == of_pixels | {"projection.weight", "scale"}


def test_a_sync_brings_the_buffers_that_a_checkpoint_has_and_leaves_the_others(tower):
    before = tensors_of(tower)
    keep_constants()
    draw(tower)
    stream = [("projection.weight", torch.ones(2, 2)), ("scale", torch.full((1,), 3.0))]

    def reload(weights):
        initialize_layerwise_reload(tower)
        tower.load_weights(weights)
        finalize_layerwise_reload(tower, BFLOAT16)

    reload_model(tower, stream, reload)

    after = tensors_of(tower)
    assert changed(before, after) == {"projection.weight", "scale"}
    assert after["scale"].item() == 3.0
