"""Which checkpoint a run resumes from: decided before a model loads, and never one that is cut off."""

import dataclasses
import errno
import json
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import disk_offload
from configs import config
from datasets import Dataset
from huggingface_hub import constants
from peft import LoraConfig
from slow.toys import forge
from test_train import base, problems  # noqa: F401
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import BitsAndBytesConfig, PretrainedConfig
from trl import SFTConfig

from qarl_trl import LowBitDistillationConfig, LowBitSFTConfig, cli
from qarl_trl.checkpoints.folder import INCOMING
from qarl_trl.checkpoints.identity import identity_of
from qarl_trl.checkpoints.optimizer import trained_fact
from qarl_trl.checkpoints.resume import check_start, resume_path
from qarl_trl.quant.scheme import DEFAULT_IGNORE, resolve_scheme, single_group
from qarl_trl.train import parse
from qarl_trl.trainers import LowBitConfig

from .test_folder import write


@pytest.fixture
def args(tmp_path):
    return config(tmp_path)


def cut(folder):
    """Cut off a file of a checkpoint."""
    (folder / "model.safetensors").write_text("w")


@pytest.mark.parametrize("wish", [True, "auto"])
def test_the_newest_complete_one_is_found_and_others_are_named_and_left_alone(tmp_path, args, wish, caplog):
    first, second, third = [write(tmp_path, step) for step in (1, 2, 3)]
    cut(third)
    (tmp_path / "checkpoint-4").mkdir()
    # A copy of the user's, with a larger number: it is not this run's newest.
    shutil.copytree(first, tmp_path / "checkpoint-9-keep")

    assert resume_path(wish, args) == str(second)

    log = " ".join(record.getMessage() for record in caplog.records)
    assert re.search(r"checkpoint-3 \(.*model.safetensors has 1 bytes", log)
    assert re.search(r"checkpoint-4 \(.*manifest.json is missing", log)
    assert "checkpoint-1" not in log
    assert (third / "model.safetensors").exists()
    assert (tmp_path / "checkpoint-4").exists()


# A config file gives words, a script gives Python's values.
@pytest.mark.parametrize("wish", [None, False, "false"])
def test_who_does_not_ask_does_not_resume(tmp_path, args, wish):
    write(tmp_path, 1)

    assert resume_path(wish, args) is None


def test_without_any_true_is_an_error_and_auto_starts_from_the_beginning(tmp_path, args):
    (tmp_path / INCOMING / "checkpoint-5").mkdir(parents=True)  # as after a kill in the first save

    assert resume_path("auto", args) is None
    with pytest.raises(ValueError, match=r"resume_from_checkpoint=True found no checkpoint.*'auto'"):
        resume_path(True, args)


@pytest.mark.parametrize("wish", ["true", "auto"])
def test_with_damaged_ones_alone_a_run_stops_and_says_how_to_start_over(tmp_path, args, wish):
    for step in (1, 2):
        cut(write(tmp_path, step))

    with pytest.raises(ValueError, match="only damaged.*To start over.*checkpoint-1 .*checkpoint-2 "):
        resume_path(wish, args)
    assert len(list(tmp_path.glob("checkpoint-*/model.safetensors"))) == 2


def test_an_error_while_reading_stops_a_run_and_is_not_taken_for_damage(tmp_path, args, monkeypatch):
    """As of a network file system: the run would go on from an older checkpoint, or from the beginning."""
    write(tmp_path, 1)
    newest = write(tmp_path, 2)
    stat = Path.stat

    def stale(path, **kwargs):
        # Only the newest: if that counted as damaged, the run would go on from the older one.
        if path.name == "model.safetensors" and path.parent == newest:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return stat(path, **kwargs)

    monkeypatch.setattr(Path, "stat", stale)

    with pytest.raises(OSError, match="Stale file handle.*checkpoint-2/model.safetensors"):
        resume_path("auto", args)


