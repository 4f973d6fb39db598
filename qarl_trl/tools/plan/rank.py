"""What one rank holds, item by item, and the four moments of a run at which it holds most."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ...quant.gathers import gathers_quantized
from . import formulas
from .formulas import Layer


GIB = 2**30
# CUDA context, NCCL, fragments of torch's allocator, and the CUDA graphs of a sleeping engine. Assumed, not measured.
RESERVE = 4 * GIB
# Of an awake engine beside weights and cache: its own passes of 4096 tokens and CUDA graphs. Assumed, not measured.
ENGINE_WORK = 3 * GIB
# DeepSpeed's bucket for reductions and the weights that it keeps gathered, with its default settings. Assumed.
ZERO3_BUFFERS = 4 * GIB
# Bytes an entry of a matrix that Muon steps: the copies of its Newton-Schulz iteration.
MUON_WORK = 12
# GPUs of a machine, whose processes share its memory.
MACHINE = 8


@dataclass(frozen=True)
class Parameter:
    """
    One parameter of the policy.

    Attributes:
        shape (`tuple[int, ...]`), size (`int`): Whole shape, and bytes per entry of the master weight.
        layer (`str`): The decoder layer that FSDP2 gathers it with, `""` outside of them.
        optimizer (`str`): `"muon"`, `"experts"` (Muon in place), `"adamw"`, or `""` for a frozen one.
        scheme (`QuantizationScheme`, *optional*): Of its low-bit weight, if it has one.
        pieces (`int`): Layers that a checkpoint stores it as.
        packed (`bool`): Whether FSDP2 may gather its quantized values instead of it.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    layer: str
    optimizer: str
    scheme: Any = None
    pieces: int = 1
    packed: bool = False

    @property
    def entries(self) -> int:
        return math.prod(self.shape)

    def quantized(self, ranks: int = 1, pieces: int = 1) -> int:
        """Bytes of its low-bit weight, or of the rows of each of `ranks`; 0 without a scheme."""
        rows = math.prod(self.shape[:-1]) // ranks
        return 0 if self.scheme is None else formulas.quantized_bytes(rows, self.shape[-1], self.scheme, pieces)


@dataclass(frozen=True)
class Run:
    """
    A run in numbers, bytes where nothing else is said.

    Attributes:
        parameters (`tuple[Parameter, ...]`), layer (`Layer`), layers, vocabulary (`int`): Of the policy and its forward.
        ranks (`int`), replicas (`int`): GPUs of one copy of the model, and copies under HSDP.
        sharded, zero3 (`bool`): Whether each rank has a part of every parameter, and whether DeepSpeed ZeRO-3 cuts, not FSDP2.
        memory (`int`): Of each GPU.
        rows, tokens (`int`): Of a micro-batch, and of the longest row.
        budget (`int`, *optional*): `max_tokens_per_pass`.
        checkpointing, half, reference (`bool`): Gradient checkpointing, 16-bit computation, a frozen second model.
        late_reduction (`bool`): Whether FSDP2 reduces gradients after the last of several micro-batches (`sync_each_batch: false`).
        utilization (`float`), sleep, served (`bool`), engine_ranks (`int`): Of the engine; utilization 0 is none. A server has
            GPUs of its own, of `memory` too.
        sequences (`int`): That an engine is given at once.
    """

    parameters: tuple[Parameter, ...]
    layer: Layer
    layers: int
    vocabulary: int
    ranks: int
    sharded: bool
    memory: int
    rows: int
    tokens: int
    budget: int | None
    checkpointing: bool
    half: bool
    utilization: float
    sleep: bool
    engine_ranks: int
    sequences: int = 1
    reference: bool = False
    late_reduction: bool = False
    served: bool = False
    zero3: bool = False
    replicas: int = 1

    @property
    def compute(self) -> int:
        return 2 if self.half else 4

    @property
    def residual(self) -> int:
        """Bytes of an entry between layers: autocast leaves them as the weights are, FSDP2 casts the weights."""
        return self.compute if self.sharded and self.half else self.parameters[0].size

    @property
    def beside(self) -> bool:
        """Whether an engine shares these GPUs."""
        return self.utilization > 0 and not self.served

    @property
    def synced(self) -> int:
        """Bytes of the checkpoint's tensors, which a weight sync moves and the engine keeps: low bits, bfloat16 for the rest."""
        own = (p for p in self.parameters if "lora_" not in p.name)
        return sum(p.quantized(pieces=p.pieces) if p.scheme else 2 * p.entries for p in own)

    def entries(self, parameter: Parameter) -> int:
        """Entries of a parameter on this rank."""
        if self.zero3:  # flat pieces
            return math.ceil(parameter.entries / self.ranks)
        return formulas.shard_entries(parameter.shape, self.ranks if self.sharded else 1)

    def size(self, parameter: Parameter) -> int:
        """Bytes of an entry of its master, its gradient and each moment: DeepSpeed's are float32, whatever it was given."""
        return 4 if self.zero3 else parameter.size

    def own_quantized(self, parameter: Parameter) -> int:
        """Bytes of the low-bit rows that this rank holds and FSDP2 gathers; 0 where it gathers weights."""
        gathered = parameter.packed and self.sharded and not self.zero3
        if not gathered or not gathers_quantized(parameter.shape, self.ranks, parameter.scheme):
            return 0
        return parameter.quantized(self.ranks)


