"""What one rank holds, item by item, and the four moments of a run at which it holds most."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...quant.gathers import gathers_quantized
from . import formulas


if TYPE_CHECKING:
    from .formulas import Layer
    from .model import Parameter


GIB = 2**30
# CUDA context, NCCL, fragments of torch's allocator, and the CUDA graphs of a sleeping engine. Assumed, not measured.
RESERVE = 4 * GIB
# Of an awake engine beside weights and cache: its own passes of 4096 tokens and CUDA graphs. Assumed, not measured.
ENGINE_WORK = 3 * GIB
# DeepSpeed's defaults, in entries: `reduce_bucket_size` (in float32: `_compat.keep_float32`), `stage3_max_live_parameters`,
# `sub_group_size`.
ZERO3_BUCKET, ZERO3_LIVE, ZERO3_GROUP = 5 * 10**8, 10**9, 10**9


@dataclass(frozen=True)
class Run:
    """
    A run in numbers. Bytes where nothing else is said.

    Attributes:
        parameters (`tuple[Parameter, ...]`): Of the policy.
        layer (`Layer`), layers, vocabulary (`int`): Of its forward.
        quantized values, synced (`int`): All low-bit weights, a weight sync.
        reference (`bool`): Whether there is a second, frozen model (beta > 0 without LoRA).
        ranks (`int`), sharded (`bool`), memory (`int`): GPUs (of one copy under HSDP), whether each has a part, bytes of each.
        rows, tokens (`int`): Of a micro-batch, and of the longest row.
        budget (`int`, *optional*): `max_tokens_per_pass`.
        checkpointing, half (`bool`): Gradient checkpointing, 16-bit computation.
        utilization (`float`), sleep (`bool`), engine_ranks (`int`): Of the engine; utilization 0 is none.
        accumulates (`bool`): Whether FSDP2 reduces after the last of several micro-batches (`sync_each_batch: false`).
        served (`bool`): Whether the engine is a server, which has GPUs of its own, of `memory` too.
        zero3 (`bool`): Sharded by DeepSpeed ZeRO-3, not FSDP2.
        replicas (`int`): Copies under HSDP, of `ranks` GPUs each.
    """

    parameters: tuple[Parameter, ...]
    layer: Layer
    layers: int
    vocabulary: int
    quantized: int
    synced: int
    reference: bool
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
    accumulates: bool = False
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

    def entries(self, parameter: Parameter) -> int:
        if self.zero3:  # flat pieces
            return math.ceil(parameter.entries / self.ranks)
        return formulas.shard_entries(parameter.shape, self.ranks if self.sharded else 1)

    def size(self, parameter: Parameter) -> int:
        """Bytes of an entry of its master, its gradient and each moment: DeepSpeed's are float32, whatever it was given."""
        return 4 if self.zero3 else parameter.size

    def own_quantized(self, parameter: Parameter) -> int:
        """Bytes of the low-bit rows that each rank holds of a parameter, and FSDP2 gathers; 0 where it gathers weights."""
        scheme = parameter.scheme
        if (
            not self.sharded
            or self.zero3
            or scheme is None
            or not gathers_quantized(parameter.shape, self.ranks, scheme)
        ):
            return 0
        return formulas.quantized_bytes(math.prod(parameter.shape[:-1]) // self.ranks, parameter.shape[-1], scheme)


def resident(run: Run) -> dict[str, int]:
    """Bytes that stay between the steps of a run, from its first update on."""
    own = [(p, run.entries(p)) for p in run.parameters]
    master_weights = sum(entries * run.size(p) for p, entries in own)
    state = sum(_state(p, entries, run.size(p)) for p, entries in own)
    quantized = [
        (formulas.quantized_bytes(math.prod(p.shape[:-1]), p.shape[-1], p.scheme), run.own_quantized(p))
        for p in run.parameters
        if run.own_quantized(p)
    ]
    items = {"master_weights": master_weights, "optimizer state": state}
    if run.zero3:
        items["master_weights"] = gradients(run)
        items["weights to gather"] = run.compute * sum(entries for _, entries in own)
        items["gradients (kept)"] = gradients(run)
        items["bucket of DeepSpeed"] = 4 * ZERO3_BUCKET
    items["quantized values (whole)"] = run.quantized - sum(whole for whole, _ in quantized)
    items |= {"quantized values (own rows)": sum(own for _, own in quantized)}
    if run.reference:
        items["reference model"] = master_weights
    if run.ranks > 1 and not run.sharded:
        items["buckets of DDP"] = gradients(run)
    return {name: size for name, size in items.items() if size}


def _state(parameter: Parameter, entries: int, size: int) -> int:
    if not parameter.optimizer:
        return 0
    kind = "adamw" if parameter.optimizer == "adamw" else "muon"
    return formulas.optimizer_bytes(entries, size, 1, kind)


def gradients(run: Run) -> int:
    """Bytes of the gradients: of the master weights' dtype, sharded as they are, from the first backward to the step."""
    return sum(run.entries(p) * run.size(p) for p in run.parameters if p.optimizer)


def accumulated(run: Run) -> int:
    """Bytes of the gradients before the last micro-batch of an update: whole and in float32 where FSDP2 reduces after it."""
    if run.sharded and not run.zero3 and run.accumulates:
        return 4 * sum(p.entries for p in run.parameters if p.optimizer)
    return gradients(run)


def pass_tokens(run: Run) -> int:
    """Tokens of the largest pass: as many whole rows as the budget holds, or all rows padded."""
    whole = run.rows if run.budget is None else min(run.rows, max(1, run.budget // run.tokens))
    return whole * run.tokens


def activations(run: Run) -> dict[str, int]:
    """Bytes of a micro-batch when its backward begins."""
    layer = formulas.layer_saved(run.layer, run.residual, run.compute)
    head = formulas.head_saved(run.layer.hidden, run.layer.head_dim, run.residual)
    tokens = run.rows * run.tokens
    if not run.checkpointing:
        found = {"activations": int(tokens * (run.layers * layer + head))}
        if run.layer.mlp is None and run.residual != run.compute:  # autocast's copies of the weights, which are saved
            found["weights in bfloat16"] = run.compute * sum(p.entries for p in run.parameters if p.layer)
        return found
    saved = tokens * (run.layers * run.residual * run.layer.hidden + head)
    return {"activations": int(saved)}


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
    sums: dict[str, int] = {}
    for p in run.parameters:
        # Two layers gathered, the gradient of one, and that in float32 to be reduced.
        gathered = run.own_quantized(p) * run.ranks or p.entries * run.compute
        sums[p.layer] = sums.get(p.layer, 0) + 2 * gathered + p.entries * (run.compute + 4)
    sums.pop("", 0)
    if run.zero3:  # what its next turn is near for stays gathered
        live = min(ZERO3_LIVE, sum(p.entries for p in run.parameters))
        sums["live"] = live * run.compute + max(p.entries for p in run.parameters) * (run.compute + 4)
    # What is outside of the layers is gathered from the forward to the end of the backward, when its gradient is reduced.
    outside = sum(p.entries for p in run.parameters if not p.layer)
    layer += max(sums.values())
    return int(2 * run.compute * outside + max(head, layer, 4 * outside))


def step_work(run: Run) -> int:
    """Bytes that come and go in the optimizer's step: AdamW's square roots (of all its entries at once), Muon's matrix."""
    adamw = 4 * sum(run.entries(p) for p in run.parameters if p.optimizer == "adamw")
    if run.zero3:  # a copy of some gradients at a time; the Trainer's AdamW is fused, without square roots
        return min(adamw, 4 * ZERO3_GROUP)
    ranks = run.ranks if run.sharded else 1
    muon = [
        formulas.muon_work(p.entries, ranks, p.optimizer == "experts")
        for p in run.parameters
        if p.optimizer in ("muon", "experts")
    ]
    return max(adamw, *muon, 0)


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


def checkpoint_bytes(run: Run) -> int:
    """Bytes of a whole training checkpoint: what is trained (of LoRA the adapter), the optimizer's state, the low-bit model."""
    whole = replace(run, sharded=False, zero3=False)
    return gradients(whole) + resident(whole).get("optimizer state", 0) + run.synced


def cache_tokens(run: Run) -> int:
    """Tokens of the engine's key-value cache; below zero when not even its weights fit."""
    free = engine_budget(run) - engine_weights(run) - ENGINE_WORK
    layer = run.layer
    return free // formulas.cache_bytes(run.layers, layer.kv_heads, layer.head_dim, run.engine_ranks)


def moments(run: Run) -> dict[str, dict[str, int]]:
    """The items of the four largest moments: "rollout", "sync", "backward" and "optimizer step"."""
    stays = resident(run) | {"reserve (assumed)": RESERVE}
    awake = {"engine": engine_budget(run)} if run.beside else {}
    learning = stays if run.sleep else stays | awake
    found = {}
    if run.beside:
        found["rollout"] = stays | awake
    if run.utilization:
        weights = {"engine weights": engine_weights(run)} if awake and run.sleep else awake
        found["sync"] = stays | weights | {"largest parameter": sync_work(run)}
    before, after = ({}, {}) if run.zero3 else ({"gradients": accumulated(run)}, {"gradients": gradients(run)})
    found["backward"] = learning | before | activations(run) | {"work of a layer or the head": backward_work(run)}
    found["optimizer step"] = learning | after | {"work of the optimizer": step_work(run)}
    return found


def peaks(run: Run) -> dict[str, int]:
    """Bytes of each moment."""
    return {name: sum(items.values()) for name, items in moments(run).items()}


def best_utilization(run: Run) -> float:
    """The largest `vllm_gpu_memory_utilization`, in steps of 0.05, that every moment leaves room for; 0.0 for none."""
    return max(
        (u / 100 for u in range(5, 95, 5) if max(peaks(replace(run, utilization=u / 100)).values()) <= run.memory),
        default=0.0,
    )


def changes(run: Run) -> Iterator[tuple[str, Run]]:
    """Settings that save memory, by the field to change, with the run that results."""
    if run.beside and not run.sleep:
        yield "vllm_enable_sleep_mode: true", replace(run, sleep=True)
    if (best := run.beside and best_utilization(run)) and best < run.utilization:
        yield f"vllm_gpu_memory_utilization: {best:g}", replace(run, utilization=best)
    if not run.checkpointing:
        yield "gradient_checkpointing: true", replace(run, checkpointing=True)
    if accumulated(run) > gradients(run):
        yield "sync_each_batch: true (in accelerator_config; the default)", replace(run, accumulates=False)
    if run.budget is None or run.budget > run.tokens:
        yield f"max_tokens_per_pass: {run.tokens}", replace(run, budget=run.tokens)
    if run.rows > 1:
        yield "per_device_train_batch_size: 1 (and more gradient_accumulation_steps)", replace(run, rows=1)
    if run.ranks > 1 and not run.sharded:
        yield "--sharding fsdp2 (recipes/accelerate/fsdp2.yaml)", replace(run, sharded=True)
    if run.replicas > 1:
        yield "--replicas 1", replace(run, ranks=run.ranks * run.replicas, sharded=True, replicas=1)
    elif run.sharded or run.ranks == 1:
        kind = "ZeRO-3" if run.zero3 else "FSDP2"
        yield f"--gpus {2 * run.ranks} with {kind}", replace(run, ranks=2 * run.ranks, sharded=True)
