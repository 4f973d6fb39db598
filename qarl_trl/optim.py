"""The paper's optimizer (Sec. 4, Table 2): Muon for the hidden matrices and the experts, torch's AdamW for the rest.

The size of Muon's step does not depend on the gradient's, so its momentum moves weights even if TBPO drops every
response. At the paper's rate of 1e-6 master weights must be float32: one step changed only 0.2 % of the entries of a
bfloat16 weight drawn from normal(0, 0.02).
"""

import logging
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr as muon_rate
from transformers import PreTrainedModel, Trainer, TrainingArguments

from .quant.layers.experts import PROJECTIONS, expert_modules, has_known_layout


logger = logging.getLogger(__name__)

# Jordan et al. (2024): Nesterov momentum and Newton-Schulz iterations, the defaults of torch's Muon.
MOMENTUM = 0.95
NS_STEPS = 5

# Moonshot AI's scaling by a matrix's shape (Liu et al., 2025): updates are as large as AdamW's, so rates for AdamW in
# RL, such as the paper's 1e-6, carry over.
ADJUST_LR = "match_rms_adamw"

# Entries of the matrices of experts that step together: temporary tensors take about 10 bytes an entry.
ENTRIES_AT_ONCE = 2**26

# Does not match `gate_proj`, an ordinary hidden matrix.
_ROUTER = re.compile(r"(?:^|\.)(?:gate|router|shared_expert_gate)\.")


