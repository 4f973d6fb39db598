"""`qarl_trl.rollout.vllm.reloading`: an engine must take every tensor; the real one is in tests/slow."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from qarl_trl.rollout.vllm import reloading


# vLLM's own reload of a model of three layers; whole engines are in tests/slow ----------------------------------


class Merged(nn.Module):
    """Two matrices in one, and a scale."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3))
        self.weight.weight_loader = self.load_part
        # Of a quantized cache. No checkpoint of ours has it.
        self.k_scale = nn.Parameter(torch.zeros(1))

    @staticmethod
    def load_part(param, tensor, part):
        param.data[2 * part :][:2].copy_(tensor)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2, 3)
        self.merged = Merged()
        self.head = nn.Linear(3, 2, bias=False)

    def load_weights(self, stream):
        params = dict(self.named_parameters())
        parts = {"gate": 0, "up": 1}

        for name, tensor in stream:
            if name in parts:
                param = params["merged.weight"]
                param.weight_loader(param, tensor, parts[name])
            else:
                param = params[name]
                # As vLLM's models load: a parameter may have a loader of its own.
                loader = getattr(param, "weight_loader", default_weight_loader)
                loader(param, tensor)


def reload(tied=False, lost=()):
    """The model after a reload with ones, without the tensors `lost`."""
    model = Model()
    if tied:
        model.head.weight = model.embed.weight
    # As vLLM does when it has made a model.
    record_metadata_for_reloading(model)
    stream = [(name, torch.ones(2, 3)) for name in ("embed.weight", "gate", "up", "head.weight") if name not in lost]

    def run(watched):
        initialize_layerwise_reload(model)
        model.load_weights(watched)
        finalize_layerwise_reload(model, None)

    reloading.reload_model(model, stream, run)
    return model


def test_an_engine_that_takes_everything_is_accepted():
    """Scales of a cache, which a sync never has, are not waited for."""
    model = reload()

    for name, param in model.named_parameters():
        if name.endswith("weight"):
            assert (param == 1).all(), name


@pytest.mark.parametrize(("lost", "name"), [("head.weight", "head.weight"), ("up", "merged.weight")])
def test_a_tensor_or_a_part_of_one_that_the_engine_did_not_get_is_an_error(lost, name):
    with pytest.raises(RuntimeError, match=rf"old values for 1 tensors, first \['{name}'\]"):
        reload(lost=[lost])


def test_a_tied_weight_needs_one_of_its_names():
    reload(tied=True, lost=["head.weight"])

    with pytest.raises(RuntimeError, match=r"old values for 2 tensors, first \['embed.weight', 'head.weight'\]"):
        reload(tied=True, lost=["head.weight", "embed.weight"])


class WithBiases(Model):
    """Its head has a bias. What a checkpoint has of others is skipped, as vLLM's models do, and so is a layer."""

    def __init__(self, keeps=False):
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.keeps = keeps

    def load_weights(self, stream):
        # Some models of vLLM look at all tensors first.
        tensors = list(stream) if self.keeps else stream
        super().load_weights(pair for pair in tensors if pair[0] != "embed.bias" and "tower" not in pair[0])


@pytest.mark.parametrize(
    ("tensors", "keeps", "is_refused"),
    [
        ({"head.bias": 1.0}, False, False),
        # Nobody sees what becomes of them.
        ({"head.bias": 1.0}, True, False),
        # As before training. It changes nothing.
        ({"head.bias": 1.0, "embed.bias": 0.0}, False, False),
        ({"head.bias": 1.0, "embed.bias": 1.0}, False, True),
        # The engine does without the layer, as without a vision tower.
        ({"head.bias": 1.0, "tower.weight": 1.0, "tower.bias": 1.0}, False, False),
    ],
)
def test_a_bias_that_the_engine_has_no_place_for_is_an_error(tensors, keeps, is_refused):
    model = WithBiases(keeps)
    record_metadata_for_reloading(model)
    stream = [(name, torch.ones(2, 3)) for name in ("embed.weight", "gate", "up", "head.weight")]
    stream += [(name, torch.full((2,), value)) for name, value in tensors.items()]

    def run(watched):
        initialize_layerwise_reload(model)
        model.load_weights(watched)
        finalize_layerwise_reload(model, None)

    if not is_refused:
        reloading.reload_model(model, stream, run)
        assert (model.head.bias == 1).all()
        return
    with pytest.raises(RuntimeError, match="no place for 1 biases of this model, first embed.bias"):
        reloading.reload_model(model, stream, run)


def test_an_engine_that_does_not_load_is_an_error():
    # A reload that does nothing. Without the error nothing would be checked, and all would look well.
    with pytest.raises(RuntimeError, match="reloaded without its loaders"):
        reloading.reload_model(Model(), (), lambda stream: None)


# The cache ------------------------------------------------------------------------------------------------------


class Engine:
    """A `vllm.LLM` whose prefix cache is reset or not, as `resets` says."""

    def __init__(self, resets):
        self.reset_prefix_cache = lambda: resets
        self.llm_engine = SimpleNamespace(reset_encoder_cache=self.forget_images)
        self.forgot_images = False

    def forget_images(self):
        self.forgot_images = True


def test_the_caches_of_keys_and_of_image_features_are_cleared():
    llm = Engine(resets=True)

    reloading.reset_prefix_cache(llm)

    assert llm.forgot_images


def test_a_prefix_cache_that_stays_is_an_error():
    with pytest.raises(RuntimeError, match="requests are still running"):
        reloading.reset_prefix_cache(Engine(resets=False))
