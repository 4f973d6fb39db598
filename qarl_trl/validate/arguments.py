"""Check the settings and arguments of a trainer, without reading the model's files or the data's rows."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path

from accelerate.logging import get_logger
from torch import nn
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from trl import DPOConfig, GRPOConfig, KTOConfig, RLOOConfig

from ..export import LOW_BIT_FOLDER, check_adapter_target, check_target
from ..export.files import BASE_FOLDER, check_no_adapter
from ..export.low_bit import check_no_adapter_in
from ..quant.layers.layer import quantized_modules
from ..quant.names import adapter_configs, is_peft_model
from ..rollout.engine_settings import check_engine_arguments
from ..trainers.settings import LowBitConfig
from .adapters import check_adapters, check_one_active, check_reference, check_resized, check_saved
from .launch import check_launch
from .layers import check_plan
from .placement import check_placement
from .rollouts import check_processes, uses_server
from .sampling import check_sampling_arguments
from .schedule import check_schedule
from .types import RunSettings, TrainerArguments


logger = get_logger(__name__)

# How transformers' names of optimizers begin that are of other packages (`trainer_optimizer.py`, 5.17), with the
# module of the package and its name for pip.
PACKAGES_OF_OPTIMIZERS = (
    (("adamw_8bit", "adamw_bnb", "ademamix", "lion_", "paged_", "rmsprop_bnb"), "bitsandbytes", "bitsandbytes"),
    # These import it, too.
    (("galore_", "apollo_"), "bitsandbytes", "bitsandbytes"),
    (("adamw_torch_4bit", "adamw_torch_8bit"), "torchao", "torchao"),
    (("galore_",), "galore_torch", "galore-torch"),
    (("apollo_",), "apollo_torch", "apollo-torch"),
    (("lomo", "adalomo"), "lomo_optim", "lomo-optim"),
    (("grokadamw",), "grokadamw", "grokadamw"),
    (("schedule_free_",), "schedulefree", "schedulefree"),
    (("stable_adamw",), "optimi", "torch-optimi"),
)
# Trackers that transformers has, and does not list among the installed ones.
NOT_LISTED = ("azure_ml", "comet_ml", "flyte")
# Configs of TRL whose `beta` weighs a loss that has no reference model.
WITHOUT_REFERENCE = ("CPOConfig", "ORPOConfig", "TPOConfig")
# Columns that TRL's GRPO and RLOO keep with `remove_unused_columns` (1.16, `_set_signature_columns_if_needed`).
COLUMNS_OF_PROMPTS = ("prompt", "image", "images")
# What TRL itself gives to rewards, whatever columns there are, and a column that it leaves out.
OF_TRL_TO_REWARDS = (
    *("prompts", "completions", "completion", "completion_ids"),
    *("trainer_state", "log_extra", "log_metric", "environments"),
)
# Arguments by which transformers loads a model that is quantized for inference, without master weights.
FOREIGN_QUANTIZATION = ("quantization_config", "load_in_4bit", "load_in_8bit")


def check_arguments(model: str | nn.Module, args: RunSettings, trainer_arguments: TrainerArguments) -> None:
    """
    The checks of [`check_run`] that read neither the model's files nor the data.

    Args:
        model: The trainer's model, or its name.
        args: Settings of the run, a config with `LowBitConfig`.
        trainer_arguments: All arguments of the trainer by name.

    Raises:
        TypeError: if `args` is no config with `LowBitConfig`, or of a class that no checkpoint can store, or `model`
            neither text nor a model.
        ImportError: if the optimizer's package is missing, or peft has an untested version.
        ValueError: for settings that do not work together, with this device, or with these processes, and for a model
            that nothing would train.
    """
    if not isinstance(args, LowBitConfig):
        raise TypeError(
            f"args must be a config with LowBitConfig (for QaRLTrainer a QaRLConfig), got {type(args).__name__}."
        )
    if "<locals>" in type(args).__qualname__ and args.save_strategy != "no":
        raise TypeError(
            f"{type(args).__qualname__} must be defined in a module, not in a function: checkpoints pickle the config."
        )
    if not isinstance(model, str | nn.Module):
        raise TypeError(f"model must be a name, a folder as text or a loaded model, got {type(model).__name__}.")
    if isinstance(model, str):
        check_no_adapter(model)
    check_launch(args)
    check_processes(args, trainer_arguments)
    _check_optimizer(args)
    _check_checkpointing(args)
    # A server reports nothing, and its machine may lack the tracker.
    if "model" in trainer_arguments:
        _check_trackers(args)
    _check_numbers(args)
    check_schedule(args, trainer_arguments)
    _check_trainable(model, trainer_arguments)
    _check_reward_weights(args, trainer_arguments)
    _check_reward_columns(args, trainer_arguments)
    _check_synced_reference(model, args, trainer_arguments)
    check_sampling_arguments(args)
    # A server's own command line refuses them at once, and has more of them.
    if args.vllm_engine_kwargs and args.has_engine and not uses_server(args):
        check_engine_arguments(args.vllm_engine_kwargs, "vllm_engine_kwargs")
    _check_threshold(args, trainer_arguments)
    _check_not_quantized(model, args)
    # All that follows is about low-bit layers. Without them a run is TRL's.
    if not args.quantized:
        # A server saves nothing.
        if "model" in trainer_arguments:
            _check_not_mixed(args, with_adapter=bool(adapter_configs(model, trainer_arguments.get("peft_config"))))
        return

    _check_loading(args, trainer_arguments)
    _check_steps_between(args)
    _check_not_compiled(model)
    check_placement(args)
    adapters = check_adapters(model, trainer_arguments.get("peft_config"), args)
    if adapters and not isinstance(model, str):
        check_resized(model, adapters, args)
    if not isinstance(model, str) and is_peft_model(model):
        check_one_active(model)
        check_reference(model, args, trainer_arguments)
        check_saved(model)
    _check_targets(args, with_adapter=bool(adapters))
    _warn_of_reference(args, with_adapter=bool(adapters))
    if not (args.quantize_learner or args.has_engine):
        # Not refused: the files that such a run saves are in low bits.
        logger.warning(
            "quantize_learner=False without an engine (use_vllm): nothing runs in low bits, neither rollouts nor "
            "learner, so this is no rollout-only baseline. Set use_vllm, or quantize_learner=True."
        )

    # `None` if a quantized checkpoint has the plan: `find_source` reads that, and checks it.
    plan = args.quant_plan()
    if plan is not None:
        check_plan(plan, args)


def _check_threshold(args: RunSettings, trainer_arguments: TrainerArguments) -> None:
    """Refuse (`ValueError`) a threshold for a mismatch that nothing measures: of log-probs that the loss ignores."""
    threshold = getattr(args, "mismatch_abort_threshold", None)
    if threshold is not None and trainer_arguments.get("rollout_func") and not args.weighs_mismatch:
        raise ValueError(
            f"mismatch_abort_threshold={threshold} would stop no run: the mismatch with a rollout_func is measured "
            "only if the loss uses its log-probs. Set vllm_importance_sampling_correction=True, or leave out the "
            "threshold."
        )


def _check_trainable(model: str | nn.Module, trainer_arguments: TrainerArguments) -> None:
    """Refuse (`ValueError`) a model or an adapter that no step would change: such a run would look like training."""
    peft_config = trainer_arguments.get("peft_config")
    if getattr(peft_config, "inference_mode", False):
        raise ValueError(
            "peft_config must have inference_mode=False, got True, as the config of a saved adapter has it: the new "
            "adapter would be frozen, and nothing trained. Set peft_config.inference_mode = False."
        )
    # Other kinds of adapters have an `r` that means something else.
    for name in ("r", "lora_alpha") if isinstance(getattr(peft_config, "lora_alpha", None), int | float) else ():
        value = getattr(peft_config, name)
        if not value > 0:
            raise ValueError(f"{name} of the adapter must be above 0, got {value}: it would train nothing.")
    if isinstance(model, str) or peft_config:
        return
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"No parameter of the model ({type(model).__name__}) has requires_grad, so nothing would be trained. "
            "PeftModel.from_pretrained needs is_trainable=True."
        )


def _check_not_quantized(model: str | nn.Module, args: RunSettings) -> None:
    """Refuse (`ValueError`) low-bit layers of an earlier trainer in a run without: they would go on in low bits."""
    if args.quantized or isinstance(model, str):
        return
    # A frozen base has nothing else to multiply by.
    if any(layer.frozen_weight is None for _, layer in quantized_modules(model)):
        raise ValueError(
            "quant_scheme='none', but the model has low-bit layers, perhaps of an earlier trainer. Call "
            "remove_quantization(model) of qarl_trl.quant first, or load the model again."
        )


def _check_not_compiled(model: str | nn.Module) -> None:
    """Refuse (`ValueError`) a model that a script compiled: its layers are replaced, and it rounds differently."""
    if isinstance(model, nn.Module) and model._compiled_call_impl is not None:
        raise ValueError("The model must not be compiled, got one after model.compile(). Give it as it was loaded.")


def _check_optimizer(args: RunSettings) -> None:
    """Refuse (`ImportError`) an optimizer of a package that is not installed."""
    # transformers would say so when it builds the optimizer, after the model has loaded and the engine has started.
    for beginnings, module, package in PACKAGES_OF_OPTIMIZERS:
        if args.optim.startswith(beginnings) and find_spec(module) is None:
            raise ImportError(f"optim={args.optim.value} needs {package}: pip install {package}.")


def _check_steps_between(args: RunSettings) -> None:
    """Refuse (`ValueError`) optimizers that change weights within a backward, of which nothing tells the low bits."""
    if args.optim.value in ("lomo", "adalomo") and args.gradient_accumulation_steps > 1:
        raise ValueError(
            f"optim={args.optim.value!r} steps within each backward, so gradient_accumulation_steps must be 1, got "
            f"{args.gradient_accumulation_steps}: later micro-batches would train on the low bits of earlier weights."
        )


def _check_checkpointing(args: RunSettings) -> None:
    """Refuse (`ValueError`) ways of gradient checkpointing that fail where TRL switches it off and on again."""
    # Switched on again (`disable_gradient_checkpointing`, `unwrap_model_for_generation`, TRL 1.16), it gives these
    # arguments of the Trainer to torch's function, which does not have them.
    chosen = args.gradient_checkpointing_kwargs or {}
    of_trainer = sorted({"every_n_layers", "offload"} & set(chosen))
    if not (of_trainer and args.gradient_checkpointing):
        return

    # For rollouts, for answers that transformers samples, and for a reference model.
    samples = getattr(args, "distill_on", None) == "rollouts" and not args.has_engine
    if hasattr(args, "num_generations") or samples or isinstance(args, (DPOConfig, KTOConfig)):
        raise ValueError(
            f"gradient_checkpointing_kwargs must not have {of_trainer} with this trainer: TRL switches checkpointing "
            "off and on again, and would give them to torch, which does not know them. Leave them out."
        )


def _check_trackers(args: RunSettings) -> None:
    """Refuse (`ValueError`, `ImportError`) a tracker that transformers does not know or that is not installed."""
    # transformers would say so after the model has loaded.
    installed = get_available_reporting_integrations()
    for name in args.report_to:
        if name not in INTEGRATION_TO_CALLBACK:
            raise ValueError(f"report_to must be one of {', '.join(INTEGRATION_TO_CALLBACK)}, or none, got {name!r}.")
        if name not in (*installed, *NOT_LISTED):
            raise ImportError(f"report_to={name!r} needs {name}, which is not installed: pip install {name}.")


def _check_numbers(args: RunSettings) -> None:
    """Refuse (`ValueError`) what the optimizer refuses late, and a number of steps that never comes."""
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(args, name) < 1:
            raise ValueError(f"{name} must be in [0, 1), got {getattr(args, name)}.")
    # transformers unpacks each of them without a word of its own.
    pairs = str(args.optim_args).split(",") if args.optim_args else []
    if any(pair.count("=") != 1 for pair in pairs):
        raise ValueError(f"optim_args must be name=value pairs with commas between them, got {args.optim_args!r}.")
    if isinstance(args, (GRPOConfig, RLOOConfig)):
        _check_unread(args)
    if args.save_strategy == "steps" and not args.save_steps > 0:
        raise ValueError(f"save_steps must be above 0, got {args.save_steps}: no checkpoint would be written.")


def _check_unread(args: GRPOConfig | RLOOConfig) -> None:
    """Refuse (`ValueError`) settings of transformers' Trainer that trainers which sample have and do not read."""
    if args.train_sampling_strategy != "random":
        raise ValueError(
            f"train_sampling_strategy must be random, got {args.train_sampling_strategy!r}: TRL orders the prompts by "
            "itself. shuffle_dataset: false keeps their order."
        )
    if args.label_smoothing_factor:
        raise ValueError(f"label_smoothing_factor must be 0, got {args.label_smoothing_factor}: there are no labels.")
    if args.include_for_metrics:
        raise ValueError(
            f"include_for_metrics must be empty, got {args.include_for_metrics}: an evaluation of sampled answers "
            "computes no metrics from inputs, and ends in an error of transformers."
        )


