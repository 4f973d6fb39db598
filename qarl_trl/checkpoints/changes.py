"""What happens to each setting that differs between a checkpoint and the run that resumes from it: one table."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any


class Rule(Enum):
    """What a resumed run does with a changed setting."""

    APPLIED = "counts from the next update on; the log names it"
    BETWEEN_BATCHES = "as APPLIED, but refused within a rollout batch, whose rest was made with the old value"
    REFUSED = "changes the policy or the loss, so that the run would be another one"
    FREE = "changes neither"


# What an optimizer has of the settings from the moment it is made.
KEPT_BY_OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
# What the optimizer and its schedule keep in a checkpoint.
OF_OPTIMIZER = (*KEPT_BY_OPTIMIZER, "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
# What a call of `train` reads anew, the first five only if it makes an optimizer: a script may have changed it since
# an earlier call.
READ_IN_TRAIN = (*OF_OPTIMIZER, "max_grad_norm", "max_steps", "num_train_epochs", "gradient_accumulation_steps")

# Those of the configs of this package. One that is not here, as a user's config of another trainer has, is refused.
SETTINGS_BY_RULE: dict[Rule, tuple[str, ...]] = {
    Rule.APPLIED: (
        *OF_OPTIMIZER,
        "max_grad_norm",
        # Lengths: of the run, of answers, of the engine's context.
        "max_steps",
        "num_train_epochs",
        "max_completion_length",
        "vllm_max_model_length",
        "max_tool_calling_iterations",
        "vllm_engine_kwargs",
        # With one scale per token each rank quantizes its part of an input (`scheme_support._check_scheme`).
        "vllm_tensor_parallel_size",
    ),
    Rule.BETWEEN_BATCHES: (
        # How a rollout batch is divided.
        "steps_per_generation",
        "num_iterations",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "max_tokens_per_pass",
        # The log-probs of the reference are in the rollout batch, or not. Of distillation see `rule_of`.
        "beta",
    ),
    Rule.REFUSED: (
        # Another optimizer has another state.
        "optim",
        "optim_args",
        "optim_target_modules",
        "optim_muon",
        # Arithmetic.
        "bf16",
        "fp16",
        "tf32",
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
        "use_cpu",
        "full_determinism",
        "use_liger_kernel",
        "liger_kernel_config",
        "neftune_noise_alpha",
        "disable_dropout",
        "cast_lm_head_to_fp32",
        "model_init_kwargs",
        "pad_to_multiple_of",
        "quantize_learner",
        "lora_base",
        "quant_kernel",
        "learner_ops",
        "kv_cache_dtype",
        "quantize_learner_kv",
        # How the processes share model, optimizer and batches.
        "accelerator_config",
        "parallelism_config",
        "fsdp",
        "fsdp_config",
        "deepspeed",
        "auto_find_batch_size",
        "average_tokens_across_devices",
        # Which prompts come when.
        "seed",
        "data_seed",
        "shuffle_dataset",
        "train_sampling_strategy",
        "length_column_name",
        "dataloader_drop_last",
        "dataloader_in_order",
        "remove_unused_columns",
        "label_names",
        # Which tokens a text becomes, in which rows, and which of them are learned.
        "chat_template_path",
        "dataset_text_field",
        "dataset_kwargs",
        "eos_token",
        "pad_token",
        "max_length",
        "truncation_mode",
        "packing",
        "packing_strategy",
        "padding_free",
        "completion_only_loss",
        "assistant_only_loss",
        # How answers are sampled.
        "num_generations",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "generation_kwargs",
        "chat_template_kwargs",
        "cache_implementation",
        "use_vllm",
        "vllm_model_impl",
        "vllm_structured_outputs_regex",
        "use_transformers_continuous_batching",
        "transformers_continuous_batching_config",
        "use_transformers_paged",
        # The loss.
        "loss_type",
        "label_smoothing_factor",
        "router_aux_loss_coef",
        "epsilon",
        "delta",
        "epsilon_high",
        "sapo_temperature_neg",
        "sapo_temperature_pos",
        "vespo_k_pos",
        "vespo_lambda_pos",
        "vespo_k_neg",
        "vespo_lambda_neg",
        "importance_sampling_level",
        "reward_weights",
        "multi_objective_aggregation",
        "scale_rewards",
        "mask_truncated_completions",
        "sync_ref_model",
        "ref_model_mixup_alpha",
        "ref_model_sync_steps",
        "top_entropy_quantile",
        "entropy_coef",
        "use_adaptive_entropy",
        "entropy_coef_min",
        "entropy_coef_max",
        "entropy_coef_delta",
        "entropy_target",
        "vllm_importance_sampling_correction",
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_cap",
        "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min",
        "off_policy_mask_threshold",
        "use_bias_correction_kl",
        "tbpo_epsilon_high",
        "tbpo_delta_low",
        "tbpo_delta_high",
        "tbpo_mismatch_cap",
        "advantage_filter",
        "normalize_advantages",
        "reward_clip_range",
        # The teacher.
        "teacher_model_name_or_path",
        "teacher_model_revision",
        "teacher_model_init_kwargs",
        "distill_on",
    ),
    Rule.FREE: (
        # Folders, logs, saving and pushing.
        "output_dir",
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "log_on_each_node",
        "logging_nan_inf_filter",
        "include_num_input_tokens_seen",
        "log_level",
        "log_level_replica",
        "disable_tqdm",
        "report_to",
        "run_name",
        "project",
        "trackio_space_id",
        "trackio_bucket_id",
        "trackio_static_space_id",
        "log_completions",
        "log_multimodal",
        "num_completions_to_print",
        "log_unique_prompts",
        "log_completions_hub_repo",
        "save_only_model",
        "save_strategy",
        "save_steps",
        "save_on_each_node",
        "save_total_limit",
        "enable_jit_checkpoint",
        "export_low_bit",
        "push_to_hub",
        "hub_token",
        "hub_private_repo",
        "hub_model_id",
        "hub_strategy",
        "hub_always_push",
        "hub_revision",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        # Evaluation.
        "eval_strategy",
        "eval_steps",
        "eval_delay",
        "per_device_eval_batch_size",
        "prediction_loss_only",
        "eval_on_start",
        "eval_do_concat_batches",
        "eval_use_gather_object",
        "eval_accumulation_steps",
        "include_for_metrics",
        "batch_eval_metrics",
        "bf16_full_eval",
        "fp16_full_eval",
        "num_generations_eval",
        "eval_packing",
        # Resuming itself, where the user says what to do.
        "resume_from_checkpoint",
        "ignore_data_skip",
        "restore_callback_states_from_checkpoint",
        # Memory, speed and places: the numbers are the same.
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "activation_offloading",
        "torch_empty_cache_steps",
        "use_cache",
        "quant_keep_matrices",
        "dataloader_num_workers",  # of a stream they are a fact of the run
        "dataset_num_proc",  # of packed rows, too
        "dataloader_pin_memory",
        "ds3_gather_for_generation",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context",
        "ddp_find_unused_parameters",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "ddp_static_graph",
        "ddp_backend",
        "ddp_timeout",
        "local_rank",
        "vllm_mode",
        "vllm_enable_sleep_mode",
        "vllm_server_base_url",
        "vllm_server_host",
        "vllm_server_port",
        "vllm_server_timeout",
        "vllm_group_port",
        "vllm_gpu_memory_utilization",
        "sync_folder",
        "trust_remote_code",
        # Checks.
        "verify_sync",
        "mismatch_abort_threshold",
        "debug",
        "skip_memory_metrics",
        "do_train",
        "do_eval",
        "do_predict",
        # TRL computes it from others.
        "generation_batch_size",
        # A recipe's file may move. What it says is compared as the fact `scheme`.
        "quant_scheme",
        "quant_group_size",
        "quant_ignore",
        "quant_recipe",
    ),
}
RULES = {name: rule for rule, names in SETTINGS_BY_RULE.items() for name in names}


@dataclass(frozen=True)
class Change:
    """
    A setting that differs between a checkpoint and the run that resumes from it.

    Args:
        name: Its name.
        before: Its value in the checkpoint's run.
        now: Its value in this run.
        rule: What happens to it.
    """

    name: str
    before: Any
    now: Any
    rule: Rule

    def __str__(self) -> str:
        return f"{self.name} {self.before!r} -> {self.now!r}"


def compared_settings(args: Any) -> dict[str, Any]:
    """
    The settings that a checkpoint stores, to be compared when a run resumes: all but the free ones.

    Args:
        args: The config of a run, of any TRL trainer.

    Returns:
        Values by name, as JSON stores them.
    """
    settings = {}
    for field in fields(args):
        if RULES.get(field.name) is Rule.FREE:
            continue
        value = getattr(args, field.name)
        if field.name == "model_init_kwargs":
            value = _loading(value or {})
        # TRL's trainers with rewards write False in place of None into the config of a run with a stream, with which
        # a script may make another trainer.
        has_rewards = hasattr(args, "num_generations")
        if field.name == "accelerator_config" and has_rewards and getattr(value, "dispatch_batches", None) is False:
            value = copy.copy(value)
            value.dispatch_batches = None
        # Some values are objects. Their texts say what is in them.
        settings[field.name] = json.loads(json.dumps(value, default=str, sort_keys=True))
    return settings


def _loading(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by which the model loads, without those that are left at their defaults."""
    # A dtype that is not named is float32 for TRL. The digest of the weights stands for the revision.
    loading = {"dtype": "float32"}
    for name, value in arguments.items():
        if value is not None and name not in ("revision", "trust_remote_code"):
            loading[name] = value
    loading["dtype"] = str(loading["dtype"]).removeprefix("torch.")
    return loading


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    """
    Compare the settings of a checkpoint with those of the run that resumes from it.

    Args:
        before: Those of the checkpoint, from [`compared_settings`].
        now: Those of the run.

    Yields:
        The settings that differ. One that only one of the two has is none: another version of TRL wrote it.
    """
    for name, value in now.items():
        if name in before and before[name] != value:
            yield Change(name, before[name], value, rule_of(name, now))