def test_a_path_must_be_a_whole_checkpoint_of_this_trainer(tmp_path, args):
    whole = write(tmp_path, 1)
    damaged = write(tmp_path, 2)
    cut(damaged)
    refusal = "is not a complete checkpoint of this trainer"

    assert resume_path(str(whole), args) == str(whole)
    with pytest.raises(ValueError, match=f"checkpoint-2' {refusal}: .*model.safetensors has 1 bytes, needs 7"):
        resume_path(str(damaged), args)
    with pytest.raises(ValueError, match=f"nowhere' {refusal}: .*manifest.json is miss"):
        resume_path(str(tmp_path / "nowhere"), args)


def test_what_cannot_be_continued_exactly_is_refused(tmp_path, args):
    folder = write(tmp_path, 1, model="a", world_size=4)

    with pytest.raises(ValueError, match="another run: world_size was 4 .*, and is 1"):
        resume_path("true", args, {"model": "a", "world_size": 1})
    with pytest.raises(ValueError, match="sync_ref_model"):
        resume_path("true", config(tmp_path, sync_ref_model=True, beta=0.1))
    averaged = config(tmp_path)
    averaged.teacher_model_kind = "ema"  # of TRL's SDPO
    with pytest.raises(ValueError, match="teacher_model_kind='ema' cannot be resumed"):
        resume_path("true", averaged)
    for optimizer in ("adalomo", "grokadamw", "galore_adamw_layerwise"):
        with pytest.raises(ValueError, match=f"{optimizer}.*its state is in no checkpoint"):
            resume_path("true", config(tmp_path, optim=optimizer))
    # Control: an optimizer with a state.
    assert resume_path("true", config(tmp_path, optim="galore_adamw")) == str(folder)

    (folder / "scheduler.pt").unlink()
    # A manifest without the file, as `save_only_model` leaves it.
    forge(folder)
    with pytest.raises(ValueError, match="weights without the optimizer"):
        resume_path("true", args)


def test_a_checkpoint_of_processes_that_shard_otherwise_is_refused_before_the_model_loads(tmp_path, args, monkeypatch):
    """`accelerate launch` with another file."""
    of_ddp = identity_of("a", args, None, {})
    folder = write(tmp_path, 1, **of_ddp)
    assert resume_path("true", args, of_ddp) == str(folder)  # control

    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"sharding was 'none' .*, and is 'FSDP'"):
        resume_path("true", args, identity_of("a", args, None, {}))


def test_an_adapter_of_another_scale_is_another_run(tmp_path, args):
    def identity(**changes):
        settings = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"]} | changes
        return identity_of("a", args, None, {"peft_config": LoraConfig(**settings)})

    write(tmp_path, 1, **identity(), trained="2 parameters", optimizer="AdamW")
    # Control: the same set of names.
    assert resume_path("true", args, identity(target_modules=["up_proj", "q_proj"]))

    for changes in ({"r": 8}, {"lora_alpha": 64}, {"use_rslora": True}, {"target_modules": "all-linear"}):
        # The message shows the whole adapter, and the changed field is in it.
        changed = next(iter(changes))
        with pytest.raises(ValueError, match=f"another run: adapter was .*{changed}"):
            resume_path("true", args, identity(**changes))

    # The first changes the base, which no checkpoint has. A run without quantization may have them.
    for changes in ({"init_lora_weights": "pissa"}, {"use_dora": True}, {"bias": "all"}, {"lora_dropout": 0.1}):
        changed = next(iter(changes))
        with pytest.raises(ValueError, match=f"another run: adapter was .*{changed}"):
            resume_path("true", args, identity(**changes))

    # peft would load the tensors that have a place, and leave the others out in silence.
    for changes in ({"layers_to_transform": [0]}, {"exclude_modules": ["up_proj"]}, {"modules_to_save": ["norm"]}):
        changed = next(iter(changes))
        with pytest.raises(ValueError, match=f"another run: adapter was .*{changed}"):
            resume_path("true", args, identity(**changes))

    without_adapter = identity_of("a", args, None, {})
    with pytest.raises(ValueError, match="another run: adapter was"):
        resume_path("true", args, without_adapter)