def _check_reward_weights(args: RunSettings, trainer_arguments: TrainerArguments) -> None:
    """Refuse (`ValueError`) another number of weights than of rewards: TRL does, after the model has loaded."""
    weights = getattr(args, "reward_weights", None)
    rewards = trainer_arguments.get("reward_funcs")
    if weights is None or rewards is None:
        return
    number = len(rewards) if isinstance(rewards, list) else 1
    if len(weights) != number:
        raise ValueError(f"reward_weights must be one number for each of {number} reward_funcs, got {weights}.")


def _check_reward_columns(args: RunSettings, trainer_arguments: TrainerArguments) -> None:
    """
    Refuse (`ValueError`) to remove columns that a reward function reads. It fails after the first rollouts, or takes
    its default.
    """
    rewards = trainer_arguments.get("reward_funcs")
    if not args.remove_unused_columns or rewards is None:
        return

    columns = getattr(trainer_arguments.get("train_dataset"), "column_names", None) or ()
    removed = set(columns) - {*COLUMNS_OF_PROMPTS, *OF_TRL_TO_REWARDS}
    for reward in rewards if isinstance(rewards, list) else [rewards]:
        # A reward model, or its name, reads the texts alone.
        if isinstance(reward, str | nn.Module):
            continue
        try:
            parameters = set(inspect.signature(reward).parameters)
        except (TypeError, ValueError):
            # Of a builtin, or of what TRL refuses.
            continue
        read = sorted(removed & parameters - set(getattr(reward, "keywords", ())))
        if read:
            raise ValueError(
                f"remove_unused_columns must be False, got True: a reward function reads {read}, and TRL would keep "
                f"{', '.join(COLUMNS_OF_PROMPTS)} alone."
            )


