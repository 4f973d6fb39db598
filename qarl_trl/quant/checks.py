"""What `apply_quantization` refuses in a model: everything that would run other weights than are synced."""

from __future__ import annotations

from collections.abc import Iterable

from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from torch import nn

from .experts import PROJECTIONS, Matched, expert_modules
from .gemm import ProductChoice, dequant_gemm, plain_gemm
from .linear import LowBitLayer
from .names import base_model, is_peft_model
from .scheme import check_divisible, has_global_scale
from .zero import shape_of


# What transformers' `use_experts_implementation` says of a layout that `QuantExperts.forward` computes.
EXPERTS_LAYOUT = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}

NO_HUB_KERNELS = (
    "use_kernels=True replaces the forward of mixture-of-experts blocks by kernels from the Hub, and the low-bit experts "
    "would never run. Load the model without it."
)


def check_model(model: nn.Module) -> None:
    """Refuse (`ValueError`) a model whose master weights or layers are in the hands of another library."""
    if any(isinstance(m, LowBitLayer) for m in model.modules()):
        raise ValueError("The model is quantized already. Call `remove_quantization(model)` first.")
    config = getattr(model, "config", None)
    foreign = getattr(config, "quantization_config", None)
    if foreign is not None or getattr(model, "is_quantized", False):
        raise ValueError(
            f"The model is quantized already (quantization_config={foreign}), so there are no high-precision master weights to "
            "train. Start from the unquantized checkpoint. A compressed-tensors checkpoint can be given by its path "
            "(model='...'), or loaded with qarl_trl.quant.start.load_master_weights."
        )
    adapted = hasattr(model, "peft_config") or any(hasattr(module, "lora_A") for module in model.modules())
    if adapted and not is_peft_model(model):
        raise ValueError(
            "The model carries adapters or LoRA layers without a PeftModel around them, so their names are not known, and "
            "neither TRL nor the sync would see them. Wrap it with peft: peft.PeftModel.from_pretrained(base_model, "
            "adapter, is_trainable=True), get_peft_model(base_model, config), or pass `peft_config`."
        )
    for name, module in expert_modules(model):
        if getattr(model, "use_kernels", False):
            raise ValueError(NO_HUB_KERNELS)
        _check_layout(name, module)


def check_layers(
    model: nn.Module, experts: list[Matched], linears: list[Matched], gemm: ProductChoice, frozen: bool
) -> None:
    """Refuse (`ValueError`) layers (or the adapter layers around them) that cannot be quantized as they are asked to be."""
    if is_peft_model(model):
        from .lora import check_adapters, check_lora_config

        for config in model.peft_config.values():
            check_lora_config(config)
        check_adapters(base_model(model), {name: module for name, module, _ in linears})
    for name, module, scheme in linears:
        _check_linear(name, module, scheme)
    _check_tied(model, linears)
    _check_routers(model, linears)
    for name, module, scheme in [*linears, *experts]:
        if has_global_scale(scheme) and (frozen or type(module) is not nn.Linear):
            raise ValueError(
                f"Layer {name!r}: a scheme with a global scale (NVFP4A16) does not go with frozen scales, LoRA or experts. "
                "Choose another scheme."
            )
    for name, module, scheme in experts:
        _check_experts(name, module, scheme, gemm)


def check_shardable(plan: QuantizationConfig) -> None:
    """Refuse (`ValueError`) a `plan` whose layers no process may hold in parts."""
    if any(map(has_global_scale, plan.config_groups.values())):
        raise ValueError(
            "A scheme with a global scale (NVFP4A16) needs q, k, v (and gate, up) whole at once, and FSDP and ZeRO-3 cut them. "
            "Use DDP, or a scheme without a global scale."
        )


def check_qparams(layers: set[str], frozen: set[str]) -> None:
    """Refuse frozen scales of other layers than are quantized."""
    if layers != frozen:
        raise ValueError(
            f"{len(layers ^ frozen)} layers differ between what is quantized and what has frozen scales, first "
            f"{sorted(layers ^ frozen)[:3]}. Use quant_scheme: checkpoint, which has one list for both."
        )


def _check_linear(name: str, module: nn.Module, scheme: QuantizationScheme) -> None:
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
    _check_forward(name, module)
    if not module.weight.is_floating_point():
        raise ValueError(f"Layer {name!r} holds {module.weight.dtype} weights. Load the model in high precision.")
    check_divisible(name, module.in_features, scheme, module.out_features)


def _check_forward(name: str, module: nn.Module) -> None:
    if "forward" in module.__dict__ or hasattr(module, "_hf_hook"):
        raise ValueError(
            f"Layer {name!r} has a replaced forward (device_map offloading, or a patch), so its quantized forward "
            "would never run. Load the model on one device: model_init_kwargs={'device_map': None}."
        )


def _check_layout(name: str, module: nn.Module) -> None:
    found = {key: getattr(module, key, None) for key in EXPERTS_LAYOUT}
    shapes = {key: tuple(shape_of(p)) for key, p in module.named_parameters(recurse=False)}
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
    for key, param in module.named_parameters(recurse=False):
        if not param.is_floating_point():
            raise ValueError(f"{name}.{key} holds {param.dtype} weights. Load the model in high precision.")


def _check_experts(name: str, module: nn.Module, scheme: QuantizationScheme, gemm: ProductChoice) -> None:
    for parameter, projections in PROJECTIONS.items():
        _, rows, in_features = shape_of(getattr(module, parameter))
        rows, layers = rows // len(projections), f"{name}.*.{projections[0]}"
        check_divisible(layers, in_features, scheme, rows)
        if rows % 16 or in_features % 16:
            raise ValueError(
                f"The layers {layers!r} have out_features={rows} and in_features={in_features}, and the products of all experts "
                "at once take multiples of 16. Leave the experts in high precision: quant_ignore [lm_head, 're:.*experts.*']."
            )
    _check_forward(name, module)
    if gemm not in (plain_gemm, dequant_gemm):
        raise ValueError(
            "quant_kernel='engine' does not go with a mixture-of-experts model: an engine multiplies the experts "
            f"{name!r} by fused kernels that the learner does not call. Use quant_kernel='auto'."
        )


def _check_tied(model: nn.Module, linears: Iterable[Matched]) -> None:
    """A checkpoint stores a tied weight once, under one name: it cannot be both quantized values and an embedding."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    for name, module, _ in linears:
        tied = names[id(getattr(module, "base_layer", module).weight)]
        if len(tied) > 1:
            raise ValueError(
                f"Layer {name!r} cannot be quantized: its weight is tied ({' = '.join(tied)}). Add {name!r} to "
                "`quant_ignore`, or untie the model (config.tie_word_embeddings=False)."
            )


def _check_routers(model: nn.Module, linears: Iterable[Matched]) -> None:
    """A router beside experts stays in high precision: a flipped choice sends a token to another expert."""
    blocks = {name.rpartition(".")[0]: shape_of(next(m.parameters()))[0] for name, m in expert_modules(model)}
    for name, module, _ in linears:
        block = name.rpartition(".")[0]
        if shape_of(getattr(module, "base_layer", module).weight)[0] == blocks.get(block):
            raise ValueError(
                f"Layer {name!r} routes tokens to the experts of {block!r}, and routers are never quantized. Add "
                f"{name!r} to `quant_ignore`."
            )
