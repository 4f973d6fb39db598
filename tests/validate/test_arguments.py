"""`qarl_trl.validate.arguments`: what is refused before a model loads, by the name of what is wrong."""

import functools
from dataclasses import dataclass

import pytest
from configs import config
from datasets import Dataset
from peft import LoraConfig, OFTConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import DPOConfig
from trl.experimental.cpo import CPOConfig

from qarl_trl import LowBitDistillationConfig, LowBitSFTConfig, QaRLConfig, QaRLTrainer
from qarl_trl.export import save_low_bit
from qarl_trl.quant import apply_quantization
from qarl_trl.rewards import math_reward
from qarl_trl.trainers import LowBitConfig
from qarl_trl.validate import arguments, check_arguments


@pytest.mark.parametrize(
    ("changes", "kwargs", "words"),
    [
        ({}, {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}, "quantization_config leaves"),
        ({"model_init_kwargs": {"load_in_4bit": True}}, {}, "load_in_4bit leaves"),
        ({"model_init_kwargs": {"torch_dtype": "bfloat16"}}, {}, "sets torch_dtype, .*: write dtype"),
        ({}, {"peft_config": object()}, "only LoRA adapters"),
    ],
)
def test_what_would_take_the_master_weights_away_is_refused_before_a_model_loads(tmp_path, changes, kwargs, words):
    args = config(tmp_path, **changes)

    # No model has this name, so a load would raise another error.
    with pytest.raises(ValueError, match=words):
        QaRLTrainer("no/such-model", reward_funcs=[], args=args, **kwargs)

    # Control: without quantization it is TRL's own business.
    without_quantization = config(tmp_path, quant_scheme="none", **changes)
    check_arguments("no/such-model", without_quantization, kwargs)


@dataclass
class LowBitCPOConfig(LowBitConfig, CPOConfig):
    pass


@dataclass
class LowBitDPOConfig(LowBitConfig, DPOConfig):
    """As a user may combine the two."""


def test_a_model_and_an_adapter_are_not_saved_into_one_folder_without_quantization(tmp_path):
    args = config(tmp_path, quant_scheme="none")
    full = {"model": "org/model"}
    adapter = full | {"peft_config": LoraConfig(target_modules=["q_proj"])}
    for arguments_of_run in (full, adapter):
        check_arguments("org/model", args, arguments_of_run)  # control: an empty folder

    (tmp_path / "adapter_config.json").write_text("{}")
    check_arguments("org/model", args, adapter)
    with pytest.raises(ValueError, match="holds a LoRA adapter .* in place of the model"):
        check_arguments("org/model", args, full)
    check_arguments("org/model", args, {})  # control: a server

    (tmp_path / "adapter_config.json").rename(tmp_path / "elsewhere.json")
    (tmp_path / "model.safetensors").write_text("")
    check_arguments("org/model", args, full)
    with pytest.raises(ValueError, match="holds a model .* which the adapter of this run would be taken to belong to"):
        check_arguments("org/model", args, adapter)


def test_a_config_of_a_class_within_a_function_is_refused(tmp_path):
    """The first checkpoint would pickle it, which takes a class by its module and name."""

    @dataclass
    class Within(LowBitConfig, CPOConfig):
        pass

    with pytest.raises(TypeError, match="locals>.Within must be defined in a module, not in a function"):
        check_arguments("org/model", Within(str(tmp_path), use_cpu=True), {})
    # Controls: a run that saves no checkpoint, and a class of a module.
    check_arguments("org/model", Within(str(tmp_path), use_cpu=True, save_strategy="no"), {})
    check_arguments("org/model", LowBitCPOConfig(str(tmp_path), use_cpu=True), {})


@pytest.mark.parametrize("kind", [QaRLConfig, LowBitDistillationConfig, LowBitDPOConfig])
@pytest.mark.parametrize("changes", [{"every_n_layers": 2}, {"offload": True, "use_reentrant": False}])
def test_checkpointing_that_fails_when_it_is_switched_on_again_is_refused(tmp_path, kind, changes):
    """For rollouts, for answers that transformers samples, and for the forward of a reference model."""
    settings = {"use_cpu": True, "bf16": False}
    with pytest.raises(ValueError, match=f"must not have .*{next(iter(changes))}.* with this trainer"):
        check_arguments("org/model", kind(str(tmp_path), **settings, gradient_checkpointing_kwargs=changes), {})

    # Control: an argument of torch's.
    check_arguments(
        "org/model", kind(str(tmp_path), **settings, gradient_checkpointing_kwargs={"use_reentrant": False}), {}
    )