def without_its_beginning(identity):
    """The facts of a run with an adapter, as earlier versions wrote them."""
    of_now = {"init_lora_weights", "use_dora", "bias", "lora_bias", "lora_dropout"}
    (adapter,) = identity["adapter"]
    return identity | {"adapter": [{name: value for name, value in adapter.items() if name not in of_now}]}


def test_a_checkpoint_of_an_earlier_version_resumes_with_a_choice_of_layers(tmp_path, args):
    """Its manifest has neither the choice nor what was trained."""
    adapter = {"r": 4, "target_modules": ["q_proj"]}
    choice = {"layers_to_transform": [0], "modules_to_save": ["norm"], "exclude_modules": ["up_proj"]}
    earlier = without_its_beginning(identity_of("a", args, None, {"peft_config": LoraConfig(**adapter)}))
    write(tmp_path, 1, **earlier)

    assert resume_path("true", args, identity_of("a", args, None, {"peft_config": LoraConfig(**adapter, **choice)}))

    # Control: what it has is compared.
    other = identity_of("a", args, None, {"peft_config": LoraConfig(**adapter | {"r": 8}, **choice)})
    with pytest.raises(ValueError, match="another run: adapter was"):
        resume_path("true", args, other)


def test_a_checkpoint_of_an_earlier_version_resumes_with_an_adapter_of_a_run_without_quantization(tmp_path, args):
    """Its manifest has the choice of layers, and not how the adapter begins."""
    adapter = {"r": 4, "target_modules": ["q_proj"], "exclude_modules": ["up_proj"]}
    earlier = without_its_beginning(identity_of("a", args, None, {"peft_config": LoraConfig(**adapter)}))
    write(tmp_path, 1, **earlier, trained="2 parameters")

    assert resume_path("true", args, identity_of("a", args, None, {"peft_config": LoraConfig(**adapter, bias="all")}))

    # Control: the choice is compared.
    adapter["exclude_modules"] = ["gate_proj"]
    with pytest.raises(ValueError, match="another run: adapter was"):
        resume_path("true", args, identity_of("a", args, None, {"peft_config": LoraConfig(**adapter)}))


def test_a_model_that_another_library_quantizes_otherwise_is_another_run(tmp_path, args):
    in_4_bits = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}
    write(tmp_path, 1, **identity_of("a", args, None, in_4_bits))

    assert resume_path("true", args, identity_of("a", args, None, in_4_bits))
    for other in ({}, {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}):
        with pytest.raises(ValueError, match="another run: quantization_config was .*load_in_4bit"):
            resume_path("true", args, identity_of("a", args, None, other))


