"""`qarl_trl.validate.launch`: what a launcher and the environment set beside the settings."""

import pytest

from qarl_trl import LowBitDistillationConfig, LowBitSFTConfig, QaRLConfig
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


def test_updates_have_the_micro_batches_of_the_field(tmp_path):
    """transformers would write the other number into the field, after all that was computed from it."""
    accumulating = {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}}
    with pytest.raises(ValueError, match="must not have num_steps, got 4: set gradient_accumulation_steps"):
        check_launch(settings(tmp_path, **accumulating))

    # Control: twice the same.
    check_launch(settings(tmp_path, gradient_accumulation_steps=4, steps_per_generation=4, **accumulating))


def test_the_launchers_number_of_micro_batches_is_said_not_to_count(tmp_path, monkeypatch, caplog):
    # Of every launch without the option.
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    check_launch(settings(tmp_path))
    assert not caplog.text

    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    check_launch(settings(tmp_path))
    assert "does not count" in caplog.text


def test_no_variable_quantizes_the_inputs_of_the_engine_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
    # Controls: nothing is quantized, or there is no engine.
    check_launch(settings(tmp_path, use_vllm=True, quant_scheme="none"))
    check_launch(settings(tmp_path))

    with pytest.raises(ValueError, match="VLLM_MARLIN_INPUT_DTYPE must not be set, got int8"):
        check_launch(settings(tmp_path, use_vllm=True))


def test_tf32_that_an_engine_in_the_process_takes_back_is_refused(tmp_path, monkeypatch):
    # transformers itself refuses it without a GPU.
    with_engine = settings(tmp_path, use_vllm=True, vllm_mode="colocate")
    with_engine.tf32 = True
    with pytest.raises(ValueError, match="tf32 must be left out beside a colocated engine.*VLLM_FLOAT32_MATMUL"):
        check_launch(with_engine)

    # Controls: no engine, and one that is told so, too.
    without = settings(tmp_path)
    without.tf32 = True
    check_launch(without)
    monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "high")
    check_launch(with_engine)
