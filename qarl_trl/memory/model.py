"""Whose memory is planned: a model without weights, made from its config and prepared as the trainer prepares the real one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ..optim import split_parameters
from ..quant import apply_quantization
from ..quant.experts import PROJECTIONS, QuantExperts
from ..quant.linear import LowBitLayer
from ..quant.model import quantized_modules
from .formulas import Layer, code_bytes, kept_bytes


# From the config.json of each on the Hugging Face Hub. A test compares the parameters with what the model cards say.
_QWEN3 = {"head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}
_MOE = _QWEN3 | {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
BUNDLED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen2.5-Math-1.5B": (
        "qwen2",
        {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
        | {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    ),
    "Qwen/Qwen2.5-Math-7B": (
        "qwen2",
        {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
        | {"num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    ),
    "Qwen/Qwen3-8B-Base": (
        "qwen3",
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, **_QWEN3},
    ),
    "Qwen/Qwen3-30B-A3B-Base": (
        "qwen3_moe",
        {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48}
        | {"num_attention_heads": 32, **_MOE},
    ),
    "Qwen/Qwen3-235B-A22B": (
        "qwen3_moe",
        {"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94}
        | {"num_attention_heads": 64, **_MOE},
    ),
}


def read_config(name: str) -> PretrainedConfig:
    """
    The config of a model folder, of a model of the Hub that is in the local cache, or from the bundled sizes; no download.

    Raises:
        ValueError: for a model whose sizes are not known here.
    """
    if name in BUNDLED and not Path(name).exists():
        kind, sizes = BUNDLED[name]
        return AutoConfig.for_model(kind, **sizes)
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        known = ", ".join(BUNDLED)
        raise ValueError(
            f"model_name_or_path={name!r} is no folder with a config.json that transformers reads, and its sizes are not bundled "
            f"({known}). Download its config.json and give that folder. ({str(error).strip().partition(chr(10))[0]})"
        ) from error
    vars(config).pop("quantization_config", None)
    return config


def skeleton(
    config: PretrainedConfig, dtype: torch.dtype, adapter: Any = None, plan: Any = None, **how: Any
) -> nn.Module:
    """
    The model of `config` on the meta device, with masters of `dtype`, peft's `adapter` and the low-bit layers of `plan`.

    `how` goes to [`~qarl_trl.quant.apply_quantization`], which raises `ValueError` for what it cannot quantize.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if adapter is not None:
        from peft import get_peft_model

        model = get_peft_model(model, adapter)
    return model if plan is None else apply_quantization(model, plan, **how)


@dataclass(frozen=True)
class Parameter:
    """One parameter: `(…)` shape, bytes per entry, the layer that FSDP2 gathers it with ("" outside of them), its optimizer."""

    name: str
    shape: tuple[int, ...]
    size: int
    layer: str
    optimizer: str  # "muon", "experts", "adamw", or "" for a frozen one

    @property
    def entries(self) -> int:
        return math.prod(self.shape)


def parameters(model: nn.Module, muon: bool) -> list[Parameter]:
    """The parameters of `model`, tied ones once, with the optimizer that `optim_muon=muon` gives each."""
    matrices, experts, _ = split_parameters(model) if muon else ([], {}, [])
    chosen = dict.fromkeys(matrices, "muon") | dict.fromkeys(experts, "experts")
    layers = tuple(f"{name}." for name, module in model.named_modules() if _is_layer(module))
    return [
        Parameter(
            name,
            tuple(param.shape),
            param.element_size(),
            next((layer for layer in layers if name.startswith(layer)), ""),
            chosen.get(name, "adamw") if param.requires_grad else "",
        )
        for name, param in model.named_parameters()
    ]


def _is_layer(module: nn.Module) -> bool:
    return type(module).__name__.endswith("DecoderLayer")


def low_bit_weights(model: nn.Module) -> Iterator[tuple[int, int, int, Any]]:
    """Rows, columns, layers in the checkpoint and scheme of every low-bit weight of `model`."""
    for _, module in quantized_modules(model):
        if isinstance(module, QuantExperts):
            for name, projections in PROJECTIONS.items():
                experts, rows, columns = getattr(module, name).shape
                yield experts * rows, columns, experts * len(projections), module.scheme
        else:
            yield module.out_features, module.in_features, 1, module.scheme


def codes(model: nn.Module) -> int:
    """Bytes of the low-bit weights as the learner keeps them: all experts of a parameter are one."""
    return sum(code_bytes(rows, columns, scheme) for rows, columns, _, scheme in low_bit_weights(model))


def kept(model: nn.Module) -> int:
    """Bytes that `quant_keep_dequantized` adds."""
    return sum(kept_bytes(rows, columns, scheme) for rows, columns, _, scheme in low_bit_weights(model))


def published(model: nn.Module) -> int:
    """Bytes of the checkpoint's tensors, which a publish moves and the engine keeps: low bits, and bfloat16 for the rest."""
    low_bit = {id(param) for _, m in quantized_modules(model) for param in _quantized_parameters(m)}
    plain = (p for n, p in model.named_parameters() if id(p) not in low_bit and "lora_" not in n)
    packed = sum(code_bytes(rows, columns, scheme, pieces) for rows, columns, pieces, scheme in low_bit_weights(model))
    return packed + sum(2 * param.numel() for param in plain)


def _quantized_parameters(module: LowBitLayer) -> list[nn.Parameter]:
    if isinstance(module, QuantExperts):
        return [getattr(module, name) for name in PROJECTIONS]
    return [getattr(module, "base_layer", module).weight]


def decoder_layer(model: nn.Module, config: PretrainedConfig, low_bit_forward: bool) -> Layer:
    """The sizes of a decoder layer of `model`, and the schemes of its forward; the last layer's, which has experts if any has."""
    text = config.get_text_config()
    schemes: dict[str, Any] = {}
    for name, module in quantized_modules(model) if low_bit_forward else ():
        schemes["attention" if "attn" in name else "mlp"] = module.scheme
    sizes = [p.shape for name, p in model.named_parameters() if name.endswith("experts.gate_up_proj")]
    experts, inner = (sizes[-1][0], sizes[-1][1] // 2) if sizes else (0, text.intermediate_size)
    return Layer(
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        inner=inner,
        experts=experts,
        top_k=text.num_experts_per_tok if experts else 0,
        query_norm=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        **schemes,
    )