def test_what_is_trained_does_not_depend_on_activation_checkpointing():
    """FSDP2 wraps each layer for it. A resumed run may turn it on or off."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert "0._checkpoint_wrapped_module.weight" in dict(wrapped.named_parameters())  # the premise

    def fact(model, parameters):
        return trained_fact(torch.optim.SGD(parameters, lr=0.1), model)

    assert fact(model, model.parameters()) == fact(wrapped, wrapped.parameters())
    # Control: another order is another state.
    assert fact(model, model.parameters()) != fact(model, reversed(list(model.parameters())))


def reward_of_one(completions, **_):
    return [1.0] * len(completions)


def reward_of_two(completions, **_):
    return [2.0] * len(completions)


class RewardModel(torch.nn.Module):
    """A reward model as transformers loads it."""

    def __init__(self, name):
        super().__init__()
        self.config = SimpleNamespace(_name_or_path=name)


def test_another_reward_is_another_run(tmp_path, args):
    def identity(rewards):
        return json.loads(json.dumps(identity_of("a", args, None, {"reward_funcs": rewards})))

    # A function, and a reward model by its name.
    folder = write(tmp_path, 1, **identity([reward_of_one, "org/judge"]))
    # Controls: the same ones, also in another form.
    for same in ((reward_of_one, "org/judge"), [partial(reward_of_one, a=1), RewardModel("org/judge")]):
        assert resume_path("true", args, identity(same)) == str(folder)

    for other in (
        reward_of_one,
        [reward_of_two, "org/judge"],
        ["org/judge", reward_of_one],
        [reward_of_one, "org/other"],
        [reward_of_one, RewardModel("org/other")],
        # The class in the place of a model: it has no name.
        [reward_of_one, RewardModel],
    ):
        with pytest.raises(ValueError, match=r"another run: reward_funcs was \[.*reward_of_one', 'org/judge'\] there"):
            resume_path("true", args, identity(other))

    # An older version of this package named none.
    facts = identity(reward_of_one)
    # It cannot be compared, so it must not be refused.
    del facts["settings"]["reward_funcs"]
    older = write(tmp_path, 2, **facts)
    assert resume_path("true", args, identity(reward_of_two)) == str(older)


@pytest.mark.parametrize("argument", ["rollout_func", "tools", "environment_factory"])
def test_another_source_of_answers_is_another_run(tmp_path, args, argument):
    def identity(functions):
        # An environment brings its own reward.
        rewards = None if argument == "environment_factory" else reward_of_one
        arguments = {"reward_funcs": rewards, "rollout_func": reward_of_one} | {argument: functions}
        return json.loads(json.dumps(identity_of("a", args, None, arguments)))

    one = reward_of_one
    several = one if argument == "rollout_func" else [one]
    if argument == "environment_factory":
        several = {"first": one}
    facts = identity(several)
    folder = write(tmp_path, 1, **facts)
    assert resume_path("true", args, identity(several)) == str(folder)  # control

    for other in (None, reward_of_two):
        with pytest.raises(ValueError, match=f"another run: {argument} was"):
            resume_path("true", args, identity(other))

    # An older version of this package named none, so it cannot be compared.
    del facts["settings"][argument]
    older = write(tmp_path, 2, **facts)
    assert resume_path("true", args, identity(reward_of_two)) == str(older)


def test_other_patterns_of_routers_in_an_earlier_version_are_no_other_scheme(tmp_path, args, caplog):
    def identity(ignore):
        return identity_of("a", args, single_group(resolve_scheme("W4A16"), ["Linear"], ignore), {})

    of_earlier = ["lm_head", r"re:.*mlp\.gate$", r"re:.*\.router$", "re:.*shared_expert_gate$"]
    folder = write(tmp_path, 1, **identity(of_earlier))
    assert resume_path("true", args, identity(list(DEFAULT_IGNORE))) == str(folder)
    assert "within routers" not in caplog.text
    # Of this model the earlier patterns left out layers inside of its routers.
    (folder / "config.json").write_text('{"model_type": "gemma4_text"}')
    assert resume_path("true", args, identity(list(DEFAULT_IGNORE))) == str(folder)
    assert "trained layers within routers in low bits" in caplog.text

    # Control: another layer stays in high precision.
    with pytest.raises(ValueError, match="another run: scheme was"):
        resume_path("true", args, identity([*DEFAULT_IGNORE, "re:.*down_proj"]))


def test_another_trainer_is_another_run(tmp_path, args):
    """RLOO reads the data, the rewards and the settings of GRPO."""

    def identity(trainer):
        return identity_of("a", args, None, {}, trainer)

    folder = write(tmp_path, 1, **identity("GRPOTrainer"))

    with pytest.raises(ValueError, match="another run: trainer was 'GRPOTrainer' .*, and is 'RLOOTrainer'"):
        resume_path("true", args, identity("RLOOTrainer"))

    # Controls: the same one, and a checkpoint of an earlier version, which named none.
    assert resume_path("true", args, identity("GRPOTrainer")) == str(folder)
    facts = identity("GRPOTrainer")
    del facts["trainer"]
    older = write(tmp_path, 2, **facts)
    assert resume_path("true", args, identity("RLOOTrainer")) == str(older)


def save_pickle(folder, seed):
    """Weights as older models have them."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    torch.save(nn.Linear(64, 64).state_dict(), folder / "pytorch_model.bin")
    return str(folder)