@pytest.mark.parametrize(
    ("kind", "settings"), [(LowBitSFTConfig, {}), (LowBitDistillationConfig, {"distill_on": "answers"})]
)
def test_trainers_that_never_switch_checkpointing_off_may_choose_its_layers(tmp_path, kind, settings):
    args = kind(
        str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing_kwargs={"every_n_layers": 2}, **settings
    )
    check_arguments("org/model", args, {})


def test_a_threshold_for_a_mismatch_that_nothing_measures_is_refused(tmp_path):
    changes = {"use_vllm": True, "mismatch_abort_threshold": 0.1}
    unweighed = config(tmp_path, **changes, vllm_importance_sampling_correction=False)

    with pytest.raises(ValueError, match=r"mismatch_abort_threshold=0\.1 would stop no run"):
        check_arguments("org/model", unweighed, {"rollout_func": print})

    # Controls: the engine's log-probs are always compared, and those of a function if the loss uses them.
    check_arguments("org/model", unweighed, {})
    check_arguments("org/model", config(tmp_path, **changes), {"rollout_func": print})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"adam_beta1": 2.0}, "adam_beta1"),
        ({"adam_beta2": 1.0}, "adam_beta2"),
        ({"optim_args": "x"}, "optim_args"),
        ({"optim_args": "a=1,b"}, "optim_args"),
        ({"save_strategy": "steps", "save_steps": 0}, "save_steps"),
    ],
)
def test_numbers_that_the_optimizer_or_the_trainer_refuse_late_are_refused(tmp_path, changes, name):
    with pytest.raises(ValueError, match=f"{name} must be"):
        check_arguments("org/model", config(tmp_path, **changes), {})

    # Controls.
    check_arguments("org/model", config(tmp_path), {})
    check_arguments("org/model", config(tmp_path, optim_args="momentum=0.9, nesterov=True"), {})


@pytest.mark.parametrize("optim", ["lomo", "adalomo"])
def test_an_optimizer_that_steps_within_a_backward_needs_one_backward_a_step(tmp_path, monkeypatch, optim):
    # As where lomo-optim is installed.
    monkeypatch.setattr(arguments, "find_spec", lambda module: object())
    with pytest.raises(ValueError, match=f"optim='{optim}' steps within each backward.* must be 1, got 2"):
        check_arguments("org/model", config(tmp_path, optim=optim, gradient_accumulation_steps=2), {})

    # Controls: one backward, and no low bits.
    check_arguments("org/model", config(tmp_path, optim=optim, gradient_accumulation_steps=1), {})
    off = config(tmp_path, optim=optim, gradient_accumulation_steps=2, quant_scheme="none")
    check_arguments("org/model", off, {})


def test_a_path_in_place_of_the_name_of_a_model_is_refused(tmp_path):
    with pytest.raises(TypeError, match="model must be a name, a folder as text or a loaded model, got PosixPath"):
        check_arguments(tmp_path / "model", config(tmp_path), {})


