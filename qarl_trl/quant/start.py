"""High-precision master weights from a quantized checkpoint, without a trace of quantization (paper Sec. 3.1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import torch
import transformers
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from compressed_tensors.quantization import QuantizationType
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from .checkpoint import QuantizedSource, quantized_source
from .experts import PROJECTIONS, QuantExperts, layer_names
from .linear import LowBitLayer
from .model import quantized_modules
from .names import checkpoint_modules
from .quantize import LowBitWeight


logger = get_logger(__name__)


def load_master_weights(
    name: str, *, dtype: torch.dtype | str = "float32", architecture: type | None = None, **kwargs: Any
) -> PreTrainedModel:
    """
    The unquantized model, on the CPU, of a compressed-tensors checkpoint, by the checkpoint's folder or Hub id.

    `dtype` is that of the master weights (`"auto"`: the checkpoint's), `architecture` the model class (by default of `config.json`);
    `kwargs` are arguments of `from_pretrained` (`revision`, `subfolder`, `token`, ...) and fields of the model's config.
    `ValueError` when the checkpoint is not quantized, is incomplete, or has tensors that the model does not.
    """
    source = quantized_source(name, **kwargs)
    if source is None:
        raise ValueError(f"{name} is not quantized. Use from_pretrained.")
    config, settings = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **kwargs)
    del config.quantization_config
    if architecture is None:
        architecture = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM)
    model, report = architecture.from_pretrained(
        None,
        config=config,
        state_dict=dict(source.dense()),
        dtype=dtype,
        trust_remote_code=kwargs.get("trust_remote_code", False),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below, with the name of the checkpoint
        **settings,
    )
    problems = {kind: report.get(kind) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    wrong = [f"{kind.replace('_', ' ')} {sorted(map(str, found))[:3]}" for kind, found in problems.items() if found]
    if wrong:
        raise source.broken(f"its tensors are not those of {type(model).__name__}: {'; '.join(wrong)}")
    model.config._name_or_path = model.name_or_path = name
    if model.can_generate():
        with suppress(OSError):  # it has none: the defaults stay
            model.generation_config = GenerationConfig.from_pretrained(source.folder)
    return model


def check_first_quantized(model: nn.Module, source: QuantizedSource) -> None:
    """
    With frozen scales: the quantized values of the loaded master weights are those of the checkpoint, but for the sign of a float8 zero.

    8-bit integers are the exception: code times scale has more digits than bfloat16, so a few quantized values come back one step off,
    which is logged. `RuntimeError` when other quantized values than these differ: then the master weights are not the checkpoint.
    """
    total = differing = 0
    adapted = is_peft_model(model)
    with model.disable_adapter() if adapted else nullcontext():
        for name, weight in _low_bit_weights(model):
            pair = weight.quantized, source.quantized(name).to(weight.quantized.device)
            # Floats by value, where -0.0 is 0.0; integers byte by byte, since eight may be packed into one.
            found, stored = (t.float() if t.is_floating_point() else t.view(torch.uint8) for t in pair)
            wrong, args = (found != stored).sum().item(), weight.scheme.weights
            if wrong and (args.num_bits, args.type) != (8, QuantizationType.INT):
                raise RuntimeError(
                    f"{wrong} quantized values of layer {name!r} differ from those in {source.name}, although its scales are "
                    "frozen: the master weights are not what is stored. Use tested versions of transformers and "
                    "compressed-tensors."
                )
            differing, total = differing + wrong, total + stored.numel()
    for _, module in quantized_modules(model) if adapted else ():
        module.forget()  # quantized values of the base alone, which nothing reads again
    if differing:
        logger.warning(
            f"{differing} of {total} quantized values ({differing / total:.4%}) start one step beside those of {source.name}: an 8-bit "
            "integer code times its scale is no bfloat16 number."
        )


def _low_bit_weights(model: nn.Module) -> Iterator[tuple[str, LowBitWeight]]:
    """The low-bit weights of `model` by their layers' names in a checkpoint; none of a layer that is a shard (ZeRO-3)."""
    for name, module in checkpoint_modules(model):
        if not isinstance(module, LowBitLayer) or any(p.numel() == 0 for p in module.parameters()):
            continue
        if isinstance(module, QuantExperts):
            for parameter in PROJECTIONS:
                yield from zip(layer_names(name, module, parameter), module.low_bit_layers(parameter), strict=True)
        else:
            yield name, module.low_bit()
