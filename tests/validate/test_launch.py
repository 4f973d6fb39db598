"""`qarl_trl.validate.launch`: what a launcher and the environment set beside the settings."""

import pytest

from qarl_trl import LowBitDistillationConfig, LowBitSFTConfig, QaRLConfig
from qarl_trl.validate import check_arguments
from qarl_trl.validate.launch import check_launch


def settings(tmp_path, kind=QaRLConfig, **changes):
    return kind(str(tmp_path), use_cpu=True, bf16=False, **changes)


@pytest.mark.parametrize("kind", [QaRLConfig, LowBitDistillationConfig, LowBitSFTConfig])
@pytest.mark.parametrize(
    ("name", "value", "needed"), [("split_batches", True, "false"), ("even_batches", False, "true")]
)
def test_processes_get_whole_batches_and_as_many(kind, name, value, needed, tmp_path, monkeypatch):
    """
    TRL's sampler repeats prompts for whole batches: half of them would be trained on twice, and half never. And a
    process with a batch less than another ends, and leaves the other waiting.
    """
    args = settings(tmp_path, kind, accelerator_config={name: value})
    check_launch(args)  # control: one process splits nothing

    monkeypatch.setattr(kind, "world_size", 2)
    with pytest.raises(ValueError, match=f"{name} must be {needed} with several processes, got {str(value).lower()}"):
        check_launch(args)
    if name == "even_batches":
        args.dataloader_drop_last = True
        check_launch(args)  # control: no batch is incomplete


@pytest.mark.parametrize("kind", [QaRLConfig, LowBitSFTConfig])
def test_checkpoints_of_other_nodes_would_have_no_weights(kind, tmp_path, monkeypatch):
    args = settings(tmp_path, kind, save_on_each_node=True)
    check_launch(args)  # control: one process is one node

    monkeypatch.setattr(kind, "world_size", 2)
    with pytest.raises(ValueError, match="save_on_each_node must be false, got true: transformers writes weights on"):
        check_launch(args)


def test_updates_have_the_micro_batches_of_the_field(tmp_path):
    """transformers would write the other number into the field, after all that was computed from it."""
    for steps, field in ((4, 1), (4, 4), (1, 4), (None, 1)):
        accumulating = {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": steps}}}
        args = settings(tmp_path, gradient_accumulation_steps=field, steps_per_generation=4, **accumulating)
        with pytest.raises(ValueError, match=f"must not have num_steps, got {steps}: set gradient_accumulation_steps"):
            check_launch(args)

    # Control: what transformers itself writes there.
    written = {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 1}}}
    check_launch(settings(tmp_path, gradient_accumulation_steps=1, **written))


def test_the_launchers_number_of_micro_batches_is_said_not_to_count(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    check_launch(settings(tmp_path))
    assert not caplog.text

    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    check_launch(settings(tmp_path))
    assert "does not count" in caplog.text


def test_deepspeed_of_a_launcher_has_the_micro_batches_of_the_field(tmp_path, monkeypatch):
    """transformers compares the two when the model has loaded."""
    args = settings(tmp_path, gradient_accumulation_steps=4, steps_per_generation=4)
    args.deepspeed_plugin = object()
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    with pytest.raises(ValueError, match="must be 1, as the launcher has it for DeepSpeed, got 4"):
        check_launch(args)

    # Controls: a file of DeepSpeed's own, and the same number.
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "zero3.json")
    check_launch(args)
    monkeypatch.delenv("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    check_launch(args)


def test_no_variable_quantizes_the_inputs_of_the_engine_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
    # Controls: nothing is quantized, or there is no engine.
    check_launch(settings(tmp_path, use_vllm=True, quant_scheme="none"))
    check_launch(settings(tmp_path))

    with pytest.raises(ValueError, match="VLLM_MARLIN_INPUT_DTYPE must not be set, got int8"):
        check_launch(settings(tmp_path, use_vllm=True))


def test_tf32_that_an_engine_in_the_process_takes_back_is_said(tmp_path, monkeypatch, caplog):
    def said(**changes):
        args = settings(tmp_path, **changes)
        # transformers itself refuses it without a GPU.
        args.tf32 = True
        caplog.clear()
        check_launch(args)
        return "tf32=True does not count" in caplog.text

    colocated = {"use_vllm": True, "vllm_mode": "colocate"}
    assert said(**colocated)
    # Controls: no engine, one in processes of its own, and one that is told so, too.
    assert not said()
    assert not said(use_vllm=True, vllm_mode="server", sync_folder="syncs")
    monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "high")
    assert not said(**colocated)


def test_a_trainer_asks_before_its_model_loads(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
    with pytest.raises(ValueError, match="VLLM_MARLIN_INPUT_DTYPE"):
        check_arguments("no/such-model", settings(tmp_path, use_vllm=True), {})