def test_other_pickled_weights_under_the_same_name_are_another_run(tmp_path, args):
    """An adapter would go on beside a base that it was not trained with."""

    def identity(seed):
        return identity_of(save_pickle(tmp_path / "model", seed), args, None, {})

    folder = write(tmp_path, 1, **identity(0))

    assert resume_path("true", args, identity(0)) == str(folder)
    with pytest.raises(ValueError, match="another run: pickled_weights was"):
        resume_path("true", args, identity(1))

    # Controls: nobody reads them beside safetensors, and a checkpoint of an earlier version.
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    assert "pickled_weights" not in identity(1)
    (tmp_path / "model" / "model.safetensors").unlink()
    facts = identity(0)
    del facts["pickled_weights"]
    older = write(tmp_path, 2, **facts)
    assert resume_path("true", args, identity(1)) == str(older)


def test_another_teacher_under_the_same_name_is_another_run(tmp_path):
    teacher = tmp_path / "teacher"
    args = LowBitDistillationConfig(
        output_dir=str(tmp_path), teacher_model_name_or_path=str(teacher), use_cpu=True, bf16=False
    )

    def identity(content):
        teacher.mkdir(exist_ok=True)
        (teacher / "model.safetensors").write_bytes(content * 1000)
        return identity_of("a", args, None, {})

    folder = write(tmp_path, 1, **identity(b"a"))

    assert resume_path("true", args, identity(b"a")) == str(folder)
    with pytest.raises(ValueError, match="another run: teacher_files was"):
        resume_path("true", args, identity(b"b"))
    # Controls: a teacher of the Hub has no files here, and a checkpoint of an earlier version.
    args.teacher_model_name_or_path = "some/teacher"
    assert "teacher_files" not in identity(b"b")
    args.teacher_model_name_or_path = str(teacher)
    facts = identity(b"a")
    del facts["teacher_files"]
    older = write(tmp_path, 2, **facts)
    assert resume_path("true", args, identity(b"b")) == str(older)


@pytest.mark.parametrize(("role", "fact"), [("ref_model", "reference"), ("teacher_model", "loaded_teacher")])
def test_a_loaded_model_beside_the_policy_has_the_same_weights(tmp_path, args, role, fact):
    def identity(seed, dtype=torch.float32):
        torch.manual_seed(seed)
        return json.loads(json.dumps(identity_of("a", args, None, {role: nn.Linear(4, 4).to(dtype)})))

    folder = write(tmp_path, 1, **identity(0))

    with pytest.raises(ValueError, match=f"another run: {fact} was"):
        resume_path("true", args, identity(1))
    # Rounded to another dtype it is another model.
    with pytest.raises(ValueError, match=f"another run: {fact} was"):
        resume_path("true", args, identity(0, torch.bfloat16))

    # Controls: the same weights, and a checkpoint of an earlier version.
    assert resume_path("true", args, identity(0)) == str(folder)
    facts = identity(0)
    del facts[fact]
    older = write(tmp_path, 2, **facts)
    assert resume_path("true", args, identity(1)) == str(older)


class OfBuffers(nn.Module):
    """Its weights are numbers in buffers, as those of GPTQ and AWQ are."""

    def __init__(self, number):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.register_buffer("qweight", torch.full((4, 4), number, dtype=torch.int32))
        self.register_buffer("angles", torch.rand(4), persistent=False)


@pytest.mark.parametrize("role", ["ref_model", "teacher_model"])
def test_a_model_beside_the_policy_may_be_quantized(tmp_path, args, role):
    def identity(number):
        return identity_of("a", args, None, {role: OfBuffers(number)})

    folder = write(tmp_path, 1, **identity(1))

    assert resume_path("true", args, identity(1)) == str(folder)
    with pytest.raises(ValueError, match="another run"):
        resume_path("true", args, identity(2))


