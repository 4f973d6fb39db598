"""`qarl_trl.rollout._vllm`: an engine must take every tensor; the real one is in tests/slow."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from slow.isolated import isolated_group
from torch import nn
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from qarl_trl.rollout import _vllm


# vLLM's own reload of a model of three layers; whole engines are in tests/slow ------------------------------------------


class Merged(nn.Module):
    """Two matrices in one, and a scale."""

    def __init__(self):
        super().__init__()
        self.weight, self.k_scale = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(1))
        self.weight.weight_loader = lambda param, tensor, part: param.data[2 * part :][:2].copy_(tensor)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.merged, self.head = nn.Embedding(2, 3), Merged(), nn.Linear(3, 2, bias=False)

    def load_weights(self, stream):
        params = dict(self.named_parameters())
        for name, tensor in stream:
            part = {"up": (1,), "gate": (0,)}.get(name, ())
            param = params["merged.weight" if part else name]
            getattr(param, "weight_loader", default_weight_loader)(param, tensor, *part)


def reload(tied=False, lost=()):
    """The model after a reload with ones, without the tensors `lost`."""
    model = Model()
    if tied:
        model.head.weight = model.embed.weight
    record_metadata_for_reloading(model)
    stream = [(name, torch.ones(2, 3)) for name in ("embed.weight", "gate", "up", "head.weight") if name not in lost]

    def run():
        initialize_layerwise_reload(model)
        model.load_weights(stream)
        finalize_layerwise_reload(model, None)

    _vllm.reload_model(model, run)
    return model


def test_an_engine_that_takes_everything_is_accepted():
    """Scales of a cache, which a sync never has, are not waited for."""
    model = reload()
    assert all((p == 1).all() for name, p in model.named_parameters() if name.endswith("weight"))


@pytest.mark.parametrize(("lost", "name"), [("head.weight", "head.weight"), ("up", "merged.weight")])
def test_a_tensor_or_a_part_of_one_that_the_engine_did_not_get_is_an_error(lost, name):
    with pytest.raises(RuntimeError, match=rf"old values for 1 tensors, first \['{name}'\]"):
        reload(lost=lost)


def test_a_tied_weight_needs_one_of_its_names():
    reload(tied=True, lost="head.weight")
    with pytest.raises(RuntimeError, match=r"old values for 2 tensors, first \['embed.weight', 'head.weight'\]"):
        reload(tied=True, lost=["head.weight", "embed.weight"])


def test_an_engine_that_does_not_load_is_an_error():
    with pytest.raises(RuntimeError, match="reloaded without its loaders"):
        _vllm.reload_model(Model(), lambda: None)


def test_a_prefix_cache_that_stays_is_an_error():
    done, forgotten = [], SimpleNamespace(reset_encoder_cache=lambda: done.append("features of images"))
    _vllm.reset_prefix_cache(SimpleNamespace(reset_prefix_cache=lambda: True, llm_engine=forgotten))
    assert done == ["features of images"]
    with pytest.raises(RuntimeError, match="requests are still running"):
        _vllm.reset_prefix_cache(SimpleNamespace(reset_prefix_cache=lambda: False, llm_engine=forgotten))


def _draws():
    """What numpy's generator gives inside and after; before that a reward function has drawn from it in the second process."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    np.random.seed(0)
    np.random.random(rank)
    found = []
    for _ in range(2):
        with _vllm.same_draws(torch.distributed.group.WORLD):
            found.append(np.random.randint(2**60, size=3).tolist())
    with pytest.raises(KeyError), _vllm.same_draws(torch.distributed.group.WORLD):
        np.random.random(rank)
        raise KeyError
    state = np.random.get_state()[2]
    return found, state


@pytest.mark.slow
def test_ranks_of_an_engine_draw_the_same_seeds_and_keep_their_own_generator():
    """vLLM's model runner V2 takes the seeds of requests from it."""
    (first, state), (second, other) = isolated_group(_draws, 2)
    assert first == second
    assert first[0] != first[1]  # the next batch has other seeds
    assert other > state  # control: the second has drawn once more