def test_a_compiled_model_is_refused(dense_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(dense_model)
    check_arguments(model, config(tmp_path), {})  # control

    model.compile(backend="eager")

    with pytest.raises(ValueError, match=r"must not be compiled, got one after model.compile\(\)"):
        check_arguments(model, config(tmp_path), {})
    check_arguments(model, config(tmp_path, quant_scheme="none"), {})  # TRL's own business


WITH_SERVER = {
    "use_vllm": True,
    "vllm_mode": "server",
    "sync_folder": "syncs",
    "vllm_importance_sampling_correction": False,
}


@pytest.mark.parametrize(
    ("engine", "name", "value"),
    [
        # The server would cut the prompt that the learner scores.
        (WITH_SERVER, "truncate_prompt_tokens", 8),
        # It would answer without the adapter.
        (WITH_SERVER, "model", "org/base"),
        (WITH_SERVER, "use_beam_search", True),
        # They would replace what TRL sets.
        (WITH_SERVER, "prompt", "1+1="),
        (WITH_SERVER, "stream", True),
        (WITH_SERVER, "return_token_ids", False),
        # In one request for all answers of a group.
        (WITH_SERVER, "n", 1),
        ({"use_vllm": True, "vllm_importance_sampling_correction": False}, "n", 2),
        # TRL reads the log-prob of the first candidate, which is the likeliest.
        ({"use_vllm": True, "vllm_importance_sampling_correction": False}, "logprobs", 3),
        (WITH_SERVER, "logprobs", 3),
        # The learner scores at the field's.
        ({"use_vllm": True, "vllm_importance_sampling_correction": False}, "temperature", 0.5),
        ({"use_vllm": False}, "temperature", 0.5),
        ({"use_vllm": False}, "num_return_sequences", 2),
        ({"use_vllm": False}, "stop_strings", ["\n"]),
    ],
)
def test_arguments_of_sampling_that_trl_cannot_have_are_refused(tmp_path, engine, name, value):
    settings = {"quant_scheme": "FP8_DYNAMIC"} | engine

    with pytest.raises(ValueError, match=f"generation_kwargs sets {name}="):
        check_arguments("org/model", config(tmp_path, **settings, generation_kwargs={name: value}), {})

    # Controls: none of them, and one answer to each prompt.
    check_arguments("org/model", config(tmp_path, **settings), {})
    if name in ("num_return_sequences", "temperature"):
        check_arguments("org/model", config(tmp_path, **settings, generation_kwargs={name: 1}), {})


@pytest.mark.parametrize(
    ("name", "value"),
    [("train_sampling_strategy", "sequential"), ("label_smoothing_factor", 0.1), ("include_for_metrics", ["inputs"])],
)
def test_what_a_trainer_that_samples_does_not_read_is_refused(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        check_arguments("org/model", config(tmp_path, **{name: value}), {})

    # Control: SFT reads them.
    check_arguments("org/model", LowBitSFTConfig(str(tmp_path), use_cpu=True, bf16=False, **{name: value}), {})


@pytest.mark.parametrize(
    ("changes", "reader", "good"),
    [
        ({"use_vllm": False}, "GenerationConfig", "bad_words_ids"),
        # The reader is vLLM's with an engine, and transformers' without one. The two name their arguments differently.
        ({"use_vllm": True, "vllm_importance_sampling_correction": False}, "SamplingParams", "stop"),
        (WITH_SERVER, "server", "stop"),
        (WITH_SERVER, "server", "bad_words"),
    ],
)
def test_sampling_arguments_that_nothing_reads_are_refused(tmp_path, changes, reader, good):
    misspelt = config(tmp_path, quant_scheme="FP8_DYNAMIC", generation_kwargs={"stop_stings": ["#"]}, **changes)
    with pytest.raises(ValueError, match=rf"sets \['stop_stings'\], which .*{reader} does not have"):
        check_arguments("org/model", misspelt, {})

    well_spelt = config(tmp_path, quant_scheme="FP8_DYNAMIC", generation_kwargs={good: ["#"]}, **changes)
    check_arguments("org/model", well_spelt, {})  # control


def test_engine_arguments_that_vllm_does_not_have_are_refused(tmp_path):
    engine = {"use_vllm": True, "vllm_engine_kwargs": {"enable_prefix_cachin": True}}
    with pytest.raises(ValueError, match=r"vllm_engine_kwargs sets \['enable_prefix_cachin'\]"):
        check_arguments("org/model", config(tmp_path, **engine), {})

    # Controls: no engine of this process reads them. The command line of a server has others.
    check_arguments("org/model", config(tmp_path, **engine | WITH_SERVER), {})
    check_arguments("org/model", config(tmp_path, **engine | {"use_vllm": False}), {})


def test_weights_of_rewards_are_as_many_as_the_rewards(tmp_path):
    args = config(tmp_path, reward_weights=[1.0, 2.0])
    for rewards in ([print], print):
        with pytest.raises(ValueError, match=r"one number for each of 1 reward_funcs, got \[1.0, 2.0\]"):
            check_arguments("org/model", args, {"reward_funcs": rewards})

    # Controls: as many, and a server, which has none.
    check_arguments("org/model", args, {"reward_funcs": [print, print]})
    check_arguments("org/model", args, {})


def test_a_reference_that_there_is_not_cannot_be_synced(tmp_path):
    lora = {"peft_config": LoraConfig(target_modules=["q_proj"])}
    with pytest.raises(ValueError, match="sync_ref_model must be False with an adapter"):
        check_arguments("org/model", config(tmp_path, sync_ref_model=True, beta=0.1), lora)
    with pytest.raises(ValueError, match="sync_ref_model must be False with beta=0.0"):
        check_arguments("org/model", config(tmp_path, sync_ref_model=True), {})

    # Controls: a model of its own, and nothing to sync.
    check_arguments("org/model", config(tmp_path, sync_ref_model=True, beta=0.1), {})
    check_arguments("org/model", config(tmp_path, beta=0.1), lora)


@pytest.mark.parametrize("name", ["r", "lora_alpha"])
@pytest.mark.parametrize("scheme", ["W4A16", "none"])
def test_an_adapter_that_would_train_nothing_is_refused(tmp_path, name, scheme):
    args = config(tmp_path, quant_scheme=scheme)
    # peft itself refuses some in its constructor.
    lora = LoraConfig(target_modules=["q_proj"])
    check_arguments("org/model", args, {"peft_config": lora})  # control

    # Its rank may be 0.
    check_arguments("org/model", config(tmp_path, quant_scheme="none"), {"peft_config": OFTConfig()})

    setattr(lora, name, 0)
    with pytest.raises(ValueError, match=f"{name} of the adapter must be above 0, got 0"):
        check_arguments("org/model", args, {"peft_config": lora})


def test_another_config_is_refused(tmp_path):
    with pytest.raises(TypeError, match="for QaRLTrainer a QaRLConfig.*got dict"):
        check_arguments("no/such-model", {}, {})


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("paged_adamw_8bit", "bitsandbytes"),
        ("lion_8bit", "bitsandbytes"),
        ("ademamix", "bitsandbytes"),
        ("rmsprop_bnb_32bit", "bitsandbytes"),
        ("adamw_torch_8bit", "torchao"),
        ("galore_adamw", "galore-torch"),
        ("apollo_adamw", "apollo-torch"),
        ("adalomo", "lomo-optim"),
        ("schedule_free_adamw", "schedulefree"),
        ("stable_adamw", "torch-optimi"),
    ],
)
def test_an_optimizer_of_a_package_needs_it(tmp_path, monkeypatch, name, package):
    args = config(tmp_path, optim=name)

    installed = {"bitsandbytes"} - {package}
    monkeypatch.setattr(arguments, "find_spec", lambda module: module if module in installed else None)
    with pytest.raises(ImportError, match=f"optim={name} needs {package}: pip install {package}"):
        check_arguments("no/such-model", args, {})
    check_arguments("no/such-model", config(tmp_path), {})  # control

    monkeypatch.setattr(arguments, "find_spec", lambda module: object())
    check_arguments("no/such-model", args, {})