def _check_synced_reference(model: str | nn.Module, args: RunSettings, trainer_arguments: TrainerArguments) -> None:
    """Refuse (`ValueError`) to sync a reference model that there is not: TRL does, after the model has loaded."""
    if not getattr(args, "sync_ref_model", False):
        return
    if adapter_configs(model, trainer_arguments.get("peft_config")):
        raise ValueError(
            "sync_ref_model must be False with an adapter: its reference is the policy without the adapter, and no "
            "model of its own. Set it to False, or train all weights."
        )
    # DPO and KTO have a reference with any beta.
    if isinstance(args, (GRPOConfig, RLOOConfig)) and not args.beta:
        raise ValueError(f"sync_ref_model must be False with beta={args.beta}, which needs no reference. Set beta.")


def _check_loading(args: RunSettings, trainer_arguments: TrainerArguments) -> None:
    """
    Refuse (`ValueError`) arguments by which transformers would quantize the model while it loads, and a dtype of the
    weights by a name that TRL does not know.
    """
    loading = dict(args.model_init_kwargs or {})
    # TRL loads the model with this argument of the trainer too.
    quantization_config = trainer_arguments.get("quantization_config")
    if quantization_config is not None:
        loading["quantization_config"] = quantization_config

    if "torch_dtype" in loading:
        raise ValueError("model_init_kwargs sets torch_dtype, which TRL does not read: write dtype.")
    for name in FOREIGN_QUANTIZATION:
        if loading.get(name):
            raise ValueError(f"{name} leaves no master weights. Remove it, or set quant_scheme='none'.")


