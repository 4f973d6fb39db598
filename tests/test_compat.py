"""`qarl_trl._compat`: windows of versions, which rows are text, and what FSDP's settings become."""

from types import SimpleNamespace

import pytest
import torch

from qarl_trl import _compat


# Versions -----------------------------------------------------------------------------------------------------------


PACKAGES = ("trl", "compressed-tensors", "vllm", "peft")


def window_of(package: str):
    """The versions that the project accepts, and the lowest of them."""
    window = _compat.requirements()[package].specifier
    lowest = next(bound.version for bound in window if bound.operator == ">=")
    return window, lowest


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("suffix", ["", "+cpu"])
def test_the_lowest_version_of_the_window_is_accepted(monkeypatch, package, suffix):
    _, lowest = window_of(package)
    monkeypatch.setattr(_compat, "installed_version", lambda name: lowest + suffix)

    _compat.check_versions(package)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("version", ["0.0.1", "99.0"])
def test_a_version_outside_its_window_is_refused(monkeypatch, package, version):
    window, _ = window_of(package)
    monkeypatch.setattr(_compat, "installed_version", lambda name: version)

    with pytest.raises(ImportError) as error:
        _compat.check_versions(package)

    assert f"{package} {version} is installed" in str(error.value)
    assert f"pip install '{package}{window}'" in str(error.value)


# Packed rows --------------------------------------------------------------------------------------------------------


def test_images_and_token_types_are_no_text():
    """They are never packed."""
    text = {"model": 1, "input_ids": 1, "attention_mask": 1, "logits_to_keep": 1, "batch_size": 1}

    assert _compat.is_text(text | {"pixel_values": None})
    for name in ("pixel_values", "mm_token_type_ids", "new"):
        assert not _compat.is_text(text | {name: 1})


# FSDP ---------------------------------------------------------------------------------------------------------------


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

    settings = _compat.fsdp_settings(SimpleNamespace(fsdp_plugin_args=plugin)) or {}

    assert settings.get("fsdp_version") == version
    assert settings.get("cpu_offload") == offloads


@pytest.fixture
def fsdp2_plugin(monkeypatch):
    """accelerate's own, with its own policy for mixed precision."""
    from accelerate import FullyShardedDataParallelPlugin

    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    return FullyShardedDataParallelPlugin(fsdp_version=2)


def keep_float32(plugin) -> None:
    state = SimpleNamespace(fsdp_plugin=plugin, deepspeed_plugin=None)
    _compat.keep_float32(SimpleNamespace(state=state))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_fsdp2_does_not_round_what_the_model_returns(fsdp2_plugin, precision):
    fsdp2_plugin.set_mixed_precision(precision)
    before = fsdp2_plugin.mixed_precision_policy
    assert before.output_dtype == before.param_dtype != torch.float32  # control

    keep_float32(fsdp2_plugin)

    after = fsdp2_plugin.mixed_precision_policy
    assert after.output_dtype is None
    assert after.param_dtype == before.param_dtype
    assert after.reduce_dtype == torch.float32


def test_fsdp2_without_mixed_precision_is_left_alone(fsdp2_plugin):
    keep_float32(fsdp2_plugin)

    assert fsdp2_plugin.mixed_precision_policy is None


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