def test_columns_that_a_reward_reads_must_not_be_removed(tmp_path):
    data = Dataset.from_dict({"prompt": ["1 + 1"], "answer": ["2"]})
    removing = config(tmp_path, remove_unused_columns=True)

    def by_length(completions, **kwargs):
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match=r"remove_unused_columns must be False.*reads \['answer'\]"):
        check_arguments("org/model", removing, {"reward_funcs": [by_length, math_reward], "train_dataset": data})

    # Controls: a reward that reads no column, what TRL gives, what a partial binds, a builtin, a reward model, and
    # columns that stay.
    given_by_trl = Dataset.from_dict({"prompt": ["1 + 1"], "completions": ["2"], "a": ["2"]})
    bound = functools.partial(lambda completions, a, **kwargs: [0.0], a="3")
    check_arguments("org/model", removing, {"reward_funcs": [by_length, bound, max], "train_dataset": given_by_trl})
    check_arguments("org/model", removing, {"reward_funcs": by_length, "train_dataset": data})
    check_arguments("org/model", removing, {"reward_funcs": "org/reward-model", "train_dataset": data})
    check_arguments("org/model", config(tmp_path), {"reward_funcs": math_reward, "train_dataset": data})


def test_a_tracker_that_is_unknown_or_not_installed_is_refused_before_a_model_loads(tmp_path, monkeypatch):
    # As on a machine with trackio alone, whatever is installed here.
    monkeypatch.setattr(arguments, "get_available_reporting_integrations", lambda: ["trackio"])

    with pytest.raises(ImportError, match="report_to='wandb' needs wandb, which is not installed: pip install wandb"):
        QaRLTrainer("no/such-model", reward_funcs=[], args=tracked(tmp_path, ["trackio", "wandb"]))
    with pytest.raises(ValueError, match=r"report_to must be one of .*wandb.* got 'wandbb'"):
        QaRLTrainer("no/such-model", reward_funcs=[], args=tracked(tmp_path, "wandbb"))

    # Controls. transformers knows azure_ml and comet_ml, and does not list them among the installed ones.
    for names in ("none", "trackio", ["trackio", "azure_ml"], "comet_ml"):
        check_arguments("org/model", tracked(tmp_path, names), {"model": "org/model"})
    # A server, which gets the adapter alone.
    check_arguments("org/model", tracked(tmp_path, "wandb"), {"peft_config": LoraConfig(target_modules=["q_proj"])})