def _warn_of_reference(args: RunSettings, with_adapter: bool) -> None:
    """Warn of a KL penalty that is above 0 from the start, because only the policy is in low bits."""
    # A distillation has a field of the same name, which chooses its divergence.
    if hasattr(args, "teacher_model_name_or_path"):
        return
    if any(config.__name__ in WITHOUT_REFERENCE for config in type(args).__mro__):
        return

    beta = getattr(args, "beta", 0.0)
    # TRL's DPO precomputes in its constructor: before the layers are quantized, and after those of a frozen base.
    precomputes = getattr(args, "precompute_ref_log_probs", False) and not args.frozen
    if beta and args.quantize_learner and with_adapter and precomputes:
        logger.warning(
            "precompute_ref_log_probs=True: the reference is the base in high precision, and the policy is in low "
            "bits, so the two differ from the first step. With False the reference is in low bits, too."
        )
    # With an adapter the reference is the policy without it, in low bits too.
    if beta and args.quantize_learner and not with_adapter:
        logger.warning(
            f"beta={beta}: the reference model is in high precision and the policy in low bits, so `kl` is above 0 "
            "from the first step (0.67 nats in one model), and the penalty also pulls the low-bit policy towards the "
            "high-precision start. With LoRA the reference is in low bits, and `kl` starts at 0."
        )


def _check_not_mixed(args: RunSettings, with_adapter: bool) -> None:
    """Refuse (`ValueError`) a folder in which a model and an adapter would lie beside each other."""
    check = check_adapter_target if with_adapter else check_no_adapter_in
    check(args.output_dir)


def _check_targets(args: RunSettings, with_adapter: bool) -> None:
    """Refuse (`ValueError`) folders where what the run saves would overwrite another model, or lie beside one."""
    if not with_adapter:
        check_target(args.output_dir)
        return

    # `output_dir` gets the adapter, and a sub-folder gets the low-bit model.
    check_adapter_target(args.output_dir)
    folder = BASE_FOLDER if args.frozen else LOW_BIT_FOLDER
    check_target(Path(args.output_dir, folder))
