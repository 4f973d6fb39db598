"""`qarl_trl._compat_fsdp`: how a run is sharded, and log-probs that are not rounded on the way out."""

from types import SimpleNamespace

import pytest
import torch

from qarl_trl import _compat_fsdp


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
    assert _compat_fsdp.fsdp_version(SimpleNamespace(fsdp_plugin_args=plugin)) == version


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
    _compat_fsdp.keep_log_probs_float32(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)))
    if precision == "no":
        assert plugin.mixed_precision_policy is None
    else:
        after = plugin.mixed_precision_policy
        assert after.output_dtype is None
        assert (after.param_dtype, after.reduce_dtype) == (before.param_dtype, before.reduce_dtype)
    _compat_fsdp.keep_log_probs_float32(SimpleNamespace(state=SimpleNamespace()))  # no FSDP
