"""Find and check the quantized checkpoint that a run starts from."""

from __future__ import annotations

from accelerate.logging import get_logger
from transformers import PreTrainedModel

from ..quant.scheme import resolve_config
from ..quant.source import CheckpointSource, quantized_source
from .layers import check_plan
from .model import loading_arguments
from .placement import check_sharded, shards_parameters
from .types import RunSettings


logger = get_logger(__name__)


def find_source(model: str | PreTrainedModel, args: RunSettings) -> CheckpointSource | None:
    """
    Find the quantized checkpoint that the run starts from, and check it as a whole.

    Args:
        model: The model or its name.
        args: Settings of the run.

    Returns:
        The checkpoint, or `None` for an unquantized model.

    Raises:
        ValueError: if it is incomplete, if its schemes cannot run here or cannot be sharded, if the settings need a
            quantized model and this is none, or the other way round.
    """
    name = model if isinstance(model, str) else model.config._name_or_path
    source = _quantized_source(model, name, args)

    if source is None:
        if args.from_checkpoint:
            named = name or "one without a path"
            raise ValueError(f"quant_scheme='checkpoint' needs a quantized model, got {named!r}.")
        return None
    check_quantized_start(name, args)

    _ = source.layers  # reads the headers of all files, and raises for a missing tensor
    plan = args.quant_plan(source.plan())
    check_plan(resolve_config(plan), args)
    if shards_parameters(args):
        # Before, only a scheme that the settings name could be looked at.
        check_sharded(args, source.plan())

    check_frozen(name, args)
    if not args.from_checkpoint:
        logger.warning(
            f"{name} is quantized. Its weights are decompressed and quantized again, "
            f"by quant_scheme={args.quant_name!r}; 'checkpoint' keeps its scheme."
        )
    return source


def check_quantized_start(name: str, args: RunSettings) -> None:
    """
    Refuse a run without quantization from a quantized checkpoint.

    Args:
        name: The name of the checkpoint.
        args: Settings of the run.

    Raises:
        ValueError: if the run is in high precision.
    """
    if not args.quantized:
        raise ValueError(f"{name} is quantized, and quant_scheme is 'none'. Use quant_scheme: checkpoint.")


def check_frozen(name: str, args: RunSettings) -> None:
    """
    Refuse a frozen base in another scheme than the quantized checkpoint has.

    Args:
        name: The name of the checkpoint.
        args: Settings of the run.

    Raises:
        ValueError: if the run would quantize it.
    """
    if args.frozen and not args.from_checkpoint:
        raise ValueError(f"{name} is quantized: lora_base='frozen' keeps its tensors with quant_scheme: checkpoint.")


def _quantized_source(model: str | PreTrainedModel, name: str, args: RunSettings) -> CheckpointSource | None:
    """The checkpoint of a name, if it is quantized and the run needs it."""
    if not name:
        return None
    # A loaded model has its master weights already. Its files are read only if they decide the scheme.
    if not (isinstance(model, str) or args.from_checkpoint):
        return None
    return quantized_source(name, **loading_arguments(args))
