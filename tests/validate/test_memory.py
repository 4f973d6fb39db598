"""`qarl_trl.validate.memory`: a model that the machine's memory does not hold."""

from contextlib import nullcontext
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate import DistributedType
from configs import config
from conftest import make_tokenizer
from slow.toys import stored_tensors
from toy_runs import adapter
from trainers.runs import pairs, settings

from qarl_trl import LowBitDistillationConfig, LowBitDistillationTrainer, QaRLTrainer
from qarl_trl.export import save_low_bit
from qarl_trl.quant import apply_quantization
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
    # Processes of one machine, as `torchrun` names them. Each would load a copy.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")

    # One byte too few.
    monkeypatch.setattr(memory, "available_memory", lambda: 8 * one_copy - 1)
    with pytest.raises(ValueError, match="8 processes of this machine hold the model in float32.*fsdp2.yaml"):
        QaRLTrainer(path, reward_funcs=[], args=args)
    check_run(path, args, {})  # control: a server holds no master weights

    # Half of it is enough for bfloat16, exactly.
    monkeypatch.setattr(memory, "available_memory", lambda: 4 * one_copy)
    check_host_memory(model_config, args_in_bfloat16)

    # With FSDP one process reads the weights for all.
    monkeypatch.setattr(memory, "is_fsdp_enabled", lambda: True)
    check_host_memory(model_config, args)


def test_a_quantized_checkpoint_is_decompressed_beside_the_model(tmp_path, monkeypatch, tiny_model):
    path = str(tmp_path / "model")
    save_low_bit(apply_quantization(tiny_model(num_hidden_layers=1), "W4A16"), make_tokenizer(), path)
    args = config(tmp_path / "run", quant_scheme="checkpoint")
    bfloat16 = config(tmp_path / "run", quant_scheme="checkpoint", model_init_kwargs={"dtype": "bfloat16"})
    number = sum(param.numel() for param in skeleton(config_of(path, args), args).parameters())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")

    def refused(free, args):
        monkeypatch.setattr(memory, "available_memory", lambda: free)
        try:
            check_run(path, args, {"train_dataset": None})
        except ValueError as error:
            return str(error)
        return None

    words = "8 processes of this machine hold the model in float32 and its decompressed checkpoint"
    assert words in refused(8 * (4 + 2) * number - 1, args)
    assert refused(8 * (4 + 2) * number, args) is None  # control

    # The decompressed weights are the model's.
    assert "hold the model in bfloat16." in refused(8 * 2 * number - 1, bfloat16)
    assert refused(8 * 2 * number, bfloat16) is None

    # The only GPU of a run gets the model after it was made on the CPU, while a file would load onto it.
    model_config = config_of(path, args)
    with monkeypatch.context() as patched:
        patched.setattr(type(args), "device", torch.device("cuda"))
        patched.setattr(memory, "available_memory", lambda: 1)
        check_host_memory(model_config, args)
        with pytest.raises(ValueError, match="the model in float32 and its decompressed checkpoint"):
            check_host_memory(model_config, args, is_quantized=True)

    # ZeRO-3 cuts the model while it loads, and each process has decompressed a whole checkpoint before.
    args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    monkeypatch.setattr(memory, "available_memory", lambda: 8 * 2 * number - 1)
    check_host_memory(model_config, args)
    with pytest.raises(ValueError, match="8 processes of this machine hold its decompressed checkpoint"):
        check_host_memory(model_config, args, is_quantized=True)
    monkeypatch.setattr(memory, "available_memory", lambda: 8 * 2 * number)
    check_host_memory(model_config, args, is_quantized=True)


def test_the_dtype_auto_counts_as_that_of_the_checkpoint(tmp_path, monkeypatch, tiny_model):
    path = str(tmp_path / "model")
    tiny_model(num_hidden_layers=1).bfloat16().save_pretrained(path)
    args = config(tmp_path, model_init_kwargs={"dtype": "auto"})
    model_config = config_of(path, args)
    in_bfloat16 = 2 * sum(param.numel() for param in skeleton(model_config, args).parameters())  # bytes

    monkeypatch.setattr(memory, "available_memory", lambda: in_bfloat16)
    check_host_memory(model_config, args)

    # Controls: one byte too few, and a config that does not say its dtype.
    monkeypatch.setattr(memory, "available_memory", lambda: in_bfloat16 - 1)
    with pytest.raises(ValueError, match="hold the model in bfloat16"):
        check_host_memory(model_config, args)
    monkeypatch.setattr(memory, "available_memory", lambda: in_bfloat16)
    model_config.dtype = None
    with pytest.raises(ValueError, match="hold the model in float32"):
        check_host_memory(model_config, args)


