"""
What each GPU of a run holds: `ITEMS`, a table of named formulas, and the four moments at which most is held.

A new kind of memory is one more line of the table. Every formula is compared with real tensors in tests/tools/plan and tests/slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ...quant.gathers import gathers_quantized
from ...quant.scheme import effective_group_size, has_global_scale, support_of


GIB = 2**30
# CUDA context, NCCL, fragments of torch's allocator, and the CUDA graphs of a sleeping engine. Assumed, not measured.
RESERVE = 4 * GIB
# Of an awake engine beside weights and cache: its own passes of 4096 tokens and CUDA graphs. Assumed, not measured.
ENGINE_WORK = 3 * GIB
# DeepSpeed's bucket for reductions and the weights that it keeps gathered, with its default settings. Assumed.
ZERO3_BUFFERS = 4 * GIB
# Bytes an entry of a matrix that Muon steps: the copies of its Newton-Schulz iteration.
MUON_WORK = 12
# Logits exist as one tile: TRL's `kernels/chunked_logprob.py` multiplies this many tokens by this much of the vocabulary.
TILE = (4096, 32768)
# GPUs of a machine, whose processes share its memory.
MACHINE = 8


class Parameter(NamedTuple):
    """One parameter of the policy."""

    name: str
    shape: tuple[int, ...]
    size: int  # bytes per entry of the master weight
    layer: str  # the decoder layer that FSDP2 gathers it with, "" outside of them
    optimizer: str  # "muon", "experts" (Muon in place), "adamw", or "" for a frozen one
    scheme: Any = None  # the `QuantizationScheme` of its low-bit weight, if it has one
    pieces: int = 1  # layers that a checkpoint stores it as
    packed: bool = False  # FSDP2 may gather its quantized values instead of it

    @property
    def entries(self) -> int:
        return math.prod(self.shape)

    def quantized(self, ranks: int = 1, pieces: int = 1) -> int:
        """Bytes of its low-bit weight, or of the rows of each of `ranks`; 0 without a scheme."""
        rows = math.prod(self.shape[:-1]) // ranks
        return 0 if self.scheme is None else quantized_bytes(rows, self.shape[-1], self.scheme, pieces)


@dataclass(frozen=True)
class Run:
    """A run in numbers, bytes where nothing else is said."""

    parameters: tuple[Parameter, ...]
    config: Any  # of the language model, as transformers has it
    low_bit_forward: bool  # `quantize_learner`, with a scheme
    memory: int  # of each GPU, also of a server's
    rows: int  # of a micro-batch
    tokens: int  # of the longest row
    budget: int | None  # `max_tokens_per_pass`
    checkpointing: bool  # of gradients
    half: bool  # computes in 16 bits
    engine: str  # "colocate", "server" (on GPUs of its own), "" without one
    utilization: float  # `vllm_gpu_memory_utilization`
    sleep: bool
    engine_ranks: int = 1
    ranks: int = 1  # GPUs of one copy of the model
    sharding: str = "ddp"  # or "fsdp2", "zero3"
    reference: bool = False  # a frozen second model

    @property
    def ddp(self) -> bool:
        return self.ranks > 1 and self.sharding == "ddp"

    @property
    def fsdp2(self) -> bool:
        return self.ranks > 1 and self.sharding == "fsdp2"

    @property
    def zero3(self) -> bool:
        return self.ranks > 1 and self.sharding == "zero3"

    @property
    def beside(self) -> bool:
        """Whether an engine shares these GPUs."""
        return self.engine == "colocate"

    @property
    def head_dim(self) -> int:
        config = self.config
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    @property
    def compute(self) -> int:
        return 2 if self.half else 4

    @property
    def residual(self) -> int:
        """Bytes of an entry between layers: autocast leaves them as the weights are, FSDP2 and ZeRO-3 cast the weights."""
        return self.compute if (self.fsdp2 or self.zero3) and self.half else self.parameters[0].size

    def own(self, parameter: Parameter) -> tuple[int, int]:
        """Entries of a parameter on this GPU, and bytes of each, of its gradient and of its moments."""
        if self.zero3:  # flat pieces, in float32 whatever DeepSpeed was given
            return math.ceil(parameter.entries / self.ranks), 4
        if not self.fsdp2 or not parameter.shape:
            return parameter.entries, parameter.size
        # FSDP2 cuts dimension 0 and pads every part to the longest.
        return math.ceil(parameter.shape[0] / self.ranks) * math.prod(parameter.shape[1:]), parameter.size

    def gathered(self, parameter: Parameter) -> int:
        """Bytes of the low-bit rows that this GPU keeps and FSDP2 gathers; 0 where it gathers weights."""
        if not parameter.packed or not self.fsdp2:
            return 0
        whole_rows = gathers_quantized(parameter.shape, self.ranks, parameter.scheme)
        return parameter.quantized(self.ranks) if whole_rows else 0


def quantized_bytes(rows: int, columns: int, scheme: Any, pieces: int = 1) -> int:
    """Bytes of a low-bit weight `(rows, columns)` as a checkpoint stores it, in `pieces` layers of as many rows each."""
    weights = scheme.weights
    if has_global_scale(scheme):
        return rows * columns // 2 + rows * columns // weights.group_size + 4 * pieces
    if weights.block_structure is not None:
        height, width = weights.block_structure
        scales = math.ceil(rows / height) * math.ceil(columns / width)
    else:
        scales = rows * (columns // (effective_group_size(scheme) or columns))
    if scheme.format != "pack-quantized":
        return rows * columns + 2 * scales
    zero_points = 0 if weights.symmetric else 4 * math.ceil(rows / 8) * (scales // rows)
    return 4 * rows * math.ceil(columns * weights.num_bits / 32) + 2 * scales + zero_points + 16 * pieces


# The learner --------------------------------------------------------------------------------------------------------


def trained_bytes(run: Run) -> int:
    """As many as the gradients have, and each moment."""
    return sum(math.prod(run.own(p)) for p in run.parameters if p.optimizer)


def master_weights(run: Run) -> int:
    return trained_bytes(run) if run.zero3 else sum(math.prod(run.own(p)) for p in run.parameters)


def optimizer_state(run: Run) -> int:
    """Of AdamW two moments and a float32 count of steps for each parameter, of Muon a momentum."""
    adamw = [p for p in run.parameters if p.optimizer == "adamw"]
    return trained_bytes(run) + sum(math.prod(run.own(p)) + 4 for p in adamw)


def weights_to_gather(run: Run) -> int:
    """DeepSpeed's copy of the master weights, in the dtype that it computes in."""
    return run.zero3 * run.compute * sum(run.own(p)[0] for p in run.parameters)


