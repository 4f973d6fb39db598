"""The paper's optimizer (Sec. 4 and Table 2): torch's Muon for the hidden matrices, torch's AdamW for the rest.

This file decides which parameter goes where, and makes the two one optimizer to the Trainer, the scheduler and the checkpoint.
Two properties of Muon to know. Its step has the same size whatever the size of the gradient, so with momentum in store it moves
even where TBPO drops every response. And at the paper's rate of 1e-6 the masters must be float32: a bfloat16 master of
normal(0, 0.02) weights changed in 0.2% of its entries in one step.
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
    A [`torch.optim.Muon`] and a [`torch.optim.AdamW`] over different parameters, which share its groups and its state.

    `param_groups` holds Muon's groups first, so a logged learning rate is Muon's; `use_muon` marks them. One step equals, bit
    for bit, a step of the two side by side. It fires torch's *global* step hooks three times, for Muon, for AdamW and last for
    this optimizer, when all weights are new.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        for inner, use_muon in ((muon, True), (adamw, False)):
            for group in inner.param_groups:
                group["use_muon"] = use_muon
        super().__init__(muon.param_groups + adamw.param_groups, defaults={})
        self._muon, self._adamw = muon, adamw

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of both optimizers; `closure` is called once, and its loss is returned."""
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
    Names of the trainable parameters that are Muon's and that are AdamW's, as in `named_parameters()`.

    Muon gets the 2-D weights, except embeddings, output heads, mixture-of-experts routers and whatever the Trainer
    would not decay (norms, and biases of any shape). Fused experts (3-D) are AdamW's: torch's Muon takes matrices only.
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
    The optimizer of `optim_muon=True`: one group of Muon, then AdamW with and AdamW without weight decay.

    A DTensor (FSDP2) is whole to Muon: it calls only tensor operations, which DTensor defines on the whole matrix. DeepSpeed,
    which hands out flat pieces, is refused by [`QaRLConfig`].

    Raises:
        ValueError: when the model has no hidden matrix to train.
    """
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
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