def resident(run: Run) -> dict[str, int]:
    """Bytes that stay between the steps of a run, from its first update on."""
    master_weights = sum(run.entries(p) * run.size(p) for p in run.parameters)
    trained = [p for p in run.parameters if p.optimizer]
    state = sum(formulas.optimizer_bytes(run.entries(p), run.size(p), 1, p.optimizer) for p in trained)
    items = {
        "master weights": gradients(run) if run.zero3 else master_weights,
        "optimizer state": state,
        "quantized values (whole)": sum(p.quantized() for p in run.parameters if not run.own_quantized(p)),
        "quantized values (own rows)": sum(run.own_quantized(p) for p in run.parameters),
        "reference model": master_weights * run.reference,
        "buckets of DDP": gradients(run) if run.ranks > 1 and not run.sharded else 0,
    }
    if run.zero3:
        items["weights to gather"] = run.compute * sum(map(run.entries, run.parameters))
        items["gradients (kept)"] = gradients(run)
    return {name: size for name, size in items.items() if size}


def gradients(run: Run) -> int:
    """Bytes of the gradients: of the master weights' dtype, sharded as they are, from the first backward to the step."""
    return sum(run.entries(p) * run.size(p) for p in run.parameters if p.optimizer)


def accumulated(run: Run) -> int:
    """Bytes of the gradients before the last micro-batch of an update: whole and in float32 where FSDP2 reduces after it."""
    if run.sharded and not run.zero3 and run.late_reduction:
        return 4 * sum(p.entries for p in run.parameters if p.optimizer)
    return gradients(run)