@pytest.mark.parametrize(
    ("changes", "distributed_type", "needs_the_host"),
    [
        ({}, DistributedType.NO, False),
        # Several processes, and a place of the user's own.
        ({}, DistributedType.MULTI_GPU, True),
        ({"model_init_kwargs": {"device_map": None}}, DistributedType.NO, True),
    ],
)
def test_what_trl_loads_onto_the_only_gpu_needs_no_room_on_the_host(
    tmp_path, monkeypatch, tiny_model, changes, distributed_type, needs_the_host
):
    path = str(tmp_path / "model")
    tiny_model(num_hidden_layers=1).save_pretrained(path)
    args = config(tmp_path, **changes)
    model_config = config_of(path, args)
    monkeypatch.setattr(memory, "available_memory", lambda: 1)
    with pytest.raises(ValueError, match="1 processes of this machine"):
        check_host_memory(model_config, args)  # control: on a CPU

    monkeypatch.setattr(type(args), "device", torch.device("cuda"))
    monkeypatch.setattr(args.distributed_state, "distributed_type", distributed_type)
    monkeypatch.setattr(args.distributed_state, "wait_for_everyone", lambda: None)  # there is one process
    with pytest.raises(ValueError, match="1 processes") if needs_the_host else nullcontext():
        check_host_memory(model_config, args)


def test_a_teacher_loads_beside_the_model(tmp_path, monkeypatch, tiny_model):
    model = str(tmp_path / "model")
    tiny_model(num_hidden_layers=1).save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    in_bfloat16 = str(tmp_path / "teacher")
    # Larger than the model and in bfloat16, so that neither its size nor its dtype can be taken for the model's.
    tiny_model(num_hidden_layers=4).bfloat16().save_pretrained(in_bfloat16)

    def refused(free, teacher=None, peft_config=None, **changes):
        """What a distillation says on a machine with so many free bytes; `None` if it goes on to load."""
        monkeypatch.setattr(memory, "available_memory", lambda: free)
        values = settings(tmp_path / "run", distill_on="answers", max_completion_length=8) | changes
        args = LowBitDistillationConfig(**values)
        try:
            LowBitDistillationTrainer(model, teacher, args, pairs(), peft_config=peft_config)
        except ValueError as error:
            return str(error)
        return None

    # Bytes: 4 a parameter in float32, 2 in bfloat16.
    of_model = 4 * parameters(model)
    both = of_model + 2 * parameters(in_bfloat16)
    words = "1 processes of this machine hold the model in float32 and its teacher in bfloat16."
    assert words in refused(both - 1, in_bfloat16)
    assert refused(both, in_bfloat16) is None  # control

    # Its own start, and a teacher in another dtype than its checkpoint.
    assert "the model in float32 and its teacher in float32." in refused(2 * of_model - 1)
    assert refused(2 * of_model) is None
    halved = {"teacher_model_init_kwargs": {"dtype": "bfloat16"}}
    assert "its teacher in bfloat16." in refused(of_model + of_model // 2 - 1, **halved)
    assert refused(of_model + of_model // 2, **halved) is None

    # A base that teaches is one model; a frozen one loads in pieces, and its teacher does not.
    assert refused(of_model, peft_config=adapter()) is None
    assert "hold its teacher in float32." in refused(of_model - 1, peft_config=adapter(), lora_base="frozen")
    assert refused(of_model, peft_config=adapter(), lora_base="frozen") is None


def parameters(path):
    """The number of parameters of a model on disk."""
    return sum(tensor.numel() for tensor in stored_tensors(path).values())


def test_free_memory_is_that_of_the_machine_or_its_control_group(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CGROUP_LIMIT", limit)

    without_group = available_memory()
    # Control: a plausible number, not one of the files below.
    assert 2**26 < without_group <= psutil.virtual_memory().total

    limit.write_text("max\n")
    assert available_memory() > 4096

    limit.write_text("4096\n")
    assert available_memory() == 4096
