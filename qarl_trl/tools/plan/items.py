"""
The memory of each GPU in a run: a formula for each kind of memory, and `moments`, the two with the highest peaks.

A weight sync takes less than a rollout, and an optimizer step at most about as much as a backward. tests/tools/plan and tests/slow compare the formulas with real tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


GIB = 2**30
# CUDA context, NCCL, fragments of torch's allocator, and the CUDA graphs of a sleeping engine. Assumed, not measured.
RESERVE = 4 * GIB
# An awake engine's memory beside weights and cache: passes of 4096 tokens and CUDA graphs. Assumed, not measured.
ENGINE_WORK = 3 * GIB
# Size of the one tile of logits in memory, tokens by vocabulary, in TRL's `kernels/chunked_logprob.py`.
TILE = (4096, 32768)
# GPUs per machine; their processes share its memory.
MACHINE = 8


class Parameter(NamedTuple):
    """One parameter of the policy."""

    name: str
    shape: tuple[int, ...]
    size: int  # bytes per entry of the master weight
    layer: str  # its decoder layer, which FSDP2 gathers at once; "" outside the layers
    optimizer: str  # "muon", "experts" (Muon in place), or TRL's `optim`; "" if it is frozen
    quantized: int = 0  # bytes of its quantized values on each GPU
    gathered: bool = False  # FSDP2 gathers quantized values instead, and each GPU keeps those of its own rows
    stored: int = 0  # bytes of its low-bit tensors in a checkpoint
    rounds_inputs: bool = False  # the scheme quantizes the inputs of the multiplication

    @property
    def entries(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Run:
    """A run in numbers, in bytes unless noted."""

    parameters: tuple[Parameter, ...]
    config: Any  # of the language model, as transformers has it
    low_bit_forward: bool  # `quantize_learner`, with a scheme
    memory: int  # of each GPU, also of a server's
    rows: int  # in a micro-batch
    tokens: int  # in the longest row
    budget: int | None  # `max_tokens_per_pass`
    checkpointing: bool  # of gradients
    compute: int  # bytes per entry in forward and backward
    engine: str  # "colocate" (on these GPUs), "server" (on its own GPUs), "" without an engine
    utilization: float  # `vllm_gpu_memory_utilization`
    sleep: bool
    frozen: bool = False  # `lora_base: frozen`: the base has only quantized values
    engine_ranks: int = 1
    ranks: int = 1  # GPUs
    fsdp2: bool = False  # the GPUs hold shards of one model; otherwise each holds the whole
    reference: bool = False  # a frozen second model

    @property
    def head_dim(self) -> int:
        config = self.config
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    @property
    def residual(self) -> int:
        """Bytes per entry between layers: autocast keeps the dtype of the weights, FSDP2 casts the weights."""
        size = self.parameters[0].size
        return min(self.compute, size) if self.fsdp2 else size

    def own(self, parameter: Parameter) -> int:
        """Entries of a parameter on this GPU."""
        if not self.fsdp2 or not parameter.shape:
            return parameter.entries
        # FSDP2 cuts dimension 0 and pads every part to the longest.
        return math.ceil(parameter.shape[0] / self.ranks) * math.prod(parameter.shape[1:])


def trained_bytes(run: Run) -> int:
    """Bytes of the gradients, and of each moment of the optimizer."""
    return sum(run.own(p) * p.size for p in run.parameters if p.optimizer)


def state_bytes(run: Run, p: Parameter) -> int:
    """Muon: one momentum. AdamW: two and a float32 count. bitsandbytes: 8 bits and a scale per 256 entries; embeddings in float32."""
    own = run.own(p)
    if p.optimizer in ("muon", "experts", ""):
        return own * p.size * bool(p.optimizer)
    if "bit" in p.optimizer:
        return own * 65 // 32 if "8bit" in p.optimizer and "embed" not in p.name else 8 * own
    return 2 * own * p.size + 4


def optimizer_state(run: Run, paged: bool = False) -> int:
    """The optimizer's state between steps on the GPU, or in the machine's memory (`paged_adamw_*`)."""
    return sum(state_bytes(run, p) for p in run.parameters if p.optimizer.startswith("paged") == paged)


def layer_saved(run: Run) -> int:
    """
    Bytes per token that a decoder layer saves for its backward, without checkpointing, to about 10 %.

    Inputs and outputs of its matrices (in a mixture: of the chosen experts); of norms the float32 input and the result.
    """
    layers, saved = [p for p in run.parameters if p.layer and "lora_" not in p.name], 0
    for p in (p for p in layers if p.layer == layers[-1].layer):  # the last layer, which has experts if any layer has
        if len(p.shape) > 1:
            times = run.config.num_experts_per_tok if len(p.shape) == 3 else 1
            of_input = 1 if run.low_bit_forward and p.rounds_inputs else run.compute
            saved += times * (p.shape[-2] * run.compute + p.shape[-1] * of_input)
        elif p.shape[0] == run.head_dim:  # of each head (Qwen3)
            heads = getattr(run.config, "num_key_value_heads" if "k_norm" in p.name else "num_attention_heads")
            saved += p.shape[0] * heads * (4 + run.compute)
        elif p.name.endswith("weight"):
            saved += p.shape[0] * (4 + run.residual)
    return saved


def head_saved(run: Run) -> int:
    """Bytes per token saved outside the layers: the final norm and its output."""
    return (4 + 2 * run.residual) * run.config.hidden_size


def activations(run: Run) -> int:
    """Bytes that a micro-batch has saved when its backward begins."""
    layer = run.residual * run.config.hidden_size if run.checkpointing else layer_saved(run)
    casts = not (run.checkpointing or run.low_bit_forward) and run.residual != run.compute
    # Autocast also saves its copies of the weights.
    weights = run.compute * sum(p.entries for p in run.parameters if p.layer) if casts else 0
    return run.rows * run.tokens * (run.config.num_hidden_layers * layer + head_saved(run)) + weights


def backward_work(run: Run) -> int:
    """Temporary memory of a backward: that of the fused head or of a layer (the larger), and the weights that FSDP2 gathers."""
    # A pass has as many whole rows as fit the budget, or all rows, padded.
    tokens = run.tokens * (run.rows if run.budget is None else min(run.rows, max(1, run.budget // run.tokens)))
    hidden, largest = run.config.hidden_size, max(p.entries for p in run.parameters if p.layer)
    tile = min(tokens, TILE[0]) * TILE[1] * run.compute
    head = 4 * hidden * (tokens + run.config.vocab_size) + tile
    # Gradients in a layer take about 0.3 of what it saves, 0.9 if it dequantizes quantized inputs.
    rounds = run.low_bit_forward and any(p.rounds_inputs for p in run.parameters)
    a_token = (0.9 if rounds else 0.3) * layer_saved(run) - head_saved(run)
    if run.checkpointing:  # the layer is computed again; its saved tensors include its checkpoint
        a_token += layer_saved(run) - run.residual * hidden
    # The dequantized matrix, and the product that is its gradient.
    layer = tokens * a_token + 2 * run.compute * largest
    if not run.fsdp2:
        return int(max(head, layer + 4 * largest * (run.compute < 4)))
    # Two gathered layers, the gradient of one, and its float32 copy for the reduction.
    sums: dict[str, int] = {}
    for p in (p for p in run.parameters if p.size):  # a frozen base has none, and is whole on each GPU
        gathered = p.quantized * run.ranks if p.gathered else p.entries * run.compute
        sums[p.layer] = sums.get(p.layer, 0) + 2 * gathered + p.entries * (run.compute + 4)
    sums.pop("", 0)
    # Weights outside the layers stay gathered from the forward to the end of the backward, when their gradient is reduced.
    outside = sum(p.entries for p in run.parameters if not p.layer)
    return int(2 * run.compute * outside + max(head, layer + max(sums.values()), 4 * outside))


def engine_bytes(run: Run) -> int:
    """Bytes of the engine's weights: low-bit tensors, bfloat16 for the rest, and with a frozen base the adapter."""
    return sum(p.stored or 2 * p.entries for p in run.parameters if run.frozen or "lora_" not in p.name)