@pytest.mark.parametrize("role", ["ref_model", "teacher_model"])
def test_a_model_beside_the_policy_may_lie_elsewhere(tmp_path, args, role):
    """On the disk (`device_map`): nothing of it is in memory."""

    def identity(width):
        model = nn.Sequential(nn.Linear(4, width))
        disk_offload(model, str(tmp_path / f"weights-{width}"), execution_device=torch.device("cpu"))
        assert next(model.parameters()).is_meta
        return identity_of("a", args, None, {role: model})

    folder = write(tmp_path, 1, **identity(4))

    assert resume_path("true", args, identity(4)) == str(folder)
    with pytest.raises(ValueError, match="another run"):
        resume_path("true", args, identity(8))


def test_a_model_beside_the_policy_may_be_sharded(args, one_process):
    def fact(number):
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(distribute_tensor(torch.full((4, 4), number), one_process, [Shard(0)]))
        model.bias.data.zero_()
        return identity_of("a", args, None, {"ref_model": model})["reference"]

    assert fact(1.0) == fact(1.0)
    assert fact(1.0) != fact(2.0)


@pytest.fixture
def one_process(tmp_path):
    """A mesh of this process."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_reference_that_a_script_forgets_to_load_is_another_run(tmp_path, args):
    """TRL would take the start of the run."""
    loaded = identity_of("a", args, None, {"ref_model": nn.Linear(4, 4)})
    write(tmp_path, 1, **loaded)

    for named in ({}, {"ref_model": None}):
        with pytest.raises(ValueError, match="another run: reference was .*, and is 'not loaded by the script'"):
            resume_path("true", args, identity_of("a", args, None, named))

    # Control: a run that never had one.
    other = write(tmp_path, 2, **identity_of("a", args, None, {}))
    assert resume_path("true", args, identity_of("a", args, None, {"ref_model": None})) == str(other)


def put_on_hub(cache, commit):
    """A model in the cache of the Hub, whose branch is at a commit."""
    model = cache / "models--some--model"
    for folder in (model / "refs", model / "snapshots" / commit):
        folder.mkdir(parents=True, exist_ok=True)
    (model / "refs" / "main").write_text(commit)
    (model / "snapshots" / commit / "config.json").write_text("{}")


@pytest.mark.parametrize("how", ["by name", "loaded"])
def test_a_model_of_the_hub_that_has_moved_is_another_run(tmp_path, args, monkeypatch, how):
    """Another machine downloads another base for an adapter, or another chat template."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    first = "a" * 40
    second = "b" * 40

    def identity(commit, revision=None):
        put_on_hub(tmp_path / "cache", commit)
        args.model_init_kwargs = {"revision": revision}
        if how == "by name":
            return identity_of("some/model", args, None, {})
        model = nn.Linear(4, 4)
        model.config = PretrainedConfig(name_or_path="some/model")
        model.config._commit_hash = revision or commit
        return identity_of(model, args, None, {})

    folder = write(tmp_path, 1, **identity(first))

    assert resume_path("true", args, identity(first)) == str(folder)
    with pytest.raises(ValueError, match=f"was at commit {first} on the Hub, and is at {second} now. Set model_revi"):
        resume_path("true", args, identity(second))

    # As the message says.
    assert resume_path("true", args, identity(second, revision=first)) == str(folder)
    # Control: a checkpoint of an earlier version.
    facts = identity(first)
    del facts["commit"]
    older = write(tmp_path, 2, **facts)
    assert resume_path("true", args, identity(second)) == str(older)


