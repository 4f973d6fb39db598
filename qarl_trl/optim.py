"""The paper's optimizer (Sec. 4 and Table 2): Muon for the hidden matrices and the experts, torch's AdamW for the rest.

The size of Muon's step does not depend on the gradient's, so its momentum moves weights even if TBPO drops every response. At the
paper's rate of 1e-6 master weights must be float32: one step changed only 0.2 % of the entries of a bfloat16 weight drawn from
normal(0, 0.02).
"""

import logging
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim._muon import muon as muon_step
from transformers import PreTrainedModel, Trainer, TrainingArguments

from .quant.convert import EXPERTS_LAYOUT
from .quant.experts import PROJECTIONS, expert_modules


logger = logging.getLogger(__name__)

# Jordan et al. (2024): Nesterov momentum and Newton-Schulz iterations, the defaults of torch's Muon.
MOMENTUM, NS_STEPS = 0.95, 5
# Moonshot AI's scaling by a matrix's shape (Liu et al., 2025): updates are as large as AdamW's, so rates for AdamW in RL, such as
# the paper's 1e-6, carry over.
ADJUST_LR = "match_rms_adamw"
# Does not match `gate_proj`, an ordinary hidden matrix.
_ROUTER = re.compile(r"(?:^|\.)(?:gate|router|shared_expert_gate)\.")


def _own_matrices(tensor: Any, projections: int) -> list[Tensor]:
    """Views of the experts' matrices in this process."""
    sharded = isinstance(tensor, DTensor)
    if sharded and not all(placement.is_replicate() or placement.is_shard(0) for placement in tensor.placements):
        raise RuntimeError(
            f"Muon needs whole experts: {tuple(tensor.shape)} must be sharded over dimension 0, got {tensor.placements}. "
            "Shard with FSDP2's default placement, or set optim_muon=False."
        )
    own = tensor.to_local() if sharded else tensor
    # `unflatten`, because `view` refuses parameters that are transposed in memory.
    return [matrix for expert in own.unflatten(1, (projections, -1)) for matrix in expert]


class ExpertMuon(torch.optim.Optimizer):
    """
    [`torch.optim.Muon`] for parameters `(experts, projections * rows, columns)`; each `(rows, columns)` part is one matrix.

    Args: groups with `params` and `projections`; `defaults` of torch's Muon, whose function updates one matrix after the other.
    A DTensor (FSDP2) must be sharded by experts: each process updates its own, without communication.
    """

    @torch.no_grad()
    def step(self) -> None:
        """One step. `RuntimeError` if a DTensor is sharded within a matrix."""
        for group in self.param_groups:
            settings = {name: group[name] for name in self.defaults}
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(param.grad)
                    tensors = param, param.grad, state["momentum_buffer"]
                    own = (_own_matrices(tensor, group["projections"]) for tensor in tensors)
                    for matrices in zip(*own, strict=True):
                        muon_step(*([matrix] for matrix in matrices), has_complex=False, **settings)


class MuonWithAdamW(torch.optim.Optimizer):
    """
    A [`torch.optim.Muon`], an [`ExpertMuon`] and a [`torch.optim.AdamW`] that share its groups and its state.

    `param_groups` has Muon's groups first, so that the logged learning rate is Muon's; then those of the experts. `part` names a
    group's optimizer. One step equals a step of each part, bit for bit. It calls torch's *global* step hooks for each part, and at
    the end for this optimizer, when all weights are new.
    """

    def __init__(self, muon: torch.optim.Muon, experts: ExpertMuon | None, adamw: torch.optim.AdamW) -> None:
        self._parts = {"muon": muon} | ({"experts": experts} if experts else {}) | {"adamw": adamw}
        groups = [group | {"part": part} for part, inner in self._parts.items() for group in inner.param_groups]
        super().__init__(groups, defaults={})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step of all parts; accelerate passes `closure=None`."""
        for part, inner in self._parts.items():
            # Set at every step, because `load_state_dict` replaces both attributes only on this object.
            inner.state = self.state
            inner.param_groups = [group for group in self.param_groups if group["part"] == part]
            inner.step()


def _embedding_and_head_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of embeddings and output heads; also asks submodules, so a wrapped model gives the same result."""
    modules: list[Any] = list(model.modules())
    layers = [module for module in modules if isinstance(module, nn.Embedding)]
    layers += [module.get_output_embeddings() for module in modules if isinstance(module, PreTrainedModel)]
    return {param for layer in layers if layer is not None for param in layer.parameters()}


