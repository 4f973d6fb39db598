"""`qarl_trl.rollout._vllm`: an engine must take every tensor; the real one is in tests/slow."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from slow.isolated import isolated_group
from torch import nn
from trl.generation import vllm_generation
from vllm.config import VllmConfig

from qarl_trl.rollout import _vllm


def test_engine_arguments_are_added_to_those_of_trl(monkeypatch):
    monkeypatch.setattr(vllm_generation, "LLM", lambda **kwargs: kwargs, raising=False)
    original = vllm_generation.LLM
    with _vllm.llm_arguments(load_format="dummy", seed=2):
        assert vllm_generation.LLM(model="m", seed=1) == {"model": "m", "seed": 2, "load_format": "dummy"}
        assert vllm_generation.LLM(model="m", hf_overrides=None)["load_format"] == "dummy"
    assert vllm_generation.LLM is original


def test_dictionaries_that_trl_passes_itself_are_kept(monkeypatch):
    monkeypatch.setattr(vllm_generation, "LLM", lambda **kwargs: kwargs, raising=False)
    with _vllm.llm_arguments(hf_overrides={"a": 1, "b": 2}):
        assert vllm_generation.LLM(hf_overrides={"b": 0, "c": 3}) == {"hf_overrides": {"a": 1, "b": 2, "c": 3}}
        assert vllm_generation.LLM(hf_overrides=None) == {"hf_overrides": {"a": 1, "b": 2}}


def test_the_engine_is_shown_as_soon_as_it_is_built(monkeypatch):
    monkeypatch.setattr(vllm_generation, "LLM", lambda **kwargs: "llm", raising=False)
    seen = []
    with _vllm.llm_arguments(seen.append):
        assert vllm_generation.LLM() == "llm"
    assert seen == ["llm"]


# A stand-in for the engine: the real one is in tests/slow ------------------------------------------------------------


class Engine:
    """What `reload_engine` touches of a `vllm.LLM`."""

    def __init__(self, names, calls_load=True):
        self.model = nn.ParameterDict({name: nn.Parameter(torch.zeros(1)) for name in names})
        self.model.load_weights = lambda stream: {name.replace(".", "_") for name, _ in stream}
        self.calls_load = calls_load
        worker = SimpleNamespace(
            model_runner=SimpleNamespace(get_model=lambda: self.model), reload_weights=self.reload_weights
        )
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=worker), vllm_config=VllmConfig()
        )

    def reload_weights(self, weights_iterator):
        if self.calls_load:
            self.model.load_weights(weights_iterator)


def stream(*names):
    return ((name, torch.ones(1)) for name in names)


def test_an_engine_that_takes_everything_is_accepted_and_left_as_it_was():
    engine = Engine(["a_weight", "b_weight"])
    load_weights = engine.model.load_weights
    _vllm.reload_engine(engine, stream("a.weight", "b.weight"))
    assert engine.model.load_weights is load_weights


def test_a_tensor_that_the_engine_did_not_get_is_an_error():
    with pytest.raises(RuntimeError, match=r"old values for 1 tensors, first \['b_weight'\]"):
        _vllm.reload_engine(Engine(["a_weight", "b_weight"]), stream("a.weight"))


def test_parts_of_a_merged_parameter_are_counted():
    """Of a projection by the layer's number of them, of experts by those of this rank; the real ones are in tests/slow."""
    qkv, whole = SimpleNamespace(output_sizes=[8, 4, 4]), _vllm._is_whole
    for came, layer in [(("v", "q", "k"), qkv), ((0, (1, 2)), qkv), ((None,), qkv), ((None, 0), SimpleNamespace())]:
        assert whole(layer, "weight", {part for shard in came for part in _vllm._parts({"loaded_shard_id": shard})})
    assert not whole(qkv, "weight", {"q", "k"})

    gated = SimpleNamespace(is_act_and_mul=True)
    experts = SimpleNamespace(local_num_experts=2, moe_config=gated, expert_map=None)
    calls = [{"expert_id": e, "shard_id": s} for e in range(2) for s in ("w1", "w3")]
    parts = [part for call in calls for part in _vllm._parts(call)]
    assert whole(experts, "w13_weight", set(parts)) and whole(experts, "w2_weight", {(0, "w2"), (1, "w2")})
    assert not whole(experts, "w13_weight", set(parts[1:]))
    assert not whole(experts, "w13_weight", {(0, "w1"), (1, "w1")})  # no expert's up_proj
    # Experts 2 and 3 are another rank's.
    parallel = SimpleNamespace(**vars(experts) | {"expert_map": torch.tensor([0, 1, -1, -1])})
    assert whole(parallel, "w2_weight", {(expert, "w2") for expert in range(4)})
    assert not whole(parallel, "w2_weight", {(expert, "w2") for expert in (0, 2, 3)})
    # Loaders that take all experts at once (DBRX), and a layer that says nothing of experts (MiniCPM).
    assert _vllm._parts({"expert_id": None, "shard_id": "w2_weight"}) == _vllm._parts({"expert_id": 0}) == [None]
    assert whole(SimpleNamespace(), "w2s", {(0, "w2")})


def test_places_for_scales_of_a_cache_are_not_expected():
    engine = Engine(["a_weight"])
    names = [(n, object()) for n in ("a_weight", "layers.0.attn.k_scale", "layers.0.attn.q_zero_point")]
    engine.model.named_parameters = lambda **_: iter(names)
    _vllm.reload_engine(engine, stream("a.weight"))
    engine.model.named_parameters = lambda **_: iter([*names, ("layers.0.k_scales", object())])
    with pytest.raises(RuntimeError, match="layers.0.k_scales"):
        _vllm.reload_engine(engine, stream("a.weight"))


def tied_engine():
    engine = Engine(["embed_weight", "head_weight"])
    engine.model["head_weight"] = engine.model["embed_weight"]
    untied = [("embed_weight", object()), ("head_weight", object())]  # what the restore leaves: two tensors on meta
    named = engine.model.named_parameters
    engine.model.named_parameters = lambda **kwargs: named(**kwargs) if kwargs else iter(untied)
    return engine


def test_a_tied_weight_needs_one_of_its_names():
    _vllm.reload_engine(tied_engine(), stream("embed.weight"))
    with pytest.raises(RuntimeError, match=r"old values for 2 tensors, first \['embed_weight', 'head_weight'\]"):
        _vllm.reload_engine(tied_engine(), stream())


def test_experts_are_known_by_the_name_that_the_loader_reports():
    engine = Engine([])
    engine.model.named_parameters = lambda **_: iter([("mlp.experts.routed_experts.w2_weight", nn.Parameter())])
    engine.model.load_weights = lambda stream: {"mlp.experts.w2_weight" for _ in stream}
    _vllm.reload_engine(engine, stream("mlp.experts.0.down_proj.weight"))
    with pytest.raises(RuntimeError, match=r"mlp.experts.w2_weight"):
        _vllm.reload_engine(engine, stream())


def test_an_engine_that_does_not_load_is_an_error():
    with pytest.raises(RuntimeError, match="without calling the model's load_weights"):
        _vllm.reload_engine(Engine(["a_weight"], calls_load=False), stream("a.weight"))


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