def quantized_values(run: Run) -> int:
    return sum(run.gathered(p) or p.quantized() for p in run.parameters)


def pass_tokens(run: Run) -> int:
    """Tokens of the largest pass: as many whole rows as the budget holds, or all rows padded."""
    whole = run.rows if run.budget is None else min(run.rows, max(1, run.budget // run.tokens))
    return whole * run.tokens


def layer_saved(run: Run) -> int:
    """
    What a decoder layer saves of a token for its backward, without checkpointing, to about a tenth.

    Inputs and outputs of its matrices (of a mixture's: of the experts chosen), and of norms the float32 input and the result.
    """
    layers, saved = [p for p in run.parameters if p.layer and "lora_" not in p.name], 0
    for p in (p for p in layers if p.layer == layers[-1].layer):  # the last, which has experts if any has
        if len(p.shape) > 1:
            times = run.config.num_experts_per_tok if len(p.shape) == 3 else 1
            saved += times * (p.shape[-2] * run.compute + p.shape[-1] * (1 if rounds_inputs(run, p) else run.compute))
        elif p.shape[0] == run.head_dim:  # of each head (Qwen3)
            heads = getattr(run.config, "num_key_value_heads" if "k_norm" in p.name else "num_attention_heads")
            saved += p.shape[0] * heads * (4 + run.compute)
        elif p.name.endswith("weight"):
            saved += p.shape[0] * (4 + run.residual)
    return saved


def head_saved(run: Run) -> int:
    """What is saved of a token outside of the layers: the final norm and its output."""
    return (4 + 2 * run.residual) * run.config.hidden_size


def rounds_inputs(run: Run, parameter: Parameter) -> bool:
    """Whether the forward quantizes what it multiplies by `parameter`."""
    return run.low_bit_forward and parameter.scheme is not None and support_of(parameter.scheme).activations != "none"


def activations(run: Run) -> int:
    """What a micro-batch has saved when its backward begins."""
    layer = run.residual * run.config.hidden_size if run.checkpointing else layer_saved(run)
    casts = not (run.checkpointing or run.low_bit_forward) and run.residual != run.compute
    # Autocast's copies of the weights are saved.
    weights = run.compute * sum(p.entries for p in run.parameters if p.layer) if casts else 0
    return run.rows * run.tokens * (run.config.num_hidden_layers * layer + head_saved(run)) + weights


def backward_work(run: Run) -> int:
    """What comes and goes in a backward: of the fused head or of a layer, whichever is more, and what FSDP2 gathers."""
    tokens, hidden, largest = pass_tokens(run), run.config.hidden_size, _largest(run, inside=True)
    tile = min(tokens, TILE[0]) * TILE[1] * run.compute
    head = 4 * hidden * (tokens + run.config.vocab_size) + tile
    # Gradients within a layer are about 0.3 of what it saves, 0.9 where quantized inputs become numbers again.
    a_token = (0.9 if any(rounds_inputs(run, p) for p in run.parameters) else 0.3) * layer_saved(run) - head_saved(run)
    if run.checkpointing:  # computed again; its checkpoint is among what it saves
        a_token += layer_saved(run) - run.residual * hidden
    # What it multiplied by, and the product that is its gradient.
    layer = tokens * a_token + 2 * run.compute * largest
    if not (run.fsdp2 or run.zero3):
        return int(max(head, layer + 4 * largest * (run.compute < 4)))
    # Two layers gathered, the gradient of one, and that in float32 to be reduced.
    sums: dict[str, int] = {}
    for p in run.parameters:
        gathered = run.gathered(p) * run.ranks or p.entries * run.compute
        sums[p.layer] = sums.get(p.layer, 0) + 2 * gathered + p.entries * (run.compute + 4)
    sums.pop("", 0)
    # What is outside of the layers is gathered from the forward to the end of the backward, when its gradient is reduced.
    outside = sum(p.entries for p in run.parameters if not p.layer)
    return int(2 * run.compute * outside + max(head, layer + max(sums.values()), 4 * outside))


def step_work(run: Run) -> int:
    """What comes and goes in the optimizer's step: AdamW's square roots (of all its entries at once), Muon's matrix."""
    adamw = 4 * sum(run.own(p)[0] for p in run.parameters if p.optimizer == "adamw")
    # A matrix is gathered first. Experts are stepped where they are, one matrix at a time: small beside it.
    matrix = max((p.entries for p in run.parameters if p.optimizer == "muon"), default=0)
    return max(adamw, matrix * (MUON_WORK + 4 * run.fsdp2))


def _largest(run: Run, inside: bool) -> int:
    """Entries of the largest parameter, of all or `inside` the decoder layers."""
    return max((p.entries for p in run.parameters if p.layer or not inside), default=0)


# The engine ---------------------------------------------------------------------------------------------------------


def synced_bytes(run: Run) -> int:
    """The checkpoint's tensors, which a weight sync moves and the engine keeps: low bits, bfloat16 for the rest."""
    kept = (p for p in run.parameters if "lora_" not in p.name)
    return sum(p.quantized(pieces=p.pieces) if p.scheme else 2 * p.entries for p in kept)


def engine_weights(run: Run) -> int:
    return math.ceil(synced_bytes(run) / run.engine_ranks) if run.engine else 0


def cache_bytes(run: Run) -> int:
    """The engine's key-value cache: what `vllm_gpu_memory_utilization` leaves; below zero when not even its weights fit."""
    return int(run.utilization * run.memory) - engine_weights(run) - ENGINE_WORK if run.engine else 0


def cache_tokens(run: Run) -> int:
    """Tokens of the cache: keys and values in bfloat16, of the heads of one engine rank."""
    heads = getattr(run.config, "num_key_value_heads", None) or run.config.num_attention_heads
    own = max(1, heads // run.engine_ranks)
    return cache_bytes(run) // (4 * run.config.num_hidden_layers * own * run.head_dim)


def sync_work(run: Run) -> int:
    """The largest parameter gathered in bfloat16, its copy, and the engine's, if that is beside."""
    sharded = run.fsdp2 or run.zero3
    return _largest(run, inside=False) * (2 * sharded + 2 + 2 * run.beside) if run.engine else 0


# The table ----------------------------------------------------------------------------------------------------------

MOMENTS = ("rollout", "sync", "backward", "optimizer step")
AWAKE = ()  # the rollout; all moments of an engine that does not sleep


class Item(NamedTuple):
    """A line of the table: a name, the moments at which it is there, and its bytes on each GPU."""

    name: str
    when: tuple[str, ...]
    size: Callable[[Run], int]


ITEMS = (
    Item("master weights", MOMENTS, master_weights),
    Item("optimizer state", MOMENTS, optimizer_state),
    Item("quantized values", MOMENTS, quantized_values),
    Item("reference model", MOMENTS, lambda run: run.reference * master_weights(run)),
    Item("buckets of DDP", MOMENTS, lambda run: run.ddp * trained_bytes(run)),
    Item("weights to gather", MOMENTS, weights_to_gather),
    Item("DeepSpeed's buffers (assumed)", MOMENTS, lambda run: run.zero3 * ZERO3_BUFFERS),
    Item("reserve (assumed)", MOMENTS, lambda run: RESERVE),
    Item("gradients", ("backward", "optimizer step"), trained_bytes),
    Item("gradients", ("rollout", "sync"), lambda run: run.zero3 * trained_bytes(run)),  # DeepSpeed keeps them
    Item("activations", ("backward",), activations),
    Item("work of a layer or the head", ("backward",), backward_work),
    Item("work of the optimizer", ("optimizer step",), step_work),
    Item("engine weights", AWAKE, lambda run: run.beside * engine_weights(run)),
    Item("engine weights", ("sync",), lambda run: run.beside * engine_weights(run)),
    Item("key-value cache", AWAKE, lambda run: run.beside * max(0, cache_bytes(run))),
    Item("work of the engine (assumed)", AWAKE, lambda run: run.beside * ENGINE_WORK),
    Item("largest parameter", ("sync",), sync_work),
)


def moments(run: Run) -> dict[str, dict[str, int]]:
    """Bytes of each item that there is, by moment."""
    found: dict[str, dict[str, int]] = {moment: {} for moment in MOMENTS}
    for item in ITEMS:
        size, awake = item.size(run), MOMENTS[:1] if run.sleep else MOMENTS
        for moment in (item.when or awake) if size else ():
            found[moment][item.name] = size
    return found


def peaks(run: Run) -> dict[str, int]:
    """Bytes of each moment."""
    return {name: sum(items.values()) for name, items in moments(run).items()}


def best_utilization(run: Run) -> float:
    """The largest `vllm_gpu_memory_utilization`, in steps of 0.05, that every moment leaves room for; 0.0 for none."""
    tried = (u / 100 for u in range(5, 95, 5))
    return max((u for u in tried if max(peaks(replace(run, utilization=u)).values()) <= run.memory), default=0.0)


def host_bytes(run: Run) -> int:
    """A machine's own memory while the model loads: every process holds it, under FSDP2 one of them. ZeRO-3 loads in pieces: 0."""
    copies = 0 if run.zero3 else 1 if run.fsdp2 else min(run.ranks, MACHINE)
    return copies * sum(p.entries * p.size for p in run.parameters)
