"""
The memory of each GPU in a run: a formula for each kind of memory, and `moments`, the two with the highest peaks.

A weight sync takes less than a rollout, and an optimizer step at most about as much as a backward. tests/tools/plan
and tests/slow compare the formulas with real tensors.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .backward import activations, backward_work
from .run import GIB, Parameter, Run


# CUDA context, NCCL, fragments of torch's allocator, and the CUDA graphs of a sleeping engine. Assumed, not measured.
RESERVE = 4 * GIB
# An awake engine's memory beside weights and cache: passes of 4096 tokens and CUDA graphs. Assumed, not measured.
ENGINE_WORK = 3 * GIB
# GPUs per machine; their processes share its memory.
MACHINE = 8
BFLOAT16 = 2  # bytes


# Learner ------------------------------------------------------------------------------------------------------------


def master_bytes(run: Run) -> int:
    """
    Bytes of the master weights on each GPU.

    Args:
        run: The run.
    """
    return sum(run.local_entries(parameter) * parameter.size for parameter in run.parameters)


def trained_bytes(run: Run) -> int:
    """
    Bytes of the gradients on each GPU, and of each moment of the optimizer.

    Args:
        run: The run.
    """
    return sum(run.local_entries(parameter) * parameter.size for parameter in run.parameters if parameter.trained)


def optimizer_state(run: Run, paged: bool = False) -> int:
    """
    Bytes of the optimizer's state between steps, on each GPU.

    Args:
        run: The run.
        paged: Count the state that is kept in the machine's memory instead (`paged_adamw_*`).
    """
    state = 0
    for parameter in run.parameters:
        if parameter.optimizer.startswith("paged") == paged:
            state += _state_bytes(run, parameter)
    return state


def _state_bytes(run: Run, parameter: Parameter) -> int:
    """Bytes of the optimizer's state of one parameter on each GPU."""
    if not parameter.trained:
        return 0

    optimizer = parameter.optimizer
    entries = run.local_entries(parameter)

    # Muon: one momentum.
    if optimizer in ("muon", "experts"):
        return entries * parameter.size

    # bitsandbytes: two moments of a byte, each with a float32 scale for 256 entries. 2 * (1 + 4 / 256) = 65 / 32.
    if "8bit" in optimizer and "embed" not in parameter.name:
        return entries * 65 // 32

    # bitsandbytes: two float32 moments, for embeddings also with an optimizer in 8 bits.
    if "bit" in optimizer:
        return 8 * entries

    # torch's AdamW: two moments, and a float32 count of the steps.
    return 2 * entries * parameter.size + 4


def host_bytes(run: Run) -> int:
    """
    Host memory of a machine, in bytes: models while they load, later the paged moments.

    Args:
        run: The run.
    """
    # Each process loads the model; under FSDP2 only one does, and sends the others their shards.
    # A frozen base is not sharded, so every process loads it.
    copies = min(run.ranks, MACHINE)
    if run.fsdp2 and not run.frozen:
        copies = 1

    # Of a frozen base low-bit tensors load. The paged moments come later, when the loaded model is on the GPU.
    loaded = sum(parameter.entries * parameter.size or parameter.stored for parameter in run.parameters)
    return copies * max(loaded, optimizer_state(run, paged=True))


# Engine -------------------------------------------------------------------------------------------------------------


def engine_bytes(run: Run) -> int:
    """
    Bytes of the weights of a whole engine: low-bit tensors, bfloat16 for the rest, and with a frozen base the adapter.

    Args:
        run: The run.
    """
    weights = 0
    for parameter in run.parameters:
        if parameter.in_adapter and not run.frozen:  # the engine gets weights with the adapter merged into them
            continue
        weights += parameter.stored or BFLOAT16 * parameter.entries
    return weights


def synced_bytes(run: Run) -> int:
    """
    Bytes of a weight sync: all weights, or with a frozen base only the adapter, unless sleep mode drops the base.

    Args:
        run: The run.
    """
    # vLLM's sleep drops weights, and only the learner has those of its step.
    if not run.frozen or run.sleep:
        return engine_bytes(run)
    return sum(BFLOAT16 * parameter.entries for parameter in run.parameters if parameter.in_adapter)


def engine_weights(run: Run) -> int:
    """
    Bytes of the engine's weights on each of its GPUs; 0 without an engine.

    Args:
        run: The run.
    """
    if not run.engine:
        return 0
    return math.ceil(engine_bytes(run) / run.engine_ranks)


