"""
What is in the memory of each GPU at the moments with the highest peaks: a rollout, and a backward.

A weight sync takes less than a rollout, and an optimizer step at most about as much as a backward. tests/tools/plan
and tests/slow compare the formulas with real tensors.
"""

from __future__ import annotations

from dataclasses import replace

from ..run import GIB, Run
from .backward import activations, backward_work, compared_states, gradients_between_passes, teacher_work
from .engine import ENGINE_WORK, cache_bytes, cache_tokens, engine_weights, sampled_cache
from .learner import master_bytes, optimizer_state, teacher_bytes, trained_bytes


# Bytes of CUDA's context, NCCL, fragments of torch's allocator, and the CUDA graphs of a sleeping engine. Assumed, not
# measured.
RESERVE = 4 * GIB


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
        For `"rollout"`, unless the run samples nothing, and `"backward"` the bytes of each item, without items of size
        0.
    """
    always = _always_there(run)
    engine = _awake_engine(run)
    update = {
        "gradients": trained_bytes(run),
        "gradients between passes": gradients_between_passes(run),
        "activations": activations(run),
        "compared hidden states": compared_states(run),
        "work of a layer or the head": max(backward_work(run), teacher_work(run)),
    }

    if not run.frozen:  # a weight sync after an optimizer step makes new values, which have no matrices yet
        update["dequantized matrices"] = kept_matrices(run)

    # The order of the items is the order of the table's rows.
    rollout = always | engine
    backward = rollout | update
    rollout["keys and values of sampled answers"] = sampled_cache(run)
    if run.sleep:  # a sleeping engine has given its memory back
        backward = always | update
    at_moment = {"rollout": _without_zeros(rollout), "backward": _without_zeros(backward)}
    if not run.samples:
        del at_moment["rollout"]
    return at_moment


def _always_there(run: Run) -> dict[str, int]:
    """Bytes of what stays on each GPU from the second rollout on. During the first there is no optimizer state yet."""
    master_weights = master_bytes(run)
    sizes = {
        "master weights": master_weights,
        "optimizer state": optimizer_state(run),
        # Kept from one optimizer step to the next, beside the master weights: forward, sync and export read them.
        "quantized values": sum(parameter.quantized for parameter in run.parameters),
    }
    if run.engine_kernel:
        # Beside them, because sync and export need those of a checkpoint.
        sizes["the kernels' layout of them"] = sizes["quantized values"]

    if run.frozen:  # whose values never change
        sizes["dequantized matrices"] = kept_matrices(run)
    if run.reference:
        sizes["reference model"] = master_weights
    if run.teacher is not None:
        sizes["teacher"] = teacher_bytes(run)
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
