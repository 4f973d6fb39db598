"""
The paper's optimizer (QaRL, Sec. 4 "Training Setup" and Table 2): Muon for the hidden matrices, AdamW for the rest.

The arithmetic is torch's own, [`torch.optim.Muon`] and [`torch.optim.AdamW`]; this file only decides which parameter
goes where and makes the two look like one optimizer to the Trainer, the scheduler and the checkpoint.

Invariant: each trainable parameter is in exactly one group, and one step of [`MuonWithAdamW`] equals, bit for bit, one
step of the two torch optimizers run side by side.

Two properties of Muon to know. Its step has the same size whatever the size of the gradient, so with momentum in store
it moves even where TBPO drops every response. And at the paper's rate of 1e-6 the masters must be float32: a bfloat16
master of normal(0, 0.02) weights changed in 0.2% of its entries in one step.
"""

import contextlib
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names


if TYPE_CHECKING:
    from .config import QaRLConfig

logger = logging.getLogger(__name__)

# What `Trainer.get_decay_parameter_names` leaves without weight decay (a test holds the two together).
_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
# `gate_proj`, an ordinary hidden matrix, is not meant.
_ROUTER = re.compile(r"(?:^|\.)(?:gate|router|shared_expert_gate)\.")


class MuonWithAdamW(torch.optim.Optimizer):
    """
    One optimizer out of a [`torch.optim.Muon`] and a [`torch.optim.AdamW`] that share its groups and its state.

    `param_groups` holds Muon's groups first, so a logged learning rate is Muon's; `use_muon` marks them. A step fires
    torch's *global* step hooks three times, for Muon, for AdamW and last for this optimizer, when all weights are new.

    Args:
        muon ([`torch.optim.Muon`]):
            Optimizer of the hidden matrices.
        adamw ([`torch.optim.AdamW`]):
            Optimizer of all other parameters. The two may not share a parameter.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        for inner, use_muon in ((muon, True), (adamw, False)):
            for group in inner.param_groups:
                group["use_muon"] = use_muon
        super().__init__(muon.param_groups + adamw.param_groups, defaults={})
        self._muon, self._adamw = muon, adamw

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """
        Performs one step of both optimizers.

        Args:
            closure (`Callable`, *optional*):
                Reevaluates the model and returns the loss; called once.

        Returns:
            `float` or `None`: The closure's loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for inner, use_muon in ((self._muon, True), (self._adamw, False)):
            # Linked at every step, because `load_state_dict` replaces both attributes on this object only.
            inner.state = self.state
            inner.param_groups = [group for group in self.param_groups if group["use_muon"] is use_muon]
            inner.step()
        return loss


def _embedding_and_head_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of embeddings and output heads; submodules are asked too, so a wrapped model gives the same answer."""
    modules = []
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            modules.append(module)
        if hasattr(module, "get_input_embeddings") and hasattr(module, "get_output_embeddings"):
            with contextlib.suppress(NotImplementedError):  # transformers' answer for a backbone without tokens
                modules += [module.get_input_embeddings(), module.get_output_embeddings()]
    return {param for module in modules if module is not None for param in module.parameters()}


def split_parameters(model: nn.Module) -> tuple[list[str], list[str]]:
    """
    Splits the trainable parameters into Muon's and AdamW's.

    Muon gets the 2-D weights, except embeddings, output heads, mixture-of-experts routers and whatever the Trainer
    would not decay (norms, and biases of any shape). Fused experts (3-D) are AdamW's: torch's Muon takes matrices only.

    Args:
        model (`torch.nn.Module`):
            Model to optimize.

    Returns:
        `tuple[list[str], list[str]]`: Names of the hidden matrices and of all others, as in `named_parameters()`: a
        tied weight appears once.
    """
    decay = set(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY))
    excluded = _embedding_and_head_parameters(model)
    matrices, others = [], []
    for name, param in model.named_parameters():
        if param.requires_grad:
            hidden = param.ndim == 2 and name in decay and param not in excluded and not _ROUTER.search(name)
            (matrices if hidden else others).append(name)
    return matrices, others


def build_muon(model: nn.Module, args: "QaRLConfig") -> MuonWithAdamW:
    """
    Builds the optimizer of `optim_muon=True`.

    DDP and FSDP2 are supported; DeepSpeed and FSDP1, which hand the optimizer flat pieces of a matrix, are refused.

    Args:
        model (`torch.nn.Module`):
            Model to optimize, wrapped or not.
        args ([`QaRLConfig`]):
            Source of `learning_rate`, `muon_adamw_learning_rate`, `weight_decay`, `muon_*` and `adam_*`.

    Returns:
        [`MuonWithAdamW`]: Three groups: Muon's matrices, AdamW with and AdamW without weight decay.

    Raises:
        ValueError: If the model is run by DeepSpeed, or has no hidden matrix to train.
    """
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    # A DTensor (FSDP2, tensor parallel) needs no refusal: torch's Muon calls only tensor operations, which DTensor
    # defines on the whole matrix (it gathers and reduces inside), so Newton-Schulz sees all of it. A DeepSpeed shard
    # is a plain flat tensor and carries no such meaning.
    if args.deepspeed_plugin is not None or any(hasattr(param, "ds_id") for param in params.values()):
        raise ValueError(
            "optim_muon=True came with DeepSpeed, which hands the optimizer flat pieces of the weights; Muon needs "
            "whole matrices. Use DDP or FSDP2, or set optim_muon=False."
        )
    matrices, others = split_parameters(model)
    if not matrices:
        raise ValueError(
            f"optim_muon=True found no hidden 2-D matrix among {len(params)} trainable parameters; Muon needs at least "
            "one. Under FSDP1, which flattens them, use FSDP2 or DDP; otherwise set optim_muon=False."
        )
    fused = [params[name].numel() for name in others if params[name].ndim > 2]
    if fused:
        logger.warning(
            "%d parameters with more than two dimensions (%.0f%% of all trainable weights), such as fused experts, "
            "are trained by AdamW: torch's Muon takes matrices only.",
            len(fused),
            100 * sum(fused) / sum(param.numel() for param in params.values()),
        )

    muon = torch.optim.Muon(
        [params[name] for name in matrices],
        lr=args.learning_rate,
        weight_decay=args.weight_decay,
        momentum=args.muon_momentum,
        ns_steps=args.muon_ns_steps,
        adjust_lr_fn=args.muon_adjust_lr,
    )
    decay = set(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY))
    adamw = torch.optim.AdamW(
        [
            {"params": [params[name] for name in others if name in decay], "weight_decay": args.weight_decay},
            {"params": [params[name] for name in others if name not in decay], "weight_decay": 0.0},
        ],
        lr=args.learning_rate if args.muon_adamw_learning_rate is None else args.muon_adamw_learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )
    return MuonWithAdamW(muon, adamw)