def cache_bytes(run: Run) -> int:
    """
    Bytes of the engine's key-value cache on each of its GPUs: the rest of `vllm_gpu_memory_utilization`.

    Args:
        run: The run.

    Returns:
        Negative if not even the weights fit, 0 without an engine.
    """
    if not run.engine:
        return 0

    # vLLM measures weights and work at its start, and gives the cache all that is left of its share.
    share = int(run.utilization * run.memory)
    return share - engine_weights(run) - ENGINE_WORK


def cache_tokens(run: Run) -> int:
    """
    Number of tokens in the cache.

    Args:
        run: The run.
    """
    return cache_bytes(run) // token_bytes(run)


def token_bytes(run: Run) -> int:
    """
    Bytes of a token in the cache: keys and values for the heads of one engine rank.

    Args:
        run: The run.
    """
    all_heads = getattr(run.config, "num_key_value_heads", None) or run.config.num_attention_heads
    # With more ranks than heads vLLM gives several ranks a copy of the same head.
    heads = max(1, all_heads // run.engine_ranks)

    keys = run.cache_entry * run.config.num_hidden_layers * heads * run.head_dim
    return 2 * keys


def best_utilization(run: Run) -> float:
    """
    The largest `vllm_gpu_memory_utilization`, in steps of 0.05 up to 0.9, with which the run fits; 0.0 if none.

    Args:
        run: The run.
    """
    # Finer steps would promise more than the assumed items of the memory can hold.
    for percent in range(90, 0, -5):
        if fits(replace(run, utilization=percent / 100)):
            return percent / 100
    return 0.0


# Run ----------------------------------------------------------------------------------------------------------------


def kept_matrices(run: Run) -> int:
    """
    Bytes of the dequantized matrices that `quant_keep_matrices` keeps between two optimizer steps.

    Args:
        run: The run.
    """
    if not (run.keeps_matrices and run.low_bit_forward):
        return 0
    return sum(run.compute * parameter.entries for parameter in run.parameters if parameter.quantized)


def moments(run: Run) -> dict[str, dict[str, int]]:
    """
    What is in the memory of each GPU at the two highest peaks.

    Args:
        run: The run.

    Returns:
        For `"rollout"` and `"backward"` the bytes of each item, without items of size 0.
    """
    always = _always_there(run)
    engine = _awake_engine(run)
    update = {
        "gradients": trained_bytes(run),
        "activations": activations(run),
        "work of a layer or the head": backward_work(run),
    }

    if not run.frozen:  # a weight sync after an optimizer step makes new values, which have no matrices yet
        update["dequantized matrices"] = kept_matrices(run)

    # The order of the items is the order of the table's rows.
    rollout = always | engine
    backward = rollout | update
    if run.sleep:  # a sleeping engine has given its memory back
        backward = always | update
    return {"rollout": _without_zeros(rollout), "backward": _without_zeros(backward)}


def _always_there(run: Run) -> dict[str, int]:
    """Bytes of what stays on each GPU from the second rollout on. During the first there is no optimizer state yet."""
    master_weights = master_bytes(run)
    sizes = {
        "master weights": master_weights,
        "optimizer state": optimizer_state(run),
        # Kept from one optimizer step to the next, beside the master weights: forward, sync and export read them.
        "quantized values": sum(parameter.quantized for parameter in run.parameters),
    }

    if run.frozen:  # whose values never change
        sizes["dequantized matrices"] = kept_matrices(run)
    if run.reference:
        sizes["reference model"] = master_weights
    if run.ranks > 1 and not run.fsdp2:  # DDP copies gradients into buckets to reduce them
        sizes["buckets of DDP"] = trained_bytes(run)
    sizes["reserve (assumed)"] = RESERVE
    return sizes


def _awake_engine(run: Run) -> dict[str, int]:
    """Bytes of an engine on the learner's GPUs; nothing for one that is elsewhere."""
    if run.engine != "colocate":
        return {}
    return {
        "engine weights": engine_weights(run),
        "key-value cache": max(0, cache_bytes(run)),
        "work of the engine (assumed)": ENGINE_WORK,
    }


def _without_zeros(sizes: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size}


def peaks(run: Run) -> dict[str, int]:
    """
    Bytes on each GPU at each of the [`moments`].

    Args:
        run: The run.
    """
    return {moment: sum(sizes.values()) for moment, sizes in moments(run).items()}


def fits(run: Run) -> bool:
    """
    Whether every moment fits, and the engine has room for one row.

    Args:
        run: The run.
    """
    if max(peaks(run).values()) > run.memory:
        return False
    return not run.engine or cache_tokens(run) >= run.tokens