def pass_tokens(run: Run) -> int:
    """Tokens of the largest pass: as many whole rows as the budget holds, or all rows padded."""
    whole = run.rows if run.budget is None else min(run.rows, max(1, run.budget // run.tokens))
    return whole * run.tokens


def activations(run: Run) -> int:
    """Bytes that a micro-batch has saved when its backward begins."""
    head = formulas.head_saved(run.layer.hidden, run.layer.head_dim, run.residual)
    if run.checkpointing:
        return int(run.rows * run.tokens * (run.layers * run.residual * run.layer.hidden + head))
    layer = formulas.layer_saved(run.layer, run.residual, run.compute)
    casts = run.layer.mlp is None and run.residual != run.compute  # autocast's copies of the weights are saved
    weights = run.compute * sum(p.entries for p in run.parameters if p.layer) if casts else 0
    return int(run.rows * run.tokens * (run.layers * layer + head)) + weights


def backward_work(run: Run) -> int:
    """
    Bytes that come and go in a backward: of the fused head or of a layer, whichever is more, and what FSDP2 gathers.

    With checkpointing the layer's own activations, computed again, are among them.
    """
    tokens, hidden = pass_tokens(run), run.layer.hidden
    tile = min(tokens, formulas.TILE[0]) * formulas.TILE[1] * run.compute
    head = 4 * hidden * (tokens + run.vocabulary) + tile
    # A layer's turn comes when what the head saved is free. Its checkpoint is among what it saves.
    layer = tokens * (
        formulas.layer_work(run.layer, run.residual, run.compute)
        - formulas.head_saved(hidden, run.layer.head_dim, run.residual)
    )
    if run.checkpointing:
        again = formulas.layer_saved(run.layer, run.residual, run.compute)
        layer += tokens * (again - run.residual * hidden)
    largest = max((p.entries for p in run.parameters if p.layer), default=0)
    layer += largest * 2 * run.compute  # what it multiplied by, and the product that is its gradient
    if not run.sharded:
        return int(max(head, layer + 4 * largest * (run.compute < 4)))
    # Two layers gathered, the gradient of one, and that in float32 to be reduced.
    sums: dict[str, int] = {}
    for p in run.parameters:
        gathered = run.own_quantized(p) * run.ranks or p.entries * run.compute
        sums[p.layer] = sums.get(p.layer, 0) + 2 * gathered + p.entries * (run.compute + 4)
    sums.pop("", 0)
    # What is outside of the layers is gathered from the forward to the end of the backward, when its gradient is reduced.
    outside = sum(p.entries for p in run.parameters if not p.layer)
    return int(2 * run.compute * outside + max(head, layer + max(sums.values()), 4 * outside))


def step_work(run: Run) -> int:
    """Bytes that come and go in the optimizer's step: AdamW's square roots (of all its entries at once), Muon's matrix."""
    adamw = 4 * sum(run.entries(p) for p in run.parameters if p.optimizer == "adamw")
    # A matrix is gathered first. Experts are stepped where they are, in passes that are small beside it.
    matrix = max((p.entries for p in run.parameters if p.optimizer == "muon"), default=0)
    return max(adamw, matrix * (MUON_WORK + 4 * (run.sharded and run.ranks > 1)))


def sync_work(run: Run) -> int:
    """Bytes that come and go in a weight sync: the largest parameter gathered in bfloat16, its copy, and the engine's, if beside."""
    largest = max(p.entries for p in run.parameters)
    return largest * (2 * run.sharded + 2 + 2 * run.beside)


def engine_weights(run: Run) -> int:
    """Bytes of the engine's weights on a rank, by equal parts."""
    return math.ceil(run.synced / run.engine_ranks) if run.utilization else 0


def engine_budget(run: Run) -> int:
    """Bytes that an awake engine takes, whatever it does with them."""
    return int(run.utilization * run.memory)


def cache_tokens(run: Run) -> int:
    """Tokens of the engine's key-value cache; below zero when not even its weights fit."""
    free = engine_budget(run) - engine_weights(run) - ENGINE_WORK
    layer = run.layer
    return free // formulas.cache_bytes(run.layers, layer.kv_heads, layer.head_dim, run.engine_ranks)


def checkpoint_bytes(run: Run) -> int:
    """Bytes of a whole training checkpoint: what is trained (of LoRA the adapter), the optimizer's state, the low-bit model."""
    whole = replace(run, sharded=False, zero3=False)
    return gradients(whole) + resident(whole).get("optimizer state", 0) + run.synced


def host_bytes(run: Run) -> int:
    """
    Bytes of a machine's own memory while the model loads: every process holds it, under FSDP2 one of a machine does.

    0 under ZeRO-3, which loads in pieces.
    """
    copies = 1 if run.sharded else min(run.ranks, MACHINE)
    return 0 if run.zero3 else copies * sum(p.entries * p.size for p in run.parameters)


def moments(run: Run) -> dict[str, dict[str, int]]:
    """The items of the four largest moments: "rollout", "sync", "backward" and "optimizer step"."""
    stays = resident(run) | {"reserve (assumed)": RESERVE}
    if run.zero3:
        stays["DeepSpeed's buffers (assumed)"] = ZERO3_BUFFERS
    awake = {"engine": engine_budget(run)} if run.beside else {}
    learning = stays if run.sleep else stays | awake
    found = {}
    if run.beside:
        found["rollout"] = stays | awake
    if run.utilization:
        weights = {"engine weights": engine_weights(run)} if awake and run.sleep else awake
        found["sync"] = stays | weights | {"largest parameter": sync_work(run)}
    before, after = ({}, {}) if run.zero3 else ({"gradients": accumulated(run)}, {"gradients": gradients(run)})
    backward = {"activations": activations(run), "work of a layer or the head": backward_work(run)}
    found["backward"] = learning | before | backward
    found["optimizer step"] = learning | after | {"work of the optimizer": step_work(run)}
    return found


def peaks(run: Run) -> dict[str, int]:
    """Bytes of each moment."""
    return {name: sum(items.values()) for name, items in moments(run).items()}


def best_utilization(run: Run) -> float:
    """The largest `vllm_gpu_memory_utilization`, in steps of 0.05, that every moment leaves room for; 0.0 for none."""
    tried = (u / 100 for u in range(5, 95, 5))
    return max((u for u in tried if max(peaks(replace(run, utilization=u)).values()) <= run.memory), default=0.0)
