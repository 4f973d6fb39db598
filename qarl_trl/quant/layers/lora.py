"""`LoraQuantLinear`: a peft LoRA layer whose forward multiplies by its quantized merged weight, `Q(W + s B A)`.

Invariant: nothing writes to the base weight. The merged weight exists only while it is quantized, so there is no merge
to undo and no drift (paper Sec. 3.1, step 2, with `theta = W + s B A`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, PeftType
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from ..quantize import LowBitWeight
from ..scheme import MASTER_CAST_DTYPE
from ..sharding.shards import whole
from .layer import LowBitLayer


# Any other field of a LoraConfig may change what the layer computes. Fields of later peft versions count as such until
# we check them.
_PLAIN_LORA = {
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "init_lora_weights",
    "inference_mode",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
}
# Characters of a value in a message.
_SHOWN = 80
_PLAIN_INIT = (True, False, "gaussian", "orthogonal")


@torch.no_grad()
def merged_weight(weight: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Tensor:
    """
    `W + scaling * B A`, from the bfloat16 casts of all three.

    With the casts every path agrees: an FSDP2 forward sees bfloat16 copies, sync and export see float32 master
    weights. For bfloat16 values this is peft's own merge, bit for bit, with or without autocast.

    Args:
        weight: W, `(out, in)`.
        lora_A: A, `(r, in)`.
        lora_B: B, `(out, r)`.
        scaling: peft's `lora_alpha / r`, or its rank-stabilized form.

    Returns:
        float32 `(out, in)`.
    """
    weight = weight.detach().to(MASTER_CAST_DTYPE)
    lora_A = lora_A.detach().to(MASTER_CAST_DTYPE)
    lora_B = lora_B.detach().to(MASTER_CAST_DTYPE)

    # A product of two bfloat16 numbers is exact in float32, so only the sums round.
    with torch.autocast(weight.device.type, enabled=False):
        update = lora_B.float() @ lora_A.float()
        return update.mul_(scaling).add_(weight)


def factor_gradients(scaling: float, grad: Tensor, x: Tensor, lora_A: Tensor, lora_B: Tensor) -> tuple[Tensor, Tensor]:
    """
    The gradients of A and B, straight through: `W + s B A` gets the gradient of `Q(W + s B A)` unchanged.

    It multiplies by the factors first, so it never makes an `(out, in)` gradient.

    Args:
        scaling: s.
        grad: Gradient of the output, `(tokens, out)`.
        x: The input, `(tokens, in)`.
        lora_A: A, `(r, in)`.
        lora_B: B, `(out, r)`.

    Returns:
        Gradients of A and B, in their dtypes.
    """
    scaled = grad * scaling
    # The bfloat16 values that were merged, not the master weights.
    used_A = lora_A.to(MASTER_CAST_DTYPE).to(grad.dtype)
    used_B = lora_B.to(MASTER_CAST_DTYPE).to(grad.dtype)

    # `(tokens, r)` in between: it costs `r` columns in place of `in` or `out`.
    grad_A = (scaled @ used_B).t() @ x
    grad_B = scaled.t() @ (x @ used_A.t())
    return grad_A.to(lora_A.dtype), grad_B.to(lora_B.dtype)


class LoraQuantLinear(LowBitLayer, lora.Linear):
    """
    `peft.tuners.lora.Linear` after [`qarl_trl.quant.apply_quantization`]; never constructed directly.

    It computes with the merged weight of the active adapter, or with `Q(W)` without one. Its low-bit weights are named
    by adapter, "" for none: a run keeps that one as its reference model.
    """

    _z3_leaf = True  # as `deepspeed.utils.set_z3_leaf_modules` sets it: ZeRO-3 gathers W, A and B together

    @property
    def adapter(self) -> str:
        """The active adapter of this layer, "" if there is none. `ValueError` if several are active."""
        if self.disable_adapters:
            return ""

        # peft activates adapters for the whole model, also those that this layer lacks.
        active = [name for name in self.active_adapters if name in self.lora_A]
        if len(active) > 1:
            raise ValueError(f"Several adapters are active ({active}). Leave one: model.set_adapter({active[0]!r}).")
        return active[0] if active else ""

    def weight_names(self) -> tuple[str, ...]:
        """The active adapter. `RuntimeError` while adapters are disabled."""
        if self.disable_adapters:
            raise RuntimeError("The base would be sent or saved instead of the policy. Leave `disable_adapter()`.")
        return (self.adapter,)

    def source_names(self, name: str) -> tuple[str, ...]:
        """The base weight and, for an adapter, its two factors."""
        if not name:
            return ("base_layer.weight",)
        return ("base_layer.weight", f"lora_A.{name}.weight", f"lora_B.{name}.weight")

    def to_quantize(self, name: str, *sources: Tensor) -> Tensor:
        """The merged weight, or the base. `RuntimeError` when peft has merged an adapter into the base weight."""
        if self.merged:
            raise RuntimeError(
                f"Merged adapters {self.merged_adapters} would count twice. Call `model.unmerge_adapter()`."
            )

        weight, *factors = sources
        if not factors:
            return weight.detach()

        # Not by the rows of a process, because each row of `B A` needs all of A.
        lora_A, lora_B = factors
        return merged_weight(whole(weight), whole(lora_A), whole(lora_B), self.scaling[name])

    def depends_on(self, name: str) -> tuple[Any, ...]:
        # peft sets the scaling without a write to a parameter, and merges through `.data`, which leaves no version.
        return (self.scaling.get(name), self.merged)

    def low_bit(self, name: str | None = None) -> LowBitWeight:
        # Not the name of `weight_names`, which refuses a disabled adapter: a forward then multiplies by the base.
        return super().low_bit(self.adapter if name is None else name)

    def trains_without_gradients(self, sources: tuple[Tensor, ...]) -> bool:
        # A pass of the reference disables the adapter, so its factors ask for no gradient then.
        return False

    def unload_and_optionally_merge_module(self, **_: Any) -> Any:
        """peft calls it for each layer of `unload` and `merge_and_unload`. `RuntimeError`."""
        raise RuntimeError(
            "peft would leave the layers with an adapter in high precision, beside low-bit ones. For the merged "
            "master weights call remove_quantization(model) of qarl_trl.quant first; save_model writes the low-bit "
            "model."
        )

    # Without peft's other arguments: adapters chosen per sample have no single merged weight.
    def forward(self, x: Tensor) -> Tensor:
        if not self.quantized_forward:
            return super().forward(x)

        adapter = self.adapter
        gemm = self.choose_gemm(x.device)
        bias = self.base_layer.bias
        if not adapter:
            return self.multiply(x, adapter, gemm, self.base_layer.weight, bias=bias)

        # The base weight is no source here: it is not trained, so its gradient would be computed for nothing.
        factors = (self.lora_A[adapter].weight, self.lora_B[adapter].weight)
        chain_rule = partial(factor_gradients, self.scaling[adapter])
        return self.multiply(x, adapter, gemm, *factors, bias=bias, source_gradients=chain_rule)


def check_lora_config(config: Any) -> None:
    """Refuse (`ValueError`) an adapter, by its `peft.PeftConfig`, whose forward is not `x (W + s B A)^T`."""
    if not isinstance(config, LoraConfig) or config.peft_type != PeftType.LORA:
        raise ValueError(
            f"peft_config is a {type(config).__name__}, "
            "and only LoRA adapters merge into a weight that can be quantized. "
            "Use peft.LoraConfig, or set quant_scheme='none'."
        )

    changed = []
    plain = LoraConfig()
    for field in fields(config):
        value = getattr(config, field.name)
        # peft leaves empty containers in fields that nobody set.
        usual: tuple[Any, ...] = (getattr(plain, field.name, None), None, (), [], set(), {})
        if field.name not in _PLAIN_LORA and value not in usual:
            changed.append(field.name)
    if config.init_lora_weights not in _PLAIN_INIT:  # others may rewrite the base weights
        changed.append("init_lora_weights")

    if "ensure_weight_tying" in changed:
        raise ValueError(
            "The adapter sets ensure_weight_tying=True, which is not supported: leave modules_to_save of a tied "
            "embedding out."
        )
    if changed:
        settings = ", ".join(f"{name}={_shown(getattr(config, name))}" for name in changed)
        raise ValueError(
            f"The adapter sets {settings}, so the learner's layer would differ from the engine's weight Q(W + s B A). "
            f"{_advice_on(changed)}"
        )


def _shown(value: Any) -> str:
    """A value for a message, not longer than a line. A set has an order that differs from run to run."""
    text = repr(sorted(value) if isinstance(value, set) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _advice_on(changed: Sequence[str]) -> str:
    """What to do about these settings of an adapter."""
    advice = []
    if "target_parameters" in changed:
        # PEFT sets them itself, from `all-linear`.
        advice.append("Beside experts name the layers: lora_target_modules: [q_proj, k_proj, v_proj, o_proj].")
    if "trainable_token_indices" in changed:
        advice.append(
            "TRL sets trainable_token_indices for tokens that chat_template_path adds: add them to model and "
            "tokenizer first."
        )
    others = [name for name in changed if name not in ("lora_dropout", "trainable_token_indices")]
    if others:
        advice.append(f"Leave {', '.join(others)} out.")
    if "lora_dropout" in changed:
        advice.append("Set lora_dropout: 0.0 (TRL's ModelConfig has 0.05).")
    return " ".join(advice)


def check_adapters(model: nn.Module, matched: dict[str, nn.Module]) -> None:
    """
    Refuse (`ValueError`) adapters that do not merge into the layers to quantize.

    Args:
        model: The base model, with peft's layers in it.
        matched: The layers to quantize, by checkpoint name.
    """
    quantized = {id(module) for module in matched.values()}
    for name, module in model.named_modules():
        # Exactly `lora.Linear`: other layers of peft, also its subclasses, may compute something else.
        if isinstance(module, BaseTunerLayer) and (id(module) not in quantized or type(module) is not lora.Linear):
            raise ValueError(
                f"Layer {name!r} ({type(module).__name__}) carries an adapter, "
                "but it is not quantized or not plain LoRA: the engine would compute something else. "
                "Take it out of the adapter's target_modules, or out of `quant_ignore`."
            )

        if isinstance(module, ModulesToSaveWrapper):
            inside = [layer for layer in matched if layer == name or layer.startswith(f"{name}.")]
            if inside:
                raise ValueError(
                    f"modules_to_save trains a copy of {name!r}, and quantization targets {inside[0]!r} in it. "
                    "Give it an adapter (target_modules), or add it to `quant_ignore`."
                )
