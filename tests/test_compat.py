"""`qarl_trl._compat`: versions, rebindings that are undone, and an engine that must take every tensor."""

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from qarl_trl import _compat


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
        return _compat.check_versions(*_compat.SUPPORTED)
    with pytest.raises(ImportError) as error:
        _compat.check_versions(*_compat.SUPPORTED)
    assert f"{package} {version} is installed" in str(error.value)
    assert f"pip install '{package}>={low},<{high}'" in str(error.value)


def test_images_and_token_types_are_no_text():
    """They are never packed."""
    text = {"model": 1, "input_ids": 1, "attention_mask": 1, "logits_to_keep": 1, "batch_size": 1}
    assert _compat.is_text(text | {"pixel_values": None})
    assert not any(_compat.is_text(text | {name: 1}) for name in ("pixel_values", "mm_token_type_ids", "new"))


# FSDP ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "plugin", "version"),
    [
        ({}, None, None),
        ({"ACCELERATE_USE_FSDP": "false"}, None, None),
        ({"ACCELERATE_USE_FSDP": "true"}, None, 1),  # accelerate's default
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, None, 2),
        ({}, {"fsdp_version": 2}, 2),
        ({}, {"fsdp_version": 1}, 1),
    ],
)
def test_the_version_of_fsdp_comes_from_the_launcher_or_the_arguments(monkeypatch, environment, plugin, version):
    for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _compat.fsdp_version(SimpleNamespace(fsdp_plugin_args=plugin)) == version


def test_master_weights_are_shared_by_all_processes_or_those_of_a_node(monkeypatch):
    args = SimpleNamespace(fsdp_plugin_args=None, world_size=16, parallelism_config=None, deepspeed_plugin=None)
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    monkeypatch.delenv("ACCELERATE_USE_PARALLELISM_CONFIG", raising=False)
    assert _compat.num_shards(args) == 1
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert _compat.num_shards(args) == 16
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")  # as recipes/accelerate/hsdp.yaml
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "8")
    assert _compat.num_shards(args) == 8
    args.parallelism_config = SimpleNamespace(dp_shard_size=4)
    assert _compat.num_shards(args) == 4
    args.deepspeed_plugin = SimpleNamespace(zero_stage=2)
    assert _compat.num_shards(args) == 4
    args.deepspeed_plugin.zero_stage = 3
    assert _compat.num_shards(args) == 16


@pytest.mark.parametrize("precision", ["bf16", "fp16", "no"])
def test_fsdp2_does_not_round_what_the_model_returns(monkeypatch, precision):
    """accelerate's own plugin and policy."""
    from accelerate import FullyShardedDataParallelPlugin

    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    if precision != "no":
        plugin.set_mixed_precision(precision)
        before = plugin.mixed_precision_policy
        assert before.output_dtype == before.param_dtype != torch.float32  # control
    _compat.keep_float32(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)))
    if precision == "no":
        assert plugin.mixed_precision_policy is None
    else:
        after = plugin.mixed_precision_policy
        assert after.output_dtype is None
        assert (after.param_dtype, after.reduce_dtype) == (before.param_dtype, torch.float32)
    _compat.keep_float32(SimpleNamespace(state=SimpleNamespace()))  # no FSDP


@pytest.mark.parametrize(
    ("fsdp2", "chosen", "expected"),
    [(True, None, True), (True, {"sync_each_batch": False}, None), (False, None, None)],
)
def test_gradients_are_reduced_in_every_micro_batch_of_fsdp2_unless_the_user_says_otherwise(fsdp2, chosen, expected):
    kept = {}
    accelerator = SimpleNamespace(is_fsdp2=fsdp2, gradient_state=SimpleNamespace(plugin_kwargs=kept))
    args = SimpleNamespace(accelerator_config=SimpleNamespace(gradient_accumulation_kwargs=chosen))
    _compat.keep_gradients_sharded(accelerator, args)
    assert kept.get("sync_each_batch") is expected