def test_the_commit_of_a_teacher_is_that_of_its_revision(tmp_path, monkeypatch):
    """One that is pinned stays where it is when its branch moves."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    first = "a" * 40
    args = LowBitDistillationConfig(
        output_dir=str(tmp_path),
        teacher_model_name_or_path="some/model",
        teacher_model_revision=first,
        use_cpu=True,
        bf16=False,
    )

    for commit in (first, "b" * 40):
        put_on_hub(tmp_path / "cache", commit)
        assert identity_of("a", args, None, {})["teacher_commit"] == first

    # Control: without a revision it is that of the branch.
    args.teacher_model_revision = None
    assert identity_of("a", args, None, {})["teacher_commit"] == "b" * 40


def test_the_arguments_by_which_a_model_is_found_are_those_by_which_it_loads(tmp_path, args):
    put_on_hub(tmp_path / "elsewhere", "c" * 40)
    args.model_init_kwargs = {"cache_dir": str(tmp_path / "elsewhere"), "dtype": "float32"}

    assert identity_of("some/model", args, None, {})["commit"] == "c" * 40


def test_a_reward_model_of_other_weights_under_the_same_name_is_another_run(tmp_path, args):
    judge = tmp_path / "judge"
    judge.mkdir()

    def identity(content):
        (judge / "model.safetensors").write_bytes(content * 1000)
        return identity_of("a", args, None, {"reward_funcs": [reward_of_one, str(judge)]})

    folder = write(tmp_path, 1, **identity(b"a"))

    assert resume_path("true", args, identity(b"a")) == str(folder)
    with pytest.raises(ValueError, match="another run: reward_models was"):
        resume_path("true", args, identity(b"b"))
    # Control: a checkpoint of an earlier version.
    facts = identity(b"a")
    del facts["reward_models"]
    older = write(tmp_path, 2, **facts)
    assert resume_path("true", args, identity(b"b")) == str(older)


def test_another_chat_template_in_the_same_file_is_another_run(tmp_path):
    template = tmp_path / "chat.jinja"
    args = LowBitSFTConfig(output_dir=str(tmp_path), chat_template_path=str(template), use_cpu=True, bf16=False)

    def identity(content):
        template.write_text(content)
        return identity_of("a", args, None, {})

    folder = write(tmp_path, 1, **identity("{{ messages }}"))

    assert resume_path("true", args, identity("{{ messages }}")) == str(folder)
    with pytest.raises(ValueError, match="another run: chat_template was"):
        resume_path("true", args, identity("{{ messages[0] }}"))


@pytest.mark.parametrize("is_stream", [False, True])
def test_workers_of_a_stream_stay_because_each_reads_shards_of_its_own(tmp_path, is_stream):
    args = LowBitSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    data = Dataset.from_list([{"text": "a"}])
    data = {"train_dataset": data.to_iterable_dataset() if is_stream else data}
    folder = write(tmp_path, 1, **identity_of("a", args, None, data))

    args.dataloader_num_workers = 2

    changed = identity_of("a", args, None, data)
    if is_stream:
        with pytest.raises(ValueError, match="read its stream with dataloader_num_workers=0, got 2"):
            resume_path("true", args, changed)
    else:
        assert resume_path("true", args, changed) == str(folder)


def test_the_folder_of_a_reward_model_may_move(tmp_path, args):
    places = [tmp_path / "here" / "judge", tmp_path / "there" / "judge"]
    for place in places:
        place.mkdir(parents=True)

    # A folder counts by its last name. A name on the Hub counts as a whole.
    for place in places:
        facts = identity_of("a", args, None, {"reward_funcs": str(place)})
        assert facts["settings"]["reward_funcs"] == ["judge"]


def test_settings_that_a_trainer_does_not_have_identify_no_run(tmp_path):
    """TRL's SFT has no rollout batch, and no reference model."""

    @dataclasses.dataclass
    class Settings(LowBitConfig, SFTConfig):
        pass

    facts = identity_of("a", Settings(str(tmp_path), use_cpu=True, bf16=False), None, {})

    assert facts["settings"]["packing"] is False
    assert "num_iterations" not in facts["settings"]
    assert "reward_funcs" not in facts["settings"]


def test_a_recipe_is_refused_before_anything_loads(base, tmp_path, capsys):  # noqa: F811
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("resume_from_checkpoint: true\n")

    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "--config", str(recipe), *base])
    assert stopped.value.code == 2
    assert "found no checkpoint" in capsys.readouterr().err

    folder = write(tmp_path / "out", 3)
    _, training_args, _ = parse(["--config", str(recipe), *base])
    assert training_args.resume_from_checkpoint == str(folder)