def synced_bytes(run: Run) -> int:
    """Bytes of a weight sync: all weights, or with a frozen base only the adapter, unless sleep mode drops the base."""
    adapter = sum(2 * p.entries for p in run.parameters if "lora_" in p.name)
    return adapter if run.frozen and not run.sleep else engine_bytes(run)


def engine_weights(run: Run) -> int:
    return math.ceil(engine_bytes(run) / run.engine_ranks) if run.engine else 0


def cache_bytes(run: Run) -> int:
    """Bytes of the engine's key-value cache, the rest of `vllm_gpu_memory_utilization`; negative if not even the weights fit."""
    return int(run.utilization * run.memory) - engine_weights(run) - ENGINE_WORK if run.engine else 0


def cache_tokens(run: Run) -> int:
    """Number of tokens in the cache: keys and values in bfloat16, for the heads of one engine rank."""
    heads = getattr(run.config, "num_key_value_heads", None) or run.config.num_attention_heads
    own = max(1, heads // run.engine_ranks)
    return cache_bytes(run) // (4 * run.config.num_hidden_layers * own * run.head_dim)


def moments(run: Run) -> dict[str, dict[str, int]]:
    """Bytes of each item, by moment; without items of size 0."""
    master_weights = sum(run.own(p) * p.size for p in run.parameters)
    always = {
        "master weights": master_weights,
        "optimizer state": optimizer_state(run),
        "quantized values": sum(p.quantized for p in run.parameters),
        "reference model": run.reference * master_weights,
        "buckets of DDP": (run.ranks > 1 and not run.fsdp2) * trained_bytes(run),
        "reserve (assumed)": RESERVE,
    }
    awake = {}
    if run.engine == "colocate":
        weights, cache = engine_weights(run), max(0, cache_bytes(run))
        awake = {"engine weights": weights, "key-value cache": cache, "work of the engine (assumed)": ENGINE_WORK}
    update = {
        "gradients": trained_bytes(run),
        "activations": activations(run),
        "work of a layer or the head": backward_work(run),
    }
    found = {"rollout": always | awake, "backward": (always if run.sleep else always | awake) | update}
    return {moment: {name: size for name, size in held.items() if size} for moment, held in found.items()}


def peaks(run: Run) -> dict[str, int]:
    """Sum of the bytes at each moment."""
    return {name: sum(items.values()) for name, items in moments(run).items()}


def fits(run: Run) -> bool:
    """Whether every moment fits, and the engine has room for one row."""
    return max(peaks(run).values()) <= run.memory and (not run.engine or cache_tokens(run) >= run.tokens)


def best_utilization(run: Run) -> float:
    """The largest `vllm_gpu_memory_utilization`, in steps of 0.05, with which every moment fits; 0.0 if none."""
    tried = (u / 100 for u in range(5, 95, 5))
    return max((u for u in tried if fits(replace(run, utilization=u))), default=0.0)


def host_bytes(run: Run) -> int:
    """Host memory of a machine: each process (under FSDP2 only one) holds the model while it loads; later paged moments."""
    copies = 1 if run.fsdp2 and not run.frozen else min(run.ranks, MACHINE)
    return copies * max(sum(p.entries * p.size or p.stored for p in run.parameters), optimizer_state(run, paged=True))
