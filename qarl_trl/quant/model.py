"""`apply_quantization`: turn the linear layers of a model into low-bit layers, in place.

Invariant: a layer that matches the targets is quantized or the call fails; parameter names, `state_dict` and the
module tree stay as they were, because only `module.__class__` changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from torch import Tensor, nn

from .experts import (
    QuantExperts,
    check_experts,
    check_quantizable,
    checkpoint_layers,
    fused_experts,
    quantize_experts,
    whole_experts,
)
from .kernel_choice import KERNELS
from .linear import LowBitLayer, QuantLinear
from .names import base_model, checkpoint_modules, is_peft_model
from .plan import match, resolve_config, single_group
from .scheme import check_divisible, has_global_scale, resolve_scheme


# What vLLM loads into one matrix, with one global scale.
MERGED_BY_ENGINES = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
)


def apply_quantization(
    model: nn.Module,
    scheme: str | QuantizationScheme | QuantizationConfig,
    targets: Sequence[str] = ("Linear",),
    ignore: Sequence[str] = ("lm_head",),
    *,
    group_size: int | None = None,
    kernel: str = "auto",
    quantize_forward: bool = True,
    qparams: Mapping[str, tuple[Tensor, Tensor | None]] | None = None,
) -> nn.Module:
    """
    Give the matching linear layers of `model` a low-bit forward with straight-through gradients.

    In a `PeftModel` a layer with a LoRA adapter computes with its quantized merged weight, one without as usual.
    Fused experts count as one linear layer per expert and projection, under the names of the checkpoint.

    Args:
        model (`nn.Module`): Modified in place. Masters keep their dtype; quantization starts from their bfloat16 cast.
            Of a `PeftModel`, all names are those of the base model.
        scheme (`str`, `QuantizationScheme` or `QuantizationConfig`): Preset name (`"W4A16"`, `"FP8_DYNAMIC"`), a
            scheme, or a configuration of several groups ([`~qarl_trl.llmcompressor.recipe.read_recipe`]), which has its own
            targets, ignore list and group sizes: those arguments are then not read.
        targets (`Sequence[str]`, *optional*, defaults to `("Linear",)`): Class names, module names, or `re:` patterns,
            as in compressed-tensors.
        ignore (`Sequence[str]`, *optional*, defaults to `("lm_head",)`): Modules left alone, same syntax.
        group_size (`int`, *optional*): Weights per scale for a preset with groups; `-1` is per channel.
        kernel (`str`, *optional*, defaults to `"auto"`): `"auto"`, `"dequant"` or `"engine"`.
        quantize_forward (`bool`, *optional*, defaults to `True`): `False` keeps the forward in high precision.
        qparams (`Mapping`, *optional*): Frozen scale and zero point of every quantized layer, by its name
            ([`~qarl_trl.llmcompressor.quantized_start.QuantizedSource.qparams`]). Without it they follow the weights.

    Returns:
        `nn.Module`: `model` itself.

    Raises:
        ValueError: when a target cannot be quantized, when nothing matches, when `qparams` are of other layers, when
            fused experts have another form or are matched in part, when an adapter cannot be merged out of place, or when
            the model was quantized before.
    """
    if isinstance(scheme, QuantizationConfig):
        plan = resolve_config(scheme)
    else:
        plan = single_group(resolve_scheme(scheme, group_size), targets, ignore)
    if kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r} must be one of {KERNELS}.")
    if any(isinstance(m, LowBitLayer) for m in model.modules()):
        raise ValueError("The model is quantized already. Call `remove_quantization(model)` first.")
    if not is_peft_model(model) and any(hasattr(module, "lora_A") for module in model.modules()):
        raise ValueError(
            "The model carries LoRA layers without a PeftModel around them, so their names and adapters are not known. "
            "Wrap it with peft: get_peft_model(model, config) or PeftModel.from_pretrained(base_model, adapter)."
        )
    for name, module in fused_experts(model):
        check_experts(name, module)
    found = match(checkpoint_layers(model, plan.ignore or ()), plan)
    if not isinstance(scheme, QuantizationConfig):
        plan.config_groups["group_0"].targets = ["Linear"]  # an export lists what is not quantized
    if qparams is not None:
        _check_qparams({name for name, _, _ in found}, set(qparams))
    experts, linears = whole_experts(model, found)
    modules = dict(checkpoint_modules(model))
    matched = [(name, modules[name], layer_scheme) for name, _, layer_scheme in linears]
    for name, module, layer_scheme in matched:
        _check_layer(name, module, layer_scheme)
    _check_tied(model, [(name, module) for name, module, _ in matched])
    _check_routers(model, [(name, module) for name, module, _ in matched])
    if is_peft_model(model):
        from .lora import check_adapters

        check_adapters(base_model(model), {name: module for name, module, _ in matched})
    merged = list(_merged_layers(model, {id(module): layer_scheme for _, module, layer_scheme in matched}))
    for name, module, layer_scheme in [*matched, *experts]:
        plain = not hasattr(module, "base_layer") and qparams is None and isinstance(module, nn.Linear)
        if has_global_scale(layer_scheme) and not plain:
            raise ValueError(
                f"Layer {name!r}: a scheme with a global scale (NVFP4A16) does not go with frozen scales, LoRA or experts. "
                "Choose another scheme."
            )
    for name, module, layer_scheme in experts:
        check_quantizable(name, module, layer_scheme, kernel)
    for name, module, layer_scheme in experts:
        quantize_experts(name, module, layer_scheme, kernel, quantize_forward, qparams)
    for name, module, layer_scheme in matched:
        module.__class__ = _low_bit_class(module)
        module.scheme = layer_scheme
        module.frozen_qparams = None if qparams is None else qparams[name]
        module.kernel_choice = kernel
        module.quantized_forward = quantize_forward
    for layers in merged:
        for layer in layers:
            layer.fused = tuple(other for other in layers if other is not layer)
    return model


def remove_quantization(model: nn.Module) -> nn.Module:
    """Turn every low-bit layer of `model` back into the class it had. Masters are untouched."""
    for _, module in quantized_modules(model):
        for attribute in (
            "scheme",
            "frozen_qparams",
            "fused",
            "kernel_choice",
            "quantized_forward",
            "_cached",
            "_sharded",
            "_kernel",
        ):
            module.__dict__.pop(attribute, None)
        if isinstance(module, QuantExperts):
            module.__class__ = module.__dict__.pop("high_precision_class")
        else:
            module.__class__ = type(module).__bases__[1]
    return model


def quantized_modules(model: nn.Module) -> Iterable[tuple[str, LowBitLayer]]:
    """The low-bit layers of `model` with their names, in module order."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LowBitLayer))


