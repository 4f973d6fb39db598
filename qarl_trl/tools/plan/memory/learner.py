"""What the learner keeps on each GPU from step to step: weights, gradients, and the optimizer's state."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..run import BFLOAT16, FLOAT32, Parameter, Run


# GPUs of a machine, whose processes share its memory; assumed, as of machines with NVLink.
MACHINE = 8
# Moments that optimizers keep for each entry, by how their name begins without "paged_". All others count as AdamW,
# which has two.
MOMENTS = {
    "sgd_momentum": 1,
    "sgd": 0,
    "lion": 1,
    "rmsprop_momentum": 2,
    "rmsprop": 1,
    "adagrad": 1,
    "ademamix": 3,
    "schedule_free_sgd": 1,
}
# Bytes of an entry of a moment in 8 and in 4 bits, with a float32 scale for 256 entries: in
# `bitsandbytes.optim.optimizer`, and in torchao as transformers calls it.
MOMENT_IN_8_BITS = 1 + 4 / 256
MOMENT_IN_4_BITS = 0.5 + 4 / 256


def master_bytes(run: Run) -> int:
    """
    Bytes of the master weights on each GPU.

    Args:
        run: The run.
    """
    return sum(run.local_entries(parameter) * parameter.size for parameter in run.parameters)


def teacher_bytes(run: Run) -> int:
    """
    Bytes of a teacher on each GPU; 0 without one, or if the base of the student's adapter teaches.

    Args:
        run: The run.
    """
    if run.teacher is None:
        return 0

    weights = run.teacher.parameters
    total = sum(run.local_entries(parameter) * parameter.size for parameter in weights)
    if run.fsdp2:
        total += sum(run.compute * parameter.entries for parameter in _last_of_all(weights))
    return total


def _last_of_all(weights: Sequence[Parameter]) -> list[Parameter]:
    """The norm after the layers and the output layer: FSDP2 keeps their gathered copies after a lone forward."""
    outside = [parameter for parameter in weights if not parameter.layer]
    # An embedding that is no output layer is the first of two.
    embeddings = [parameter for parameter in outside if len(parameter.shape) > 1][:-1]
    return [parameter for parameter in outside if parameter not in embeddings]


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

    if optimizer == "adafactor":
        # A norm, and of a matrix the second moment of rows and columns in place of its entries.
        kept = entries
        if len(parameter.shape) > 1:
            *others, rows, columns = parameter.shape
            kept = math.prod(others) * (rows + columns) * entries // parameter.entries
        return kept * parameter.size + 4

    number = moments_of(optimizer)
    if optimizer == "adamw_torch_4bit":
        return int(number * entries * MOMENT_IN_4_BITS)
    # bitsandbytes keeps those of embeddings in 32 bits, torchao does not.
    if "8bit" in optimizer and (optimizer == "adamw_torch_8bit" or "embed" not in parameter.name):
        return int(number * entries * MOMENT_IN_8_BITS)
    if "bit" in optimizer:
        return number * FLOAT32 * entries

    # torch's: moments like the weights, and a float32 count of the steps.
    return number * entries * parameter.size + (4 if number else 0)


def moments_of(optimizer: str) -> int:
    """
    How many moments an optimizer keeps for each entry of a parameter.

    Args:
        optimizer: As in [`Parameter`].
    """
    name = optimizer.removeprefix("paged_")
    for beginning, number in MOMENTS.items():
        if name.startswith(beginning):
            return number
    return 2


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
    size = copies * max(loaded, optimizer_state(run, paged=True))

    beside = 0
    if run.decompresses:
        beside = copies * sum(BFLOAT16 * parameter.entries for parameter in run.parameters if not parameter.in_adapter)
    if run.teacher is not None:
        # TRL loads both before either is on its GPU. No adapter freezes a teacher's base.
        copies = 1 if run.fsdp2 else min(run.ranks, MACHINE)
        of_teacher = copies * sum(parameter.entries * parameter.size for parameter in run.teacher.parameters)
        beside = max(beside, of_teacher)
    return size + beside
