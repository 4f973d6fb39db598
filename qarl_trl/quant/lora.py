"""`LoraQuantLinear`: a peft LoRA layer whose forward multiplies by its quantized merged weight, `Q(W + s B A)`.

Invariant: nothing writes to the base weight. The merged weight exists only while it is quantized, so there is no merge to
undo and no drift (paper Sec. 3.1, step 2, with `theta = W + s B A`).
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, PeftType
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from .linear import LowBitLayer
from .quantize import LowBitWeight
from .scheme import MASTER_CAST_DTYPE
from .shards import whole


# Any other field of a LoraConfig may change what the layer computes. Fields of later peft versions count as such until we check them.
_PLAIN_LORA = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
}
_PLAIN_INIT = (True, False, "gaussian", "orthogonal")


@torch.no_grad()
def merged_weight(weight: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Tensor:
    """
    `W + scaling * B A`, float32 `(out, in)`, from the bfloat16 casts of weight `(out, in)`, A `(r, in)` and B `(out, r)`.

    With the casts every path agrees: an FSDP2 forward sees bfloat16 copies, sync and export see float32 master weights.
    For bfloat16 values this is peft's own merge, bit for bit, with or without autocast.
    """
    weight, lora_A, lora_B = (t.detach().to(MASTER_CAST_DTYPE) for t in (weight, lora_A, lora_B))
    with torch.autocast(weight.device.type, enabled=False):
        return (lora_B.float() @ lora_A.float()).mul_(scaling).add_(weight)


def factor_gradients(scaling: float, grad: Tensor, x: Tensor, lora_A: Tensor, lora_B: Tensor) -> tuple[Tensor, Tensor]:
    """
    The gradients of `lora_A` and `lora_B`, from the gradient of the output `(tokens, out)` and the input `(tokens, in)`.

    Straight-through: `W + s B A` gets the gradient of `Q(W + s B A)` unchanged; the chain rule gives those of A and B. It multiplies
    by the factors first, so it never makes an `(out, in)` gradient.
    """
    scaled = grad * scaling
    # The bfloat16 values that were merged, not the master weights.
    used_A, used_B = (t.to(MASTER_CAST_DTYPE).to(grad.dtype) for t in (lora_A, lora_B))
    return ((scaled @ used_B).t() @ x).to(lora_A.dtype), (scaled.t() @ (x @ used_A.t())).to(lora_B.dtype)


class LoraQuantLinear(LowBitLayer, lora.Linear):
    """
    `peft.tuners.lora.Linear` after [`qarl_trl.quant.apply_quantization`]; never constructed directly.

    It computes with the merged weight of the active adapter, or with `Q(W)` without one.
    """

    _z3_leaf = True  # as `deepspeed.utils.set_z3_leaf_modules` sets it: ZeRO-3 gathers W, A and B together

    def sources(self) -> tuple[str, ...]:
        """Names for the active adapter; `RuntimeError` while adapters are disabled."""
        if self.disable_adapters:
            raise RuntimeError("The base would be sent or saved instead of the policy. Leave `disable_adapter()`.")
        return self._names(self.adapter)

    def low_bit(self, *given: Tensor) -> LowBitWeight:
        """
        The low-bit merged weight of the active adapter, or of the base if none is active.

        `given` replace its own `sources`: base weight `(out, in)`, A `(r, in)` and B `(out, r)`, each whole or a `DTensor`.
        `RuntimeError` when peft has merged an adapter into the base weight, `ValueError` when several adapters are active.
        """
        if self.merged:
            raise RuntimeError(
                f"Merged adapters {self.merged_adapters} would count twice. Call `model.unmerge_adapter()`."
            )
        adapter = self.adapter
        scaling = self.scaling.get(adapter)

        def quantize(weight: Tensor, *factors: Tensor) -> LowBitWeight:
            merged = partial(merged_weight, scaling=scaling)
            return self._quantize(merged(*map(whole, (weight, *factors))) if factors else weight)

        own = tuple(map(self.get_parameter, self._names(adapter)))
        return self.low_bit_cache.get(adapter, own, given or None, quantize, others=(scaling,))

    @property
    def adapter(self) -> str:
        """The active adapter of this layer, "" if there is none."""
        if self.disable_adapters:
            return ""
        active = [name for name in self.active_adapters if name in self.lora_A]
        if len(active) > 1:
            raise ValueError(f"Several adapters are active ({active}). Leave one: model.set_adapter({active[0]!r}).")
        return active[0] if active else ""

    @staticmethod
    def _names(adapter: str) -> tuple[str, ...]:
        """Names of the base weight and, if there is an adapter, its two factors."""
        return ("base_layer.weight", f"lora_A.{adapter}.weight", f"lora_B.{adapter}.weight")[: 3 if adapter else 1]

    # Without peft's other arguments: adapters chosen per sample have no single merged weight.
    def forward(self, x: Tensor) -> Tensor:
        if not self.quantized_forward:
            return super().forward(x)
        adapter = self.adapter
        weight, *factors = map(self.get_parameter, self._names(adapter))
        chain = partial(factor_gradients, self.scaling[adapter]) if factors else None
        bias, gemm = self.base_layer.bias, self._get_gemm(x.device)
        return self._multiply(x, self.low_bit, gemm, *(factors or [weight]), bias=bias, chain=chain)


def check_lora_config(config: Any) -> None:
    """Refuse (`ValueError`) an adapter, by its `peft.PeftConfig`, whose forward is not `x (W + s B A)^T`."""
    if not isinstance(config, LoraConfig) or config.peft_type != PeftType.LORA:
        raise ValueError(
            f"peft_config is a {type(config).__name__}, and only LoRA adapters merge into a weight that can be quantized. "
            "Use peft.LoraConfig, or set quant_scheme='none'."
        )
    plain = LoraConfig()
    unset: tuple[Any, ...] = None, (), [], set(), {}  # peft leaves empty containers in fields that nobody set
    names = [field.name for field in fields(config) if field.name not in _PLAIN_LORA]
    changed = [name for name in names if getattr(config, name) not in (getattr(plain, name, None), *unset)]
    if config.init_lora_weights not in _PLAIN_INIT:  # others may rewrite the base weights
        changed.append("init_lora_weights")
    if changed:
        settings = ", ".join(f"{name}={getattr(config, name)!r}" for name in changed)
        raise ValueError(
            f"The adapter sets {settings}, so the learner's layer would differ from the engine's weight Q(W + s B A). Leave it out "
            "(lora_dropout: 0.0; TRL's ModelConfig has 0.05)."
        )


def check_adapters(model: nn.Module, matched: dict[str, nn.Module]) -> None:
    """Refuse (`ValueError`) adapters in the base `model` that do not merge into the layers to quantize (`matched`, by checkpoint name)."""
    quantized = {id(module) for module in matched.values()}
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and (id(module) not in quantized or type(module) is not lora.Linear):
            raise ValueError(
                f"Layer {name!r} ({type(module).__name__}) carries an adapter, but it is not quantized or not plain LoRA: the "
                "engine would compute something else. Take it out of the adapter's target_modules, or out of `quant_ignore`."
            )
        inside = [n for n in matched if n == name or n.startswith(f"{name}.")]
        if inside and isinstance(module, ModulesToSaveWrapper):
            raise ValueError(
                f"modules_to_save trains a copy of {name!r}, and quantization targets {inside[0]!r} in it. Give it an "
                "adapter (target_modules), or add it to `quant_ignore`."
            )
