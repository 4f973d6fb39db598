"""`qarl_trl.validate.memory`: a model that the machine's memory does not hold."""

import psutil
import pytest
from configs import config

from qarl_trl import QaRLTrainer
from qarl_trl.validate import check_run, config_of, memory, skeleton
from qarl_trl.validate.memory import available_memory, check_host_memory


def test_a_model_that_the_host_cannot_hold_is_refused_before_it_loads(tmp_path, monkeypatch, tiny_model):
    """Eight processes with a copy each; the kernel would kill one of them without a word."""
    path = str(tmp_path / "model")
    tiny_model(num_hidden_layers=1).save_pretrained(path)
    args = config(tmp_path)
    args_in_bfloat16 = config(tmp_path, model_init_kwargs={"dtype": "bfloat16"})
    model_config = config_of(path, args)
    one_copy = 4 * sum(param.numel() for param in skeleton(model_config, args).parameters())  # bytes
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")

    monkeypatch.setattr(memory, "available_memory", lambda: 8 * one_copy - 1)
    with pytest.raises(ValueError, match="8 processes of this machine hold the model in float32.*fsdp2.yaml"):
        QaRLTrainer(path, reward_funcs=[], args=args)
    check_run(path, args, {})  # control: a server holds no master weights

    monkeypatch.setattr(memory, "available_memory", lambda: 4 * one_copy)
    check_host_memory(model_config, args_in_bfloat16)

    # With FSDP one process reads the weights for all.
    monkeypatch.setattr(memory, "is_fsdp_enabled", lambda: True)
    check_host_memory(model_config, args)


def test_free_memory_is_that_of_the_machine_or_its_control_group(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CGROUP_LIMIT", limit)

    without_group = available_memory()
    assert 2**26 < without_group <= psutil.virtual_memory().total

    limit.write_text("max\n")
    assert available_memory() > 4096

    limit.write_text("4096\n")
    assert available_memory() == 4096
