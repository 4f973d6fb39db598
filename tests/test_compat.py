"""`qarl_trl._compat`: windows of versions, and what FSDP's settings become."""

from types import SimpleNamespace

import pytest
import torch

from qarl_trl import _compat


@pytest.mark.parametrize("package", ["trl", "compressed-tensors", "vllm", "peft"])
@pytest.mark.parametrize(
    ("version", "accepted"), [("0.0.1", False), ("{low}", True), ("{low}+cpu", True), ("99.0", False)]
)
def test_a_version_outside_its_window_is_refused(monkeypatch, package, version, accepted):
    window = _compat.requirements()[package].specifier
    low = next(bound.version for bound in window if bound.operator == ">=")
    monkeypatch.setattr(_compat, "installed_version", lambda name: version.format(low=low))
    if accepted:
        return _compat.check_versions(package)
    with pytest.raises(ImportError) as error:
        _compat.check_versions(package)
    assert f"{package} {version} is installed" in str(error.value)
    assert f"pip install '{package}{window}'" in str(error.value)


def test_images_and_token_types_are_no_text():
    """They are never packed."""
    text = {"model": 1, "input_ids": 1, "attention_mask": 1, "logits_to_keep": 1, "batch_size": 1}
    assert _compat.is_text(text | {"pixel_values": None})
    assert not any(_compat.is_text(text | {name: 1}) for name in ("pixel_values", "mm_token_type_ids", "new"))


# FSDP ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "plugin", "version", "offloads"),
    [
        ({}, None, None, None),
        ({"ACCELERATE_USE_FSDP": "false"}, None, None, None),
        ({"ACCELERATE_USE_FSDP": "true"}, None, 1, False),  # accelerate's default
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, None, 2, True),
        ({}, {"fsdp_version": 2}, 2, None),
    ],
)
def test_fsdp_is_set_by_the_launcher_or_the_arguments(monkeypatch, environment, plugin, version, offloads):
    for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "FSDP_OFFLOAD_PARAMS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = _compat.fsdp_settings(SimpleNamespace(fsdp_plugin_args=plugin)) or {}
    assert (found.get("fsdp_version"), found.get("cpu_offload")) == (version, offloads)


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
    _compat.keep_float32(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin, deepspeed_plugin=None)))
    if precision == "no":
        assert plugin.mixed_precision_policy is None
    else:
        after = plugin.mixed_precision_policy
        assert after.output_dtype is None
        assert (after.param_dtype, after.reduce_dtype) == (before.param_dtype, torch.float32)


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