def _expert_projections(model: nn.Module) -> dict[nn.Parameter, int]:
    """Weights `(experts, out, in)` of routed experts, with the number of projections in an expert's rows."""
    return {
        param: len(PROJECTIONS[name])
        for _, module in expert_modules(model)
        if all(getattr(module, key, None) == value for key, value in EXPERTS_LAYOUT.items())
        for name, param in module.named_parameters(recurse=False)
        if name in PROJECTIONS and param.ndim == 3
    }


def split_parameters(model: nn.Module) -> tuple[list[str], dict[str, int], list[str]]:
    """
    Names, as in `named_parameters()`, of Muon's matrices, of its experts with their numbers of projections, and of the rest.

    Muon gets the fused weights of routed experts and the 2-D weights, except embeddings, output heads, routers and parameters
    that the Trainer would not decay (norms, and biases of any shape). AdamW trains the rest.
    """
    decay = Trainer.get_decay_parameter_names(None, model)  # a method that does not use the trainer
    excluded, projections = _embedding_and_head_parameters(model), _expert_projections(model)
    matrices, experts, others = list[str](), dict[str, int](), list[str]()
    for name, param in model.named_parameters():
        hidden = param.ndim == 2 and name in decay and param not in excluded and not _ROUTER.search(name)
        if param.requires_grad and param in projections:
            experts[name] = projections[param]
        elif param.requires_grad:
            (matrices if hidden else others).append(name)
    return matrices, experts, others


def build_muon(model: nn.Module, args: TrainingArguments) -> MuonWithAdamW:
    """
    The optimizer of `optim_muon=True`: groups of Muon and of its experts, then AdamW with and without weight decay.

    Under FSDP2 torch's Muon sees a DTensor as the whole matrix. Each Newton-Schulz iteration gathers a matrix twice and its Gram
    matrix once, or for `rows > columns` sums the Gram matrix twice, in bfloat16: in five iterations 20 to 30 bytes per entry, or up
    to 20. [`QaRLConfig`] refuses DeepSpeed, whose stages 1 to 3 use flat pieces. `ValueError` if there is neither a hidden matrix nor
    an expert to train.
    """
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    matrices, experts, others = split_parameters(model)
    if not matrices and not experts:
        raise ValueError("optim_muon=True found no hidden 2-D matrix. Use FSDP2 or DDP, not FSDP1, or turn it off.")
    if stacked := ", ".join(name for name in others if params[name].ndim > 2):
        logger.warning("Muon takes matrices, and experts in the layout of Qwen3-MoE. AdamW trains %s.", stacked)
    hidden = [{"params": [params[name] for name in matrices]}]
    rates = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    muon = torch.optim.Muon(hidden, momentum=MOMENTUM, ns_steps=NS_STEPS, adjust_lr_fn=ADJUST_LR, **rates)
    groups = [
        {"params": [params[name] for name in experts if experts[name] == count], "projections": count}
        for count in sorted(set(experts.values()))
    ]
    decay = Trainer.get_decay_parameter_names(None, model)
    decayed = {"params": [params[name] for name in others if name in decay], "weight_decay": args.weight_decay}
    undecayed = {"params": [params[name] for name in others if name not in decay], "weight_decay": 0.0}
    betas = args.adam_beta1, args.adam_beta2
    adamw = torch.optim.AdamW([decayed, undecayed], lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)
    return MuonWithAdamW(muon, ExpertMuon(groups, muon.defaults) if groups else None, adamw)