def rule_of(name: str, settings: Mapping[str, Any]) -> Rule:
    """
    What a resumed run does with a setting if it has changed.

    Args:
        name: The setting.
        settings: All of the run, from [`compared_settings`].
    """
    # In distillation, DPO and KTO it is no weight of a penalty but the shape of the loss.
    if name == "beta" and "num_iterations" not in settings:
        return Rule.REFUSED
    return RULES.get(name, Rule.REFUSED)


def rows_per_update(settings: Mapping[str, Any], world_size: int) -> float:
    """
    How many new rows of the data set an update takes.

    Args:
        settings: From [`compared_settings`].
        world_size: The number of processes.
    """
    rows = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] * world_size
    # Of a prompt there are several completions, and a rollout batch may be used several times.
    # TRL has trainers that leave the first unset.
    completions = settings.get("num_generations") or 1
    return rows / (completions * settings.get("num_iterations", 1))


def refuses(change: Change, within_batch: bool, with_deepspeed: bool) -> str | None:
    """
    Why a run with this change cannot resume; `None` if it can.

    Args:
        change: The changed setting.
        within_batch: Whether the checkpoint was saved within a rollout batch.
        with_deepspeed: Whether DeepSpeed has the optimizer, whose groups we do not set.
    """
    if change.rule is Rule.REFUSED:
        return "It decides what the run learns, so it must stay."
    if change.rule is Rule.BETWEEN_BATCHES and within_batch:
        return "It may change only in a checkpoint between two rollout batches, and this one is within one."
    if with_deepspeed and change.name in OF_OPTIMIZER:
        return "Under DeepSpeed the optimizer's settings must stay."
    return None
