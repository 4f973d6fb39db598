"""What FSDP's settings become, and what stays float32."""

from types import SimpleNamespace

import pytest
import torch

from qarl_trl._compat import sharding


@pytest.mark.parametrize(
    ("environment", "plugin", "version", "offloads"),
    [
        # The environment, `args.fsdp` as transformers reads it, and what comes of the two.
        ({}, None, None, None),
        ({"ACCELERATE_USE_FSDP": "false"}, None, None, None),
        # `accelerate launch` without a version starts FSDP1.
        ({"ACCELERATE_USE_FSDP": "true"}, None, 1, False),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, None, 2, True),
        ({}, {"fsdp_version": 2}, 2, None),
    ],
)
def test_fsdp_is_set_by_the_launcher_or_the_arguments(monkeypatch, environment, plugin, version, offloads):
    # The tests themselves may run under a launcher.
    for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "FSDP_OFFLOAD_PARAMS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    settings = sharding.fsdp_settings(SimpleNamespace(fsdp_plugin_args=plugin)) or {}

    assert settings.get("fsdp_version") == version
    assert settings.get("cpu_offload") == offloads


@pytest.fixture
def fsdp2_plugin(monkeypatch):
    """accelerate's own, with its own policy for mixed precision."""
    from accelerate import FullyShardedDataParallelPlugin

    # As `accelerate launch` sets it.
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    return FullyShardedDataParallelPlugin(fsdp_version=2)


def keep_float32(plugin) -> None:
    state = SimpleNamespace(fsdp_plugin=plugin, deepspeed_plugin=None)
    sharding.keep_float32(SimpleNamespace(state=state))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_fsdp2_does_not_round_what_the_model_returns(fsdp2_plugin, precision):
    fsdp2_plugin.set_mixed_precision(precision)
    before = fsdp2_plugin.mixed_precision_policy
    # Control: left alone, accelerate rounds all outputs. Around -3 bfloat16 log-probs are 0.016 apart.
    assert before.output_dtype == before.param_dtype != torch.float32

    keep_float32(fsdp2_plugin)

    after = fsdp2_plugin.mixed_precision_policy
    assert after.output_dtype is None
    # The forward still computes in 16 bits: only what leaves the model and what is summed over processes is float32.
    assert after.param_dtype == before.param_dtype
    assert after.reduce_dtype == torch.float32


def test_fsdp2_without_mixed_precision_is_left_alone(fsdp2_plugin):
    keep_float32(fsdp2_plugin)

    assert fsdp2_plugin.mixed_precision_policy is None


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_reduces_and_sums_gradients_in_float32_in_every_stage(stage):
    config = {"zero_optimization": {"stage": stage}}
    plugin = SimpleNamespace(zero_stage=stage, deepspeed_config=config)
    state = SimpleNamespace(fsdp_plugin=None, deepspeed_plugin=plugin)

    sharding.keep_float32(SimpleNamespace(state=state))

    assert config["communication_data_type"] == "fp32"
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}


def test_what_the_user_chose_for_deepspeed_stays():
    config = {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"}}
    plugin = SimpleNamespace(zero_stage=2, deepspeed_config=dict(config))
    state = SimpleNamespace(fsdp_plugin=None, deepspeed_plugin=plugin)

    sharding.keep_float32(SimpleNamespace(state=state))

    assert plugin.deepspeed_config == config


@pytest.mark.parametrize(
    ("fsdp2", "chosen", "expected"),
    # The controls: what the user chose stays, also a False, and without FSDP2 nothing is set.
    [(True, None, True), (True, {"sync_each_batch": False}, None), (False, None, None)],
)
def test_gradients_are_reduced_in_every_micro_batch_of_fsdp2_unless_the_user_says_otherwise(fsdp2, chosen, expected):
    kept = {}
    accelerator = SimpleNamespace(is_fsdp2=fsdp2, gradient_state=SimpleNamespace(plugin_kwargs=kept))
    args = SimpleNamespace(accelerator_config=SimpleNamespace(gradient_accumulation_kwargs=chosen))

    sharding.keep_gradients_sharded(accelerator, args)

    assert kept.get("sync_each_batch") is expected
