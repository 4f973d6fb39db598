"""All checks of a run, before TRL loads anything."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig

from ..export.push import name_of_output, repository_of
from ..export.sharing import check_pushed_adapter
from ..guards import on_first
from ..quant.layers.experts import num_experts
from ..quant.names import adapter_configs, architecture_of
from ..quant.source import CheckpointSource
from .adapters import check_base_name, check_tied
from .arguments import check_arguments
from .data import check_data, check_rows
from .folders import check_folders
from .kv_cache import check_kv_cache
from .layers import check_attention, check_layers, check_packing, check_tied_by_config
from .memory import check_host_memory
from .model import check_saved_generation_config, config_of, skeleton
from .noise import check_dropout, check_routers
from .prompts import check_prompts
from .source import find_source
from .teacher import check_teacher, teacher_to_load
from .teacher_tokenizer import check_teacher_tokenizer
from .types import RunSettings, TrainerArguments


def check_run(
    model: str | nn.Module, args: RunSettings, trainer_arguments: TrainerArguments
) -> CheckpointSource | None:
    """
    Check the arguments of a trainer before TRL loads anything.

    Args:
        model: The trainer's model, or its name.
        args: Settings of the run, a config with `LowBitConfig`.
        trainer_arguments: All arguments of the trainer by name; empty for `qarl-trl serve`, which loads no weights.

    Returns:
        The quantized checkpoint that the run starts from, or `None`.

    Raises:
        TypeError: if `args` is no config with `LowBitConfig`.
        ImportError: if an optional package is missing, or has an untested version.
        OSError: if a folder cannot be written or the Hub cannot be pushed to.
        ValueError: for everything else that would stop the run later, or silently make it train something else.
    """
    check_arguments(model, args, trainer_arguments)
    # Only the first process: all share these folders, and a second one would find the lock taken.
    on_first(args, lambda: check_folders(model, args))
    check_data(trainer_arguments, args)
    # Only the first process: it takes seconds for many rows. The others wait, and stop with it.
    on_first(args, lambda: check_rows(trainer_arguments, args))

    # All before needs the arguments and files' headers alone. From here on the model's config is read.
    source = find_source(model, args)
    config = config_of(model, args)
    adapters = adapter_configs(model, trainer_arguments.get("peft_config"))
    # These save an adapter alone, which has no generation config.
    saves_adapter_alone = bool(adapters) and (not args.quantized or (args.frozen and args.from_checkpoint))
    # A server saves nothing.
    if trainer_arguments and not saves_adapter_alone:
        check_saved_generation_config(model, args)
    check_teacher(model, config, source, args, trainer_arguments)

    if args.quantized:
        if adapters and isinstance(model, str):
            check_base_name(model, config, args)
        check_tied_by_config(model)
        for adapter in adapters:
            if adapter.modules_to_save:
                check_tied(skeleton(config, args), adapter)
        check_attention(model, config, args)
        if args.has_engine:
            check_dropout(model, config, args)
            check_routers(config)
        check_packing(config, args)
    check_kv_cache(model, config, args)
    if _needs_layer_check(config, args):
        plan = args.quant_plan(None if source is None else source.plan())
        check_layers(config, plan, args, trainer_arguments.get("peft_config"))

    # Only the first process, as above.
    name = model if isinstance(model, str) else config._name_or_path
    on_first(args, lambda: check_prompts(name, config, args, trainer_arguments))
    on_first(args, lambda: check_teacher_tokenizer(name, args, trainer_arguments))

    # A model that was passed as a module is in memory already.
    loads_master_weights = isinstance(model, str) and bool(trainer_arguments)
    loaded = config if loads_master_weights else None
    check_host_memory(loaded, args, teacher_to_load(args, trainer_arguments), is_quantized=source is not None)

    # This comes last because it creates the repository, which a run that is refused must not do.
    if args.push_to_hub:
        if isinstance(model, nn.Module):
            check_pushed_adapter(model, args)
        repository = args.hub_model_id or name_of_output(args)
        on_first(
            args, lambda: repository_of(repository, args, config, bool(adapters), args.hub_token, args.hub_revision)
        )
    return source


def _needs_layer_check(config: PretrainedConfig, args: RunSettings) -> bool:
    """Whether to try the quantization once on a model without weights, before it loads."""
    # A model that transformers does not know may not be made without weights.
    if args.frozen or num_experts(config):
        return args.quantized
    return args.quantized and architecture_of(config) is not None