def _merged_layers(model: nn.Module, schemes: Mapping[int, QuantizationScheme]) -> Iterable[list[nn.Module]]:
    """
    Layers that engines merge into one, where their scheme has a global scale.

    Args:
        model (`nn.Module`): The model.
        schemes (`Mapping[int, QuantizationScheme]`): Scheme of each layer to quantize, by its `id`.
    """
    if not any(map(has_global_scale, schemes.values())):
        return
    for parent_name, parent in model.named_modules():
        for names in MERGED_BY_ENGINES:
            layers = [getattr(parent, name, None) for name in names]
            found = [schemes.get(id(layer)) for layer in layers if layer is not None]
            shared = [scheme is not None and has_global_scale(scheme) for scheme in found]
            if None in layers or not any(shared):
                continue
            if not all(shared):
                raise ValueError(
                    f"Of {names} in {parent_name!r} only some would be quantized with a global scale, and the engine merges "
                    "them into one layer. Quantize or ignore all of them."
                )
            yield layers


def _low_bit_class(module: nn.Module) -> type[LowBitLayer]:
    if not hasattr(module, "base_layer"):
        return QuantLinear
    from .lora import LoraQuantLinear

    return LoraQuantLinear


def _check_qparams(layers: set[str], frozen: set[str]) -> None:
    if layers != frozen:
        raise ValueError(
            f"{len(layers ^ frozen)} layers differ between what is quantized and what has frozen scales, first "
            f"{sorted(layers ^ frozen)[:3]}. The checkpoint's own targets and ignore list keep them the same "
            "(quant_scheme: checkpoint)."
        )


def _check_layer(name: str, module: nn.Module, scheme: QuantizationScheme) -> None:
    if hasattr(module, "base_layer"):
        from .lora import check_lora_layer

        check_lora_layer(name, module)
        module = module.base_layer
    # A subclass may compute something else in its forward, which the swap would silently drop.
    if type(module) is not nn.Linear:
        raise ValueError(
            f"Layer {name!r} is a {type(module).__module__}.{type(module).__name__}, and only torch.nn.Linear can be "
            f"quantized. Add {name!r} to `quant_ignore` if it may stay in high precision."
        )
    if "forward" in module.__dict__ or hasattr(module, "_hf_hook"):
        raise ValueError(
            f"Layer {name!r} has a replaced forward (device_map offloading, or a patch), so its quantized forward "
            "would never run. Load the model on one device: model_init_kwargs={'device_map': None}."
        )
    if not module.weight.is_floating_point():
        raise ValueError(f"Layer {name!r} holds {module.weight.dtype} weights. Load the model in high precision.")
    check_divisible(name, module.in_features, scheme, module.out_features)


def _check_tied(model: nn.Module, matched: Iterable[tuple[str, nn.Module]]) -> None:
    """A checkpoint stores a tied weight once, under one name: it cannot be both codes and an embedding."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    for name, module in matched:
        tied = names[id(getattr(module, "base_layer", module).weight)]
        if len(tied) > 1:
            raise ValueError(
                f"Layer {name!r} cannot be quantized: its weight is tied ({' = '.join(tied)}). Add {name!r} to "
                "`quant_ignore`, or untie the model (config.tie_word_embeddings=False)."
            )


def _check_routers(model: nn.Module, matched: Iterable[tuple[str, nn.Module]]) -> None:
    """A router beside fused experts stays in high precision: a flipped choice sends a token to another expert."""
    blocks = {name.rpartition(".")[0]: len(next(module.parameters())) for name, module in fused_experts(model)}
    for name, module in matched:
        block = name.rpartition(".")[0]
        if getattr(module, "base_layer", module).weight.shape[0] == blocks.get(block):
            raise ValueError(
                f"Layer {name!r} routes tokens to the experts of {block!r}, and routers are never quantized. Add "
                f"{name!r} to `quant_ignore`."
            )