class ExpertMuon(torch.optim.Optimizer):
    """
    [`torch.optim.Muon`] for the fused weights of experts: a step of each matrix, in batches of matrices.

    On a CPU it equals torch's Muon bit for bit with float32 weights; of bfloat16 weights one in a hundred is a
    rounding step apart. A GPU's kernel for a batch may sum in another order than that for one matrix, and
    Newton-Schulz iterations run in bfloat16.

    A DTensor (FSDP2) must be sharded by experts: each process updates its own, without communication.

    Args:
        groups: Groups with `params`, each `(experts, projections * rows, columns)`, and the number of `projections`.
            Each `(rows, columns)` part is one matrix.
        defaults: Those of torch's Muon.
    """

    @torch.no_grad()
    def step(self) -> None:
        """
        Take one step.

        Raises:
            RuntimeError: if a DTensor is sharded within a matrix.
        """
        for group in self.param_groups:
            # By the names of the defaults, because a group also has `params`, `projections` and a scheduler's values.
            settings = {name: group[name] for name in self.defaults}
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group["projections"], settings)

    def _update(self, param: nn.Parameter, grad: Tensor, projections: int, settings: dict[str, Any]) -> None:
        """Update the matrices of a parameter, in batches."""
        state = self.state[param]
        # Before the return below: under FSDP2 a checkpoint gathers the momenta of all processes, so none may lack one.
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)

        weights = _local_matrices(param, projections)
        if len(weights) == 0:  # fewer experts than processes
            return
        grads = _local_matrices(grad, projections)
        momenta = _local_matrices(state["momentum_buffer"], projections)

        # The parts are views, so the function changes the parameter and its momentum in place.
        experts = max(1, ENTRIES_AT_ONCE // weights[0].numel())
        parts = zip(weights.split(experts), grads.split(experts), momenta.split(experts), strict=True)
        for weight, grad, momentum in parts:
            _step_matrices(weight, grad, momentum, **settings)


def _step_matrices(
    weights: Tensor,
    grads: Tensor,
    momenta: Tensor,
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_coefficients: tuple[float, float, float],
    ns_steps: int,
    eps: float,
    adjust_lr_fn: str | None,
) -> None:
    """
    torch's step of Muon (`torch.optim._muon`, 2.11 and 2.13) for all matrices at once.

    Args:
        weights: `(experts, projections, rows, columns)`; changed in place, as `momenta` is.
        grads: Their gradients, same shape.
        momenta: Their momenta, same shape.
        lr: Learning rate.
        weight_decay: Decay, times the learning rate.
        momentum: Decay of the momentum.
        nesterov: Whether the gradient counts beside the momentum.
        ns_coefficients: Coefficients of a Newton-Schulz iteration.
        ns_steps: Number of iterations.
        eps: Smallest norm by which a matrix is divided.
        adjust_lr_fn: How the rate follows from the shape of a matrix.
    """
    momenta.lerp_(grads, 1 - momentum)
    update = grads.lerp(momenta, momentum) if nesterov else momenta
    # `(experts * projections, rows, columns)`: gate and up of an expert are two matrices, each with a step of its own.
    update = orthogonalize(update.flatten(0, 1), ns_coefficients, ns_steps, eps)

    rate = muon_rate(float(lr), adjust_lr_fn, weights.shape[-2:])
    # The decay takes the plain rate, the step one that is scaled by the shape, as in torch.
    weights.mul_(1 - float(lr) * weight_decay)
    weights.add_(update.view(weights.shape), alpha=-rate)


def orthogonalize(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """
    Newton-Schulz iterations of torch's Muon, in bfloat16, for many matrices at once.

    Args:
        matrices: `(matrices, rows, columns)`.
        coefficients: Of the gradient step, of its third and of its fifth power.
        steps: Number of iterations.
        eps: Smallest norm by which a matrix is divided.

    Returns:
        bfloat16, same shape: about the nearest matrices with orthonormal rows or columns.
    """
    first, third, fifth = coefficients
    # Products are formed over the longer side, so the Gram matrix is the smaller of the two.
    is_tall = matrices.shape[1] > matrices.shape[2]

    result = matrices.bfloat16()
    if is_tall:
        result = result.mT
    norms = torch.linalg.vector_norm(result, dim=(1, 2), keepdim=True)
    # Divided by the Frobenius norm, no singular value is above 1, as the iterations need.
    result = result / norms.clamp(min=eps)

    for _ in range(steps):
        gram = result @ result.mT
        update = torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth)
        result = torch.baddbmm(result, update, result, beta=first)
    if is_tall:
        result = result.mT
    return result.contiguous()


def _local_matrices(tensor: Any, projections: int) -> Tensor:
    """A view `(experts, projections, rows, columns)` of the matrices in the experts of this process."""
    local = tensor
    if isinstance(tensor, DTensor):
        _check_whole_experts(tensor)
        local = tensor.to_local()

    # `unflatten`, because `view` refuses parameters that are transposed in memory.
    return local.unflatten(1, (projections, -1))


def _check_whole_experts(tensor: DTensor) -> None:
    """`RuntimeError` if a process holds parts of matrices, for which Muon's step is another."""
    for placement in tensor.placements:
        if not (placement.is_replicate() or placement.is_shard(0)):
            raise RuntimeError(
                f"Muon needs whole experts: {tuple(tensor.shape)} must be sharded over dimension 0, got "
                f"{tensor.placements}. Shard with FSDP2's default placement, or set optim_muon=False."
            )


class MuonWithAdamW(torch.optim.Optimizer):
    """
    A [`torch.optim.Muon`], an [`ExpertMuon`] and a [`torch.optim.AdamW`] that share its groups and its state.

    `param_groups` has Muon's groups first, so that the logged learning rate is Muon's; then those of the experts.
    `part` names a group's optimizer. One step equals a step of each part, bit for bit. It calls torch's *global* step
    hooks for each part, and at the end for this optimizer, when all weights are new.

    Args:
        muon: The optimizer of the hidden matrices.
        experts: The optimizer of the experts, or `None` for a dense model.
        adamw: The optimizer of the rest.
    """

    def __init__(self, muon: torch.optim.Muon, experts: ExpertMuon | None, adamw: torch.optim.AdamW) -> None:
        self._parts: dict[str, torch.optim.Optimizer] = {"muon": muon}
        if experts is not None:
            self._parts["experts"] = experts
        self._parts["adamw"] = adamw

        groups = []
        for name, part in self._parts.items():
            # Not the group itself: this object's `load_state_dict` and the scheduler write to these dicts, and `step`
            # hands them to the parts.
            groups += [group | {"part": name} for group in part.param_groups]
        super().__init__(groups, defaults={})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """
        Take one step of all parts.

        Args:
            closure: Always `None`, which accelerate passes.
        """
        for name, part in self._parts.items():
            # Set at every step, because `load_state_dict` replaces both attributes only on this object.
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group["part"] == name]
            part.step()


class ParameterSplit(NamedTuple):
    """
    Names of the trainable parameters of a model, as in `named_parameters()`, by optimizer.

    Attributes:
        matrices: Muon's matrices.
        experts: The fused weights of experts, with the number of projections in an expert's rows.
        others: AdamW's parameters.
    """

    matrices: list[str]
    experts: dict[str, int]
    others: list[str]


def split_parameters(model: nn.Module) -> ParameterSplit:
    """
    Say which optimizer trains each parameter.

    Muon gets the fused weights of routed experts and the 2-D weights, except embeddings, output heads, routers and
    parameters that the Trainer would not decay (norms, and biases of any shape). AdamW trains the rest.

    Args:
        model: A causal language model, also wrapped by FSDP2, DDP or PEFT. Frozen parameters are left out.
    """
    decayed = _decayed_names(model)
    embeddings_and_heads = _embedding_and_head_parameters(model)
    projections = _expert_projections(model)

    def is_hidden_matrix(name: str, param: nn.Parameter) -> bool:
        is_layer = param not in embeddings_and_heads and not _ROUTER.search(name)
        return is_layer and param.ndim == 2 and name in decayed

    split = ParameterSplit(matrices=[], experts={}, others=[])
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue

        # First, because experts are not 2-D, and their `gate_up_proj` must not be left to AdamW.
        if param in projections:
            split.experts[name] = projections[param]
        elif is_hidden_matrix(name, param):
            split.matrices.append(name)
        else:
            split.others.append(name)
    return split