def tracked(tmp_path, names):
    return QaRLConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=names)


def test_a_folder_with_an_unquantized_model_is_refused_before_the_run(tmp_path, tiny_model):
    """At the end of the run `save_model` would have nowhere to write."""
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "low_bit")
    lora = LoraConfig(r=4, target_modules=["q_proj"])

    # With an adapter the low-bit model goes into `low_bit`, without one into `output_dir` itself.
    with pytest.raises(ValueError, match="unquantized model"):
        QaRLTrainer("no/such-model", reward_funcs=[], args=config(tmp_path), peft_config=lora)
    with pytest.raises(ValueError, match="unquantized model"):
        QaRLTrainer("no/such-model", reward_funcs=[], args=config(tmp_path / "low_bit"))

    # Controls: without an adapter nothing is written into the sub-folder, and without quantization no low-bit model.
    check_arguments("org/model", config(tmp_path), {})
    check_arguments("no/such-model", config(tmp_path / "low_bit", quant_scheme="none"), {})


def test_an_adapter_and_a_model_do_not_share_a_folder(tmp_path, tiny_model):
    """transformers would load the adapter in place of the model beside it, and a push would share both."""
    lora = LoraConfig(r=4, target_modules=["q_proj"])
    model = apply_quantization(tiny_model(num_hidden_layers=1), "W4A16")
    save_low_bit(model, None, tmp_path / "model")
    get_peft_model(tiny_model(num_hidden_layers=1), lora).save_pretrained(tmp_path / "adapter")

    # Both kinds of runs write their adapter into `output_dir`.
    for lora_base in ("merged", "frozen"):
        args = config(tmp_path / "model", lora_base=lora_base)
        with pytest.raises(ValueError, match=r"holds a model or a training checkpoint \(model\.safetensors\)"):
            check_arguments("no/such-model", args, {"peft_config": lora})
    with pytest.raises(ValueError, match=r"holds a LoRA adapter \(adapter_config\.json\)"):
        check_arguments("no/such-model", config(tmp_path / "adapter"), {})
    with pytest.raises(ValueError, match=r"holds a LoRA adapter \(adapter_config\.json\)"):
        save_low_bit(model, None, tmp_path / "adapter")

    # Controls: the next run of the same kind.
    check_arguments("no/such-model", config(tmp_path / "model"), {})
    check_arguments("no/such-model", config(tmp_path / "adapter"), {"peft_config": lora})


@pytest.mark.parametrize("scheme", ["W4A16", "none"])
def test_a_model_that_no_step_would_change_is_refused(tmp_path, tiny_model, scheme):
    """With gradient checkpointing its loss has a gradient, and the run looks like training."""
    lora = LoraConfig(r=4, target_modules=["q_proj"])
    args = config(tmp_path / "run", quant_scheme=scheme)
    get_peft_model(tiny_model(num_hidden_layers=1), lora).save_pretrained(tmp_path / "adapter")

    loaded = PeftModel.from_pretrained(tiny_model(num_hidden_layers=1), tmp_path / "adapter")
    with pytest.raises(ValueError, match="No parameter of the model .PeftModel.* needs is_trainable=True"):
        check_arguments(loaded, args, {})
    frozen = tiny_model(num_hidden_layers=1).requires_grad_(False)
    with pytest.raises(ValueError, match="No parameter of the model .Qwen3ForCausalLM. has requires_grad"):
        check_arguments(frozen, args, {})
    # As peft reads it from a saved adapter.
    saved = LoraConfig.from_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="peft_config must have inference_mode=False, got True"):
        check_arguments("no/such-model", args, {"peft_config": saved})

    # Controls: something is trained.
    saved.inference_mode = False
    check_arguments("no/such-model", args, {"peft_config": saved})
    trainable = PeftModel.from_pretrained(tiny_model(num_hidden_layers=1), tmp_path / "adapter", is_trainable=True)
    check_arguments(trainable, args, {})
    # The trainer itself puts a trainable adapter on top of this one.
    check_arguments(frozen, args, {"peft_config": lora})


def test_of_several_adapters_one_is_active_and_the_model_names_it(tmp_path, tiny_model):
    lora = LoraConfig(r=4, target_modules=["q_proj"])
    model = get_peft_model(tiny_model(num_hidden_layers=1), lora)
    model.add_adapter("second", lora)
    args = config(tmp_path / "run")

    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match=r"'default'; got default, second. Call model.set_adapter with one name"):
        check_arguments(model, args, {})
    # The layers compute with the second, and a run would save the first.
    model.base_model.set_adapter("second")
    with pytest.raises(ValueError, match=r"'default'; got second. Call model.set_adapter with one name"):
        check_arguments(model, args, {})

    # Control: as the message says.
    model.set_adapter("second")
    check_arguments(model, args, {})


def test_a_penalty_towards_the_start_of_another_adapter_is_refused(tmp_path, tiny_model):
    """TRL makes the reference of the adapter "default", whichever is trained."""
    lora = LoraConfig(r=4, target_modules=["q_proj"])
    named = get_peft_model(tiny_model(num_hidden_layers=1), lora, adapter_name="policy")
    with_penalty = config(tmp_path / "run", beta=0.1)

    with pytest.raises(ValueError, match=r"beta=0.1: the trained adapter .* 'default', got 'policy'"):
        check_arguments(named, with_penalty, {})

    # Controls: without a penalty, with a reference of the script, and by its usual name.
    check_arguments(named, config(tmp_path / "run"), {})
    check_arguments(named, with_penalty, {"ref_model": tiny_model(num_hidden_layers=1)})
    check_arguments(get_peft_model(tiny_model(num_hidden_layers=1), lora), with_penalty, {})


def test_a_run_in_which_nothing_is_in_low_bits_is_said(tmp_path, caplog):
    def warned(**changes):
        caplog.clear()
        check_arguments("org/model", config(tmp_path, **changes), {})
        return "nothing runs in low bits" in caplog.text

    assert warned(quantize_learner=False)
    # Controls: the learner, the engine, and a run that says so itself.
    assert not warned()
    assert not warned(quantize_learner=False, use_vllm=True)
    assert not warned(quantize_learner=False, quant_scheme="none")


def test_a_reference_that_is_precomputed_before_the_quantization_is_said(tmp_path, caplog):
    def warned(**changes):
        caplog.clear()
        args = LowBitDPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **changes)
        peft_config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        check_arguments("org/model", args, {"peft_config": peft_config})
        return "precompute_ref_log_probs" in caplog.text

    assert warned(precompute_ref_log_probs=True)
    # Controls: the reference is in low bits, or the policy is not.
    assert not warned()
    assert not warned(precompute_ref_log_probs=True, lora_base="frozen")
    assert not warned(precompute_ref_log_probs=True, quantize_learner=False)
    assert not warned(precompute_ref_log_probs=True, quant_scheme="none")


def test_a_reference_in_high_precision_beside_a_low_bit_policy_is_said(tmp_path, caplog):
    def warned(kwargs=None, **changes):
        caplog.clear()
        check_arguments("org/model", config(tmp_path, **changes), kwargs or {})
        return "the reference model is in high precision" in caplog.text

    assert warned(beta=0.1)

    # Controls: no reference, the same precision on both sides, and the reference of an adapter.
    assert not warned()
    assert not warned(beta=0.1, quantize_learner=False)
    assert not warned(beta=0.1, quant_scheme="none")
    assert not warned({"peft_config": LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")}, beta=0.1)

    # In a distillation it chooses the divergence, 1.0 by default.
    caplog.clear()
    of_distillation = LowBitDistillationConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    assert of_distillation.beta == 1.0
    check_arguments("org/model", of_distillation, {})
    assert "reference model" not in caplog.text

    # In CPO it weighs the only model.
    check_arguments("org/model", LowBitCPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none"), {})
    assert "reference model" not in caplog.text


def test_the_folder_of_an_adapter_is_no_model(dense_model, tmp_path):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(dense_model), LoraConfig())
    model.save_pretrained(tmp_path / "adapter")

    with pytest.raises(ValueError, match="adapter is a LoRA adapter, and no model to start from"):
        check_arguments(str(tmp_path / "adapter"), config(tmp_path / "run"), {})
    check_arguments(dense_model, config(tmp_path / "run"), {})  # control