# Another run in the same folder -------------------------------------------------------------------------------------


def test_a_start_beside_checkpoints_is_refused_with_the_two_ways_on(tmp_path, args):
    check_start(None, args)  # control: an empty folder

    for step in (9, 10):
        # Damaged ones count, too: a user may still be able to repair them.
        cut(write(tmp_path, step))
    with pytest.raises(
        ValueError,
        match=r"checkpoints of an earlier run \(checkpoint-9, checkpoint-10\).*resume_from_checkpoint: auto continues"
        ".*another output_dir, or moving them, starts a new one",
    ):
        check_start(None, args)


def test_a_resume_goes_on_beside_its_own_checkpoints_only(tmp_path, args):
    own = write(tmp_path, 1)
    check_start(str(own), args)

    # Not beside those of this folder, which the run would then overwrite.
    elsewhere = write(tmp_path / "other", 1)
    with pytest.raises(ValueError, match=rf"an earlier run \(checkpoint-1\).*{own} continues"):
        check_start(str(elsewhere), args)


def test_a_resume_goes_on_from_a_checkpoint_of_which_only_a_link_is_in_the_folder(tmp_path, args):
    """As on a larger disk, to which a user moved it."""
    own = write(tmp_path, 1)
    place = tmp_path / "larger disk" / "checkpoint-1"
    place.parent.mkdir()
    own.rename(place)
    own.symlink_to(place)

    assert resume_path("auto", args) == str(own)
    check_start(str(own), args)
    check_start(str(place), args)

    # Control: another one in that place is none of this folder.
    with pytest.raises(ValueError, match="an earlier run"):
        check_start(str(write(place.parent, 2)), args)
    # A link to what is gone is none, either.
    (tmp_path / "checkpoint-3").symlink_to(tmp_path / "nowhere")
    check_start(str(own), args)


def test_a_checkpoint_that_a_kill_left_before_its_rename_is_not_lost_by_a_start(tmp_path, args):
    folder = write(tmp_path, 4)
    incoming = tmp_path / INCOMING
    incoming.mkdir(exist_ok=True)
    # Complete, with its manifest, and not yet in its place: the moment between the two renames of `commit`.
    folder.rename(incoming / folder.name)

    with pytest.raises(ValueError, match="checkpoint-4"):
        check_start(None, args)
    assert folder.exists()


def test_the_command_refuses_such_a_start_before_anything_loads(base, tmp_path, capsys):  # noqa: F811
    write(tmp_path / "out", 3)

    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", *base, "--dry_run", "true"])

    assert stopped.value.code == 2
    assert "checkpoint-3" in capsys.readouterr().err
    cli.main(["train", *base, "--dry_run", "true", "--output_dir", str(tmp_path / "new")])  # control


def test_a_checkpoint_between_its_two_renames_is_put_in_its_place(tmp_path, args):
    folder = write(tmp_path, 4)
    incoming = tmp_path / INCOMING
    incoming.mkdir(exist_ok=True)
    folder.rename(incoming / folder.name)

    assert resume_path("true", args) == str(folder)


def test_a_run_of_an_earlier_version_in_the_precision_of_its_launcher_resumes(tmp_path, monkeypatch):
    """It stored `bf16: false`, and computed in bfloat16."""
    facts = json.loads(json.dumps(identity_of("a", config(tmp_path), None, {})))
    del facts["compiled"]  # as it wrote no such fact
    write(tmp_path, 1, **facts)

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    args = config(tmp_path)
    assert args.bf16  # the launcher's
    assert resume_path("true", args, identity_of("a", args, None, {}))

    # Controls: a run that was not launched in it, and a checkpoint that says what it computed in.
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    args.bf16 = True
    with pytest.raises(ValueError, match="bf16 was False"):
        resume_path("true", args, identity_of("a", args, None, {}))

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    write(tmp_path, 2, **facts, compiled=False)
    with pytest.raises(ValueError, match="bf16 was False"):
        resume_path("true", args, identity_of("a", args, None, {}))