def _decayed_names(model: nn.Module) -> list[str]:
    """Names of the parameters that the Trainer decays."""
    # A method that does not use the trainer.
    return Trainer.get_decay_parameter_names(None, model)


def _embedding_and_head_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of embeddings and output heads."""
    layers: list[Any] = []
    # All submodules, because a wrapper has no `get_output_embeddings`.
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            layers.append(module)
        if isinstance(module, PreTrainedModel):
            layers.append(module.get_output_embeddings())

    parameters = set()
    for layer in layers:
        # A model without a head returns `None`.
        if layer is not None:
            parameters.update(layer.parameters())
    return parameters


def _expert_projections(model: nn.Module) -> dict[nn.Parameter, int]:
    """Weights `(experts, out, in)` of routed experts, with the number of projections in an expert's rows."""
    projections = {}
    for _, module in expert_modules(model):
        # In another layout the rows of gate and up are mixed, or rows and columns are exchanged.
        if not has_known_layout(module):
            continue

        for name, param in module.named_parameters(recurse=False):
            if name in PROJECTIONS and param.ndim == 3:
                projections[param] = len(PROJECTIONS[name])
    return projections


def build_muon(model: nn.Module, args: TrainingArguments) -> MuonWithAdamW:
    """
    The optimizer of `optim_muon=True`: groups of Muon and of its experts, then AdamW with and without weight decay.

    Under FSDP2 torch's Muon sees a DTensor as the whole matrix. Each Newton-Schulz iteration gathers a matrix twice
    and its Gram matrix once, or for `rows > columns` sums the Gram matrix twice, in bfloat16: in five iterations 20 to
    30 bytes per entry, or up to 20. [`QaRLConfig`] refuses DeepSpeed, whose stages 1 to 3 use flat pieces.

    Args:
        model: The model to train.
        args: `learning_rate` and `weight_decay` count for all parts; `adam_beta1`, `adam_beta2` and `adam_epsilon`
            for AdamW.

    Raises:
        ValueError: if there is neither a hidden matrix nor an expert to train.
    """
    split = split_parameters(model)
    if not split.matrices and not split.experts:
        raise ValueError("optim_muon=True found no hidden 2-D matrix. Use FSDP2 or DDP, not FSDP1, or turn it off.")

    params = dict(model.named_parameters())
    stacked = [name for name in split.others if params[name].ndim > 2]
    if stacked:
        logger.warning(
            "Muon takes matrices, and experts in the layout of Qwen3-MoE. AdamW trains %s.", ", ".join(stacked)
        )

    muon = _muon([params[name] for name in split.matrices], args)

    experts = None
    if split.experts:
        counts = {params[name]: count for name, count in split.experts.items()}
        experts = _expert_muon(counts, muon.defaults)

    # The rest is split as the Trainer splits it for AdamW.
    decayed_names = _decayed_names(model)
    decayed = [params[name] for name in split.others if name in decayed_names]
    undecayed = [params[name] for name in split.others if name not in decayed_names]
    return MuonWithAdamW(muon, experts, _adamw(decayed, undecayed, args))


def _muon(matrices: list[nn.Parameter], args: TrainingArguments) -> torch.optim.Muon:
    """torch's Muon, in one group; a model whose matrices are all experts leaves it empty."""
    return torch.optim.Muon(
        # As a group, because torch refuses an empty list of parameters.
        [{"params": matrices}],
        lr=args.learning_rate,
        weight_decay=args.weight_decay,
        momentum=MOMENTUM,
        ns_steps=NS_STEPS,
        adjust_lr_fn=ADJUST_LR,
    )


def _expert_muon(projections: dict[nn.Parameter, int], defaults: dict[str, Any]) -> ExpertMuon:
    """Muon of the experts, with a group for each number of projections."""
    groups = []
    for count in sorted(set(projections.values())):
        params = [param for param, projection_count in projections.items() if projection_count == count]
        groups.append({"params": params, "projections": count})
    return ExpertMuon(groups, defaults)


def _adamw(decayed: list[nn.Parameter], undecayed: list[nn.Parameter], args: TrainingArguments) -> torch.optim.AdamW:
    """torch's AdamW, in two groups."""
    groups = [
        {"params": decayed, "weight_decay": args.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )
