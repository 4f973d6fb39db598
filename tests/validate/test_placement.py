"""`qarl_trl.validate.placement`: devices and shards that low-bit layers do not work with."""

import inspect
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from accelerate.state import AcceleratorState
from configs import config
from conftest import make_model
from peft import LoraConfig

from qarl_trl import QaRLTrainer
from qarl_trl.export import save_low_bit
from qarl_trl.quant import apply_quantization
from qarl_trl.validate import check_arguments
from qarl_trl.validate.source import find_source


def launch(monkeypatch, args, sharding):
    """Make a run look as if `accelerate launch` had started it with FSDP of a version, or with DeepSpeed ZeRO-3."""
    if sharding == "zero3":
        # Of the plugin the checks read the stage. The real one needs DeepSpeed.
        args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    else:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_VERSION", sharding)


def refusal(words):
    """A context in which a `ValueError` must match `words`; with `None` there must be no error."""
    if words is None:
        return nullcontext()
    return pytest.raises(ValueError, match=words)


def test_one_process_with_several_gpus_is_refused_before_a_model_loads(tmp_path, monkeypatch):
    """TRL's device_map="auto" would spread the model over them."""
    args = config(tmp_path)

    # A property that counts the devices of this machine.
    monkeypatch.setattr(type(args), "n_gpu", 4)
    with pytest.raises(ValueError, match="one GPU, got 4.*accelerate launch"):
        QaRLTrainer("no/such-model", reward_funcs=[], args=args)

    monkeypatch.setattr(type(args), "n_gpu", 1)
    check_arguments("no/such-model", args, {})  # control


@pytest.mark.parametrize(
    ("sharding", "scheme", "words"),
    [
        ("1", "W4A16", "FSDP1"),
        ("2", "NVFP4A16", "global scale"),
        ("zero3", "NVFP4A16", "global scale"),
        # Controls: what is sharded by whole groups, and a run that quantizes nothing.
        ("zero3", "W4A16", None),
        ("2", "W4A16", None),
        ("1", "none", None),
    ],
)
def test_shards_that_cannot_be_quantized_are_refused(tmp_path, monkeypatch, sharding, scheme, words):
    args = config(tmp_path, quant_scheme=scheme)
    check_arguments("org/model", args, {})  # control: one process

    # After the control, because the environment stays until the test ends.
    launch(monkeypatch, args, sharding)

    with refusal(words):
        check_arguments("org/model", args, {})


@pytest.fixture(scope="module")
def nvfp4_model(tmp_path_factory):
    """The folder of a model in NVFP4A16."""
    model = apply_quantization(make_model(num_hidden_layers=1), "NVFP4A16")
    return str(save_low_bit(model, None, tmp_path_factory.mktemp("nvfp4")))


@pytest.mark.parametrize("sharding", ["2", "zero3"])
@pytest.mark.parametrize(("scheme", "words"), [("checkpoint", "global scale"), ("W4A16", None)])
def test_a_checkpoint_that_cannot_be_sharded_is_refused(nvfp4_model, tmp_path, monkeypatch, sharding, scheme, words):
    """Each of q, k, v would be synced with a scale of its own, and the learner multiplies with one for all."""
    args = config(tmp_path, quant_scheme=scheme)
    assert find_source(nvfp4_model, args) is not None  # control: one process

    launch(monkeypatch, args, sharding)
    # The settings do not name the scheme.
    check_arguments(nvfp4_model, args, {})

    with refusal(words):
        find_source(nvfp4_model, args)


def test_shards_on_the_cpu_are_refused(tmp_path, monkeypatch):
    args = config(tmp_path)
    launch(monkeypatch, args, "2")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")

    with pytest.raises(ValueError, match=r"fsdp_offload_params must be false"):
        check_arguments("org/model", config(tmp_path), {})

    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    check_arguments("org/model", config(tmp_path), {})  # control


@pytest.mark.parametrize(
    ("sharding", "words"),
    [("1", "Use FSDP2"), ("2", None), ("zero3", "lora_base='frozen' runs on one process, DDP or FSDP2")],
)
def test_a_frozen_base_has_no_shards_but_those_of_fsdp2(tmp_path, monkeypatch, sharding, words):
    args = config(tmp_path, lora_base="frozen")
    adapter = {"peft_config": LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")}
    check_arguments("model", args, adapter)  # control: one process, or DDP, which looks the same here

    launch(monkeypatch, args, sharding)

    with refusal(words):
        check_arguments("model", args, adapter)


@pytest.mark.parametrize(("processes", "words"), [(2, r"FSDP2 needs GPUs.*DDP.*torchrun"), (1, None)])
def test_shards_of_several_cpus_are_refused(tmp_path, monkeypatch, processes, words):
    """One process has nothing to shard."""
    args = config(tmp_path)
    launch(monkeypatch, args, "2")
    # A property, so the class is patched.
    monkeypatch.setattr(type(args), "world_size", processes)

    with refusal(words):
        check_arguments("org/model", args, {})

    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    check_arguments("org/model", args, {})  # control: DDP


def test_accelerate_still_ignores_shards_on_cpus():
    """Why they are refused. If this fails, accelerate shards on CPUs, and the refusal can go."""
    # accelerate has no function that says so: the list of the kinds that take an FSDP plugin is in the constructor.
    source = inspect.getsource(AcceleratorState.__init__)
    begin = source.index("DistributedType.MULTI_GPU,")
    kinds = source[begin : source.index("]", begin)]

    assert "DistributedType.FSDP" in source
    assert "MULTI_XPU" in kinds
    assert "MULTI_CPU" not in kinds


@pytest.mark.parametrize("sharding", ["2", "zero3"])
def test_matrices_are_not_kept_beside_shards(tmp_path, monkeypatch, sharding):
    args = config(tmp_path, quant_keep_matrices=True)
    check_arguments("org/model", args, {})  # control: one process

    launch(monkeypatch, args, sharding)

    with pytest.raises(ValueError, match="quant_keep_matrices must be false"):
        check_arguments("org/model", args, {})


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"TP": "2"}, "must not be tensor-parallel"),
        ({"CP": "2"}, "cp_size and sp_size must be 1 with rollouts"),
        ({"SP": "2"}, "cp_size and sp_size must be 1 with rollouts"),
        # Controls: HSDP, whose processes have whole layers and sequences of their own.
        ({"DP_REPLICATE": "2", "DP_SHARD": "2"}, None),
        ({}, None),
    ],
)
def test_a_learner_that_is_cut_within_layers_or_sequences_is_refused(tmp_path, monkeypatch, sizes, words):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    for name, size in sizes.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}_SIZE", size)
    args = config(tmp_path)

    with refusal(words):
        check_arguments("org/model", args, {})

    check_arguments("org/model", config(tmp_path, quant_scheme="none"), {})  # TRL's own business


def test_a_model_that_transformers_would_cut_is_refused(tmp_path):
    args = config(tmp_path, model_init_kwargs={"tp_plan": "auto"})

    with refusal("must not be tensor-parallel"):
        check_arguments("org/model", args, {})
