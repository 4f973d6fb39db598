"""Which modules of a model a plan quantizes: one pass lists them, one refuses those that would not run as they are synced."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.utils import match_targets
from torch import nn

from .experts import PROJECTIONS, expert_modules, layer_names
from .gemm import GemmChoice, dequant_gemm, plain_gemm
from .linear import LowBitLayer
from .names import base_model, checkpoint_modules, is_peft_model
from .quantize import rows_together
from .scheme import effective_group_size, has_global_scale, scheme_for
from .shards import shape_of


# What transformers' `use_experts_implementation` says of a layout that `QuantExperts.forward` computes.
EXPERTS_LAYOUT = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
NO_HUB_KERNELS = (
    "use_kernels=True replaces the forward of mixture-of-experts blocks by kernels from the Hub, and the low-bit experts "
    "would never run. Load the model without it."
)
# Layers that vLLM loads into one matrix.
MERGED_BY_ENGINES = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
)


class Matched(NamedTuple):
    """A module to quantize."""

    name: str  # in a checkpoint
    module: nn.Module  # a linear layer, peft's layer around one, or a module of experts
    scheme: QuantizationScheme
    weights: dict[str, list[str]]  # of each parameter: names of the linear layers that a checkpoint has for it

    @property
    def base(self) -> nn.Module:
        """The module that owns the parameters: below an adapter, if it has one."""
        return getattr(self.module, "base_layer", self.module)


# The list -----------------------------------------------------------------------------------------------------------


def match_layers(model: nn.Module, plan: QuantizationConfig) -> list[Matched]:
    """
    The modules that `plan` quantizes, in module order.

    Containers, norms and activations that a wide pattern matches are passed over. `ValueError` when a group matches
    nothing, and for experts that cannot be quantized all alike.
    """
    experts, matched = dict(expert_modules(model)), []
    for name, module in checkpoint_modules(model):
        if name in experts:
            scheme, weights = _match_experts(name, module, plan)
        else:
            scheme, weights = scheme_for(name, getattr(module, "base_layer", module), plan), {"weight": [name]}
        found = scheme and Matched(name, module, scheme, weights)
        if found and any(len(shape_of(param)) >= 2 for param in found.base.parameters(recurse=False)):
            matched.append(found)
    for group in plan.config_groups.values():
        if not any(layer.scheme is group for layer in matched):
            raise ValueError(
                f"targets={group.targets} must match a layer, got none with ignore={plan.ignore}, so nothing would be quantized "
                "by them. Check the patterns against `model.named_modules()`."
            )
    return matched


def _match_experts(
    name: str, module: nn.Module, plan: QuantizationConfig
) -> tuple[QuantizationScheme | None, dict[str, list[str]]]:
    """
    The one scheme of a module of experts, which is matched as the linear layers that a checkpoint has in its place.

    As in llm-compressor; in addition, an ignore pattern that names the module or its class means all of it.
    """
    _check_layout(name, module)
    weights = {parameter: layer_names(name, module, parameter) for parameter in PROJECTIONS}
    if match_targets(name, module, plan.ignore or []):
        return None, weights
    linear = nn.Linear(1, 1, device="meta")
    schemes = {layer: scheme_for(layer, linear, plan) for layers in weights.values() for layer in layers}
    scheme, *others = schemes.values()
    if any(other is not scheme for other in others):
        left = [layer for layer, found in schemes.items() if found is None]
        found = f"{len(left)} that are not quantized (first: {left[0]!r})" if left else "several"
        raise ValueError(
            f"All of the {len(schemes)} expert layers of {name!r} must have one scheme, since an engine runs them in one kernel, got "
            f"{found}. Quantize all of them alike, or ignore all of them with 're:.*experts.*'."
        )
    return scheme, weights


def _check_layout(name: str, module: nn.Module) -> None:
    found = {key: getattr(module, key, None) for key in EXPERTS_LAYOUT}
    params = dict(module.named_parameters(recurse=False))
    shapes = {key: tuple(shape_of(param)) for key, param in params.items()}
    fit = False
    if found == EXPERTS_LAYOUT and list(shapes) == list(PROJECTIONS):
        (experts, rows, hidden), (experts_down, hidden_down, intermediate) = shapes.values()
        fit = (experts, rows, hidden) == (experts_down, 2 * intermediate, hidden_down)
    if not fit:
        raise ValueError(
            f"The experts {name!r} ({type(module).__name__}) have no low-bit forward: {found}, parameters {shapes}. "
            f"Needed: {EXPERTS_LAYOUT}, gate_up_proj (experts, 2 * intermediate, hidden) and down_proj (experts, "
            "hidden, intermediate). Such a model needs quant_scheme='none'."
        )


def merged_by_engines(model: nn.Module) -> Iterator[tuple[str, tuple[str, ...], list[nn.Module]]]:
    """Layers that vLLM loads into one matrix: name of their parent, their own names, the layers."""
    for parent_name, parent in model.named_modules():
        for names in MERGED_BY_ENGINES:
            layers = [getattr(parent, name, None) for name in names]
            if None not in layers:
                yield parent_name, names, layers


# What is refused ----------------------------------------------------------------------------------------------------


def check_model(model: nn.Module) -> None:
    """Refuse (`ValueError`) a model whose weights or layers are in the hands of another library, or quantized already."""
    if any(isinstance(module, LowBitLayer) for module in model.modules()):
        raise ValueError("The model is quantized already. Call `remove_quantization(model)` first.")
    foreign = getattr(getattr(model, "config", None), "quantization_config", None)
    if foreign is not None:
        raise ValueError(
            f"The model is quantized already (quantization_config={foreign}), so there are no high-precision master weights to "
            "train. Start from the unquantized checkpoint. A compressed-tensors checkpoint can be given by its path "
            "(model='...'), or loaded with qarl_trl.quant.start.load_master_weights."
        )
    adapted = hasattr(model, "peft_config") or any(hasattr(module, "lora_A") for module in model.modules())
    if adapted and not is_peft_model(model):
        raise ValueError(
            "The model carries adapters or LoRA layers without a PeftModel around them, which neither TRL nor the sync would "
            "see. Wrap it with peft.get_peft_model or peft.PeftModel.from_pretrained, or pass `peft_config`."
        )
    if getattr(model, "use_kernels", False) and any(expert_modules(model)):
        raise ValueError(NO_HUB_KERNELS)


def check_layers(
    model: nn.Module, layers: list[Matched], gemm: GemmChoice, frozen: Collection[str] | None = None
) -> None:
    """Refuse (`ValueError`) `layers` that cannot be quantized as asked; `frozen`: the layers of a checkpoint with frozen scales."""
    if is_peft_model(model):
        from .lora import check_adapters, check_lora_config, check_lora_layer

        for config in model.peft_config.values():
            check_lora_config(config)
        for layer in layers:
            if layer.base is not layer.module:
                check_lora_layer(layer.name, layer.module)
        check_adapters(base_model(model), {layer.name: layer.module for layer in layers})
    for layer in layers:
        _check_layer(layer)
        _check_sizes(layer)
        if has_global_scale(layer.scheme) and (frozen is not None or type(layer.module) is not nn.Linear):
            raise ValueError(
                f"Layer {layer.name!r}: a scheme with a global scale (NVFP4A16) does not go with frozen scales, LoRA or "
                "experts. Choose another scheme."
            )
        if len(layer.weights) > 1 and gemm not in (plain_gemm, dequant_gemm):
            raise ValueError(
                "quant_kernel='engine' does not go with a mixture-of-experts model: an engine multiplies the experts "
                f"{layer.name!r} by fused kernels that the learner does not call. Use quant_kernel='auto'."
            )
    _check_tied(model, layers)
    _check_routers(model, layers)
    _check_merged(model, layers)
    names = {name for layer in layers for names in layer.weights.values() for name in names}
    if frozen is not None and (differing := sorted(names ^ set(frozen))):
        raise ValueError(
            f"{len(differing)} layers differ between what is quantized and what has frozen scales, first {differing[:3]}. Use "
            "quant_scheme: checkpoint, which has one list for both."
        )


def check_shardable(plan: QuantizationConfig) -> None:
    """Refuse (`ValueError`) a `plan` whose layers no process may hold in parts."""
    if any(map(has_global_scale, plan.config_groups.values())):
        raise ValueError(
            "A scheme with a global scale (NVFP4A16) needs q, k, v (and gate, up) whole at once, and FSDP and ZeRO-3 cut them. "
            "Use DDP, or a scheme without a global scale."
        )


def _check_layer(layer: Matched) -> None:
    """Its forward must be the one that a low-bit forward stands for, and its weights must be numbers to round."""
    base, name = layer.base, layer.name
    # A subclass may compute something else in its forward, which the swap would silently drop.
    if len(layer.weights) == 1 and type(base) is not nn.Linear:
        raise ValueError(
            f"Layer {name!r} is a {type(base).__module__}.{type(base).__name__}, and only torch.nn.Linear can be "
            f"quantized. Add {name!r} to `quant_ignore` if it may stay in high precision."
        )
    if "forward" in base.__dict__ or hasattr(base, "_hf_hook"):
        raise ValueError(
            f"Layer {name!r} has a replaced forward (device_map offloading, or a patch), so its quantized forward "
            "would never run. Load the model on one device: model_init_kwargs={'device_map': None}."
        )
    for parameter in layer.weights:
        if not (weight := getattr(base, parameter)).is_floating_point():
            raise ValueError(f"Layer {name!r} holds {weight.dtype} weights. Load the model in high precision.")


def _check_sizes(layer: Matched) -> None:
    """The groups or blocks of the scheme divide the matrices `(out, in)` that a checkpoint and an engine have."""
    # Blocks padded at the edge are stored alike, but engines that merge layers (q, k, v) cannot load them.
    height, width = layer.scheme.weights.block_structure or (1, effective_group_size(layer.scheme) or 1)
    for parameter, names in layer.weights.items():
        *stack, columns = shape_of(getattr(layer.base, parameter))
        rows = math.prod(stack) // len(names)
        if rows % height or columns % width:
            raise ValueError(
                f"Layer {names[0]!r} has out_features={rows} and in_features={columns}, which groups of {height} x {width} weights do "
                "not divide. Add it to `quant_ignore`, choose a smaller `quant_group_size` (-1: one scale per channel), or a scheme "
                "without groups (FP8_DYNAMIC)."
            )
        if len(layer.weights) > 1 and rows % (together := rows_together(layer.scheme)):
            raise ValueError(
                f"Layer {names[0]!r} has out_features={rows}, and the zero points of {together} rows share a word, which experts must "
                "not. Use a symmetric scheme, or leave the experts in high precision: quant_ignore [lm_head, 're:.*experts.*']."
            )


def _check_tied(model: nn.Module, layers: list[Matched]) -> None:
    """A checkpoint stores a tied weight once, under one name: it cannot be both quantized values and an embedding."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    for layer in layers:
        for parameter in layer.weights:
            if len(tied := names[id(getattr(layer.base, parameter))]) > 1:
                raise ValueError(
                    f"Layer {layer.name!r} cannot be quantized: its weight is tied ({' = '.join(tied)}). Add it to "
                    "`quant_ignore`, or untie the model (config.tie_word_embeddings=False)."
                )


def _check_routers(model: nn.Module, layers: list[Matched]) -> None:
    """A router beside experts stays in high precision: a flipped choice sends a token to another expert."""
    blocks = {name.rpartition(".")[0]: shape_of(next(m.parameters()))[0] for name, m in expert_modules(model)}
    for layer in layers:
        block = layer.name.rpartition(".")[0]
        if len(layer.weights) == 1 and shape_of(layer.base.weight)[0] == blocks.get(block):
            raise ValueError(
                f"Layer {layer.name!r} routes tokens to the experts of {block!r}, and routers are never quantized. Add "
                "it to `quant_ignore`."
            )


def _check_merged(model: nn.Module, layers: list[Matched]) -> None:
    """Layers that an engine merges share a global scale, so all of them have one."""
    scaled = {id(layer.module) for layer in layers if has_global_scale(layer.scheme)}
    for parent, names, merged in merged_by_engines(model) if scaled else ():
        if 0 < sum(id(module) in scaled for module in merged) < len(merged):
            raise ValueError(
                f"Of {names} in {parent!r} only some would be quantized with a global scale, and the engine merges "
                "them into one layer. Quantize or ignore all of them."
            )
