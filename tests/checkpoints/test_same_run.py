"""A checkpoint of another run is refused, by each fact and setting that a run is known by."""

import dataclasses
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import disk_offload
from configs import config
from datasets import Dataset
from huggingface_hub import constants
from peft import LoraConfig
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import BitsAndBytesConfig, PretrainedConfig
from trl import SFTConfig

from qarl_trl import LowBitDistillationConfig, LowBitSFTConfig
from qarl_trl.checkpoints.identity import identity_of
from qarl_trl.checkpoints.optimizer import trained_fact
from qarl_trl.checkpoints.resume import resume_path
from qarl_trl.quant.scheme import DEFAULT_IGNORE, resolve_scheme, single_group
from qarl_trl.trainers import LowBitConfig

from .test_folder import write


@pytest.fixture
def args(tmp_path):
    return config(tmp_path)


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


def test_another_choice_of_layers_of_an_adapter_is_another_run(tmp_path, args):
    adapter = {"r": 4, "target_modules": ["q_proj"], "exclude_modules": ["up_proj"]}
    facts = identity_of("a", args, None, {"peft_config": LoraConfig(**adapter)})
    write(tmp_path, 1, **facts)
    assert resume_path("true", args, facts)  # control

    for change in ({"r": 8}, {"exclude_modules": ["gate_proj"]}, {"layers_to_transform": [0]}):
        with pytest.raises(ValueError, match="another run: adapter was"):
            resume_path("true", args, identity_of("a", args, None, {"peft_config": LoraConfig(**adapter | change)}))


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
