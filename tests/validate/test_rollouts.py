"""`qarl_trl.validate.rollouts`: engines that would hang or fail late, and trainers without an engine."""

from types import SimpleNamespace

import pytest
from datasets import Dataset

from qarl_trl import LowBitSFTConfig, QaRLConfig
from qarl_trl.validate import check_data
from qarl_trl.validate.rollouts import check_processes


def settings(**changes):
    """The settings of a run on one process with an engine of its own."""
    of_one_process = {
        "world_size": 1,
        "has_engine": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": False,
        "vllm_tensor_parallel_size": 1,
        "sync_folder": "f",
    }
    return SimpleNamespace(**of_one_process | changes)


@pytest.mark.parametrize(
    # The three ways in which processes wait for each other at each call of an engine.
    "changes",
    [{"vllm_mode": "server"}, {"vllm_enable_sleep_mode": True}, {"vllm_tensor_parallel_size": 2}],
)
@pytest.mark.parametrize("trainer_arguments", [{"tools": [len]}, {"environment_factory": dict}])
def test_tools_of_several_processes_need_an_engine_each(changes, trainer_arguments):
    with pytest.raises(ValueError, match="Tools with several processes need an engine for each"):
        check_processes(settings(world_size=2, **changes), trainer_arguments)

    # Controls: one process, an engine for each, and no tools.
    check_processes(settings(world_size=1, **changes), trainer_arguments)
    check_processes(settings(world_size=2), trainer_arguments)
    check_processes(settings(world_size=2, **changes), {"tools": []})


def test_a_server_takes_no_images():
    # The name of the column decides. Nothing decodes the image.
    data = Dataset.from_dict({"prompt": ["a"], "image": ["b"]})
    server = settings(vllm_mode="server")

    with pytest.raises(ValueError, match="takes text only, got .'image'. in eval_dataset"):
        check_processes(server, {"eval_dataset": {"x": data}})

    # Controls: no images, and no server.
    check_processes(server, {})
    check_processes(settings(), {"eval_dataset": {"x": data}})


def test_a_server_needs_a_folder():
    with pytest.raises(ValueError, match=r"vllm_mode='server' needs sync_folder"):
        check_processes(settings(vllm_mode="server", sync_folder=None), {})

    check_processes(settings(vllm_mode="colocate", sync_folder=None), {})  # control


def test_a_trainer_without_settings_of_an_engine_has_no_rollouts_to_check():
    without_engine = SimpleNamespace(world_size=2, has_engine=False)

    # Supervised fine-tuning has these columns and arguments as well, and no engine that they could stop.
    check_processes(without_engine, {"tools": [len], "train_dataset": Dataset.from_dict({"image": ["b"]})})
    check_data({"train_dataset": Dataset.from_dict({"prompt": ["a"]})}, without_engine)


def test_prompts_are_not_handed_out_by_the_first_process(tmp_path):
    handed_out = {"accelerator_config": {"dispatch_batches": True}}

    with pytest.raises(ValueError, match="dispatch_batches must be false, got true"):
        check_processes(QaRLConfig(str(tmp_path), use_cpu=True, bf16=False, **handed_out), {})

    # Controls: TRL's default, and a trainer whose batches are tensors.
    check_processes(QaRLConfig(str(tmp_path), use_cpu=True, bf16=False), {})
    check_processes(LowBitSFTConfig(str(tmp_path), use_cpu=True, bf16=False, **handed_out), {})
