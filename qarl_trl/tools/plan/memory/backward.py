"""
The memory that a backward needs: what the forward saves for it, its temporary tensors, and the gradients that it keeps
from pass to pass.

The formulas are estimates. tests/tools/plan/memory/test_backward.py compares their sum with what torch's allocator
gives out.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..run import FLOAT32, Parameter, Run, Teacher


# Size of the one tile of logits in memory, tokens by vocabulary, in TRL's `kernels/chunked_logprob.py`, which never
# computes all logits at once.
TILE = (4096, 32768)
# Bytes of the gradients in a layer, as a share of the bytes that it saves. Measured with torch's CPU allocator, as
# tests/tools/plan/memory/test_backward.py does.
GRADIENT_SHARE = 0.3
# The same where it dequantizes quantized inputs.
GRADIENT_SHARE_OF_QUANTIZED_INPUTS = 0.9
# Bytes of a layer's tensors in a forward without gradients, as a share of the bytes that one with gradients saves.
# Measured as the others.
SHARE_WITHOUT_GRADIENTS = 0.65


# Activations --------------------------------------------------------------------------------------------------------


def activations(run: Run) -> int:
    """
    Bytes that are saved when a backward begins: of a micro-batch, or of several that share a pass.

    Args:
        run: The run.
    """
    # All passes of a micro-batch keep theirs until its one backward, and so do all micro-batches of a pass.
    rows = max(run.rows, rows_of_pass(run))
    return rows * run.tokens * _saved(run) + _saved_casts(run)


def _saved(run: Run) -> int:
    """Bytes per token that are saved when a backward begins."""
    layer = _checkpoint(run) if run.checkpointing else layer_saved(run)
    return run.config.num_hidden_layers * layer + head_saved(run)


def _saved_casts(run: Run) -> int:
    """Bytes of the copies of the weights that autocast makes for the forward and keeps for the backward."""
    # Checkpointing keeps no copies, low-bit layers save their quantized values, and equal dtypes need no cast.
    if run.checkpointing or run.low_bit_forward or run.residual == run.compute:
        return 0
    return run.compute * sum(parameter.entries for parameter in run.in_layers)


def _checkpoint(run: Run) -> int:
    """Bytes per token of the hidden states between two layers."""
    return run.residual * run.config.hidden_size


def layer_saved(run: Run) -> int:
    """
    Bytes per token that a decoder layer saves for its backward, without checkpointing. Right to about 10 %.

    It saves inputs and outputs of its matrices (in a mixture: of the chosen experts), and of norms the float32 input
    and the result.

    Args:
        run: The run.
    """
    # Factors of an adapter are so narrow that what they save is left out.
    of_base = [parameter for parameter in run.in_layers if not parameter.in_adapter]
    # The first layers of a mixture may be dense. The last has experts if any has.
    last_layer = of_base[-1].layer

    saved = 0
    for parameter in of_base:
        if parameter.layer == last_layer:
            saved += _saved_for(parameter, run)
    return saved


def _saved_for(parameter: Parameter, run: Run) -> int:
    """Bytes per token that a layer saves for the gradient of one parameter."""
    if len(parameter.shape) > 1:
        return _saved_for_matrix(parameter, run)

    entries = parameter.shape[0]
    if entries == run.head_dim:
        # A norm of each head (Qwen3). Its input comes from a matrix, so the result has the dtype of the forward.
        heads = run.config.num_attention_heads
        if "k_norm" in parameter.name:
            heads = run.config.num_key_value_heads
        return entries * heads * (FLOAT32 + run.compute)

    if parameter.name.endswith("weight"):
        return entries * (FLOAT32 + run.residual)
    return 0  # the gradient of a bias needs nothing that is saved


def _saved_for_matrix(parameter: Parameter, run: Run) -> int:
    """Bytes per token of the input and the output of a matrix `(out, in)`, or of experts `(experts, out, in)`."""
    if len(parameter.shape) > 2 and not parameter.holds_experts:
        # A convolution over the tokens, each channel by itself (Qwen3-Next, LFM2, Mamba): (channels, 1, width).
        return 2 * parameter.shape[0] * run.compute

    outputs, inputs = parameter.shape[-2:]
    input_size = run.compute
    if run.low_bit_forward and parameter.rounds_inputs:
        input_size = 1  # 8 bits

    saved = outputs * run.compute + inputs * input_size
    if parameter.holds_experts:  # a token passes only some of them
        return run.config.num_experts_per_tok * saved
    return saved


def head_saved(run: Run) -> int:
    """
    Bytes per token that are saved outside the layers: the final norm and its output.

    Args:
        run: The run.
    """
    return (FLOAT32 + 2 * run.residual) * run.config.hidden_size


# Passes -------------------------------------------------------------------------------------------------------------


def rows_of_pass(run: Run) -> int:
    """
    Rows in a pass, if all are as long as the longest: as many of an update as fit the budget, at least one; without a
    budget those of a micro-batch, padded.

    Args:
        run: The run.
    """
    if run.budget is None:
        return run.rows
    fitting = max(1, run.budget // run.tokens)
    return min(run.rows * run.accumulation, fitting)


def passes_of_micro_batch(run: Run) -> int:
    """
    Passes of a micro-batch, if all rows are as long as the longest.

    Args:
        run: The run.
    """
    return math.ceil(run.rows / rows_of_pass(run))


def gradients_between_passes(run: Run) -> int:
    """
    Bytes that a backward of several passes adds to what [`activations`] and [`backward_work`] count.

    All passes of a micro-batch have one backward, which takes the last pass first. autograd adds up the gradients of
    all of them before it hands a weight its gradient (torch, `csrc/autograd/input_buffer.cpp`). So from the end of the
    first pass on there are whole gradients of all weights, beside those that earlier micro-batches left. By then the
    activations of that pass are free, so that only the rest adds to the peak.

    Args:
        run: The run.
    """
    passes = passes_of_micro_batch(run)
    if passes == 1:
        return 0

    gradients = _whole_gradients(run)
    of_a_pass = rows_of_pass(run) * run.tokens * _saved(run)
    if not run.fsdp2:
        return max(0, gradients - of_a_pass)

    # `backward_work` has the gradient of a layer, and its float32 copy for the reduction. Gradients are reduced in the
    # last pass: before it there is no copy, and in it the gradient is one of those that were kept.
    layer = _largest_layer(run)
    after_the_first = gradients - of_a_pass - FLOAT32 * layer
    in_the_last = gradients - (passes - 1) * of_a_pass - run.compute * layer
    return max(0, after_the_first, in_the_last)


def _whole_gradients(run: Run) -> int:
    """Bytes of the gradients that autograd adds up for all weights, beside those that are there already."""
    if run.fsdp2:
        # Not sharded, in the dtype of the gathered weights. `backward_work` has those outside the layers.
        return sum(run.compute * parameter.entries for parameter in run.in_layers if parameter.trained)

    # In an update of one micro-batch they become the gradients that `trained_bytes` counts.
    if run.accumulation == 1:
        return 0
    return sum(parameter.size * parameter.entries for parameter in run.parameters if parameter.trained)


def _largest_layer(run: Run) -> int:
    """Trained entries of the decoder layer that has most."""
    by_layer: dict[str, int] = {}
    for parameter in run.in_layers:
        if parameter.trained:
            by_layer[parameter.layer] = by_layer.get(parameter.layer, 0) + parameter.entries
    return max(by_layer.values(), default=0)


# Temporary tensors --------------------------------------------------------------------------------------------------


def backward_work(run: Run) -> int:
    """
    Bytes of the temporary tensors of a backward, and of the weights that FSDP2 gathers for it.

    The fused head and the layers run one after the other, so the larger of the two counts.

    Args:
        run: The run.
    """
    head = _head_work(run)
    layer = _layer_work(run)
    if not run.fsdp2:
        return int(max(head, layer + _cast_gradient(run)))

    # Weights outside the layers, and their gradient, stay from the forward to the end of the backward. Then the
    # gradient is reduced in float32.
    outside = sum(parameter.entries for parameter in run.parameters if not parameter.layer)
    trained = sum(parameter.entries for parameter in run.parameters if not parameter.layer and parameter.trained)
    gathered = run.compute * (outside + trained)
    reduction = FLOAT32 * trained
    return int(gathered + max(head, layer + _gathered_layers(run), reduction))


def _head_work(run: Run) -> int:
    """Bytes of the fused head: float32 gradients of its input and, if it is trained, its weight; a tile of logits."""
    tokens = rows_of_pass(run) * run.tokens
    entry = run.compute
    if run.teacher is not None:
        tokens = rows_of_pass(run) * run.teacher.positions
        # `kernels/chunked_divergence.py`, with a tile of the same size: the logits of student and teacher in float32,
        # and their gradient in the dtype of the forward.
        entry = 2 * FLOAT32 + (run.compute if run.compute != FLOAT32 else 0)

    tile = min(tokens, TILE[0]) * TILE[1] * entry
    # TRL's kernels make a gradient of the weight only where autograd asks for it (`needs_weight_grad`).
    rows = tokens + (run.config.vocab_size if _head_is_trained(run) else 0)
    return FLOAT32 * run.config.hidden_size * rows + tile


def _head_is_trained(run: Run) -> bool:
    """Whether the output layer is trained."""
    # The last matrix outside the layers: an embedding is the first of two, or both in one.
    matrices = [
        parameter
        for parameter in run.parameters
        if not parameter.layer and not parameter.in_adapter and len(parameter.shape) > 1
    ]
    return matrices[-1].trained


def compared_states(run: Run) -> int:
    """
    Bytes of the last hidden states of student and teacher that a distillation's loss keeps for its backward.

    Args:
        run: The run.
    """
    if run.teacher is None:
        return 0

    teacher = _of_teacher(run, run.teacher)
    of_a_token = run.residual * run.config.hidden_size + teacher.residual * teacher.config.hidden_size
    return run.rows * run.teacher.positions * of_a_token


def teacher_work(run: Run) -> int:
    """
    Bytes of the temporary tensors in the forward of a teacher, beside what its student has saved.

    Args:
        run: The run.
    """
    if run.teacher is None:
        return 0

    teacher = _of_teacher(run, run.teacher)
    of_a_layer = run.rows * run.tokens * SHARE_WITHOUT_GRADIENTS * layer_saved(teacher)
    largest = _largest_entries(teacher)
    if run.fsdp2 and run.teacher.parameters:
        # Two layers, in the dtype of the forward.
        by_layer: dict[str, int] = {}
        for parameter in teacher.in_layers:
            by_layer[parameter.layer] = by_layer.get(parameter.layer, 0) + parameter.entries
        return int(of_a_layer + 2 * run.compute * max(by_layer.values()))

    # The copy of a matrix that autocast makes.
    has_casts = any(parameter.size != run.compute for parameter in teacher.in_layers)
    return int(of_a_layer + (run.compute * largest if has_casts else 0))


def _of_teacher(run: Run, teacher: Teacher) -> Run:
    """The teacher of a run, in whose forward nothing is in low bits."""
    # Without a second model it is the student, whose base has its master weights.
    parameters = teacher.parameters or run.parameters
    return replace(run, parameters=parameters, config=teacher.config, low_bit_forward=False)


def _layer_work(run: Run) -> float:
    """Bytes of the gradients in one layer, and of one matrix with its gradient."""
    share = GRADIENT_SHARE
    if run.low_bit_forward and any(parameter.rounds_inputs for parameter in run.parameters):
        share = GRADIENT_SHARE_OF_QUANTIZED_INPUTS

    gradients = share * layer_saved(run)
    # With checkpointing the layer is computed again. It saves all but its checkpoint, which `activations` has counted.
    computed_again = layer_saved(run) - _checkpoint(run) if run.checkpointing else 0
    # The head comes first in a backward: what `activations` counted for it is free by now.
    free_by_now = head_saved(run)
    per_token = gradients + computed_again - free_by_now

    # The dequantized matrix and, if it is trained, the product that is its gradient.
    matrices = run.compute * max(parameter.entries * (1 + parameter.trained) for parameter in run.in_layers)
    return rows_of_pass(run) * run.tokens * per_token + matrices


def _cast_gradient(run: Run) -> int:
    """Bytes of the float32 copy of a matrix's gradient, which autocast makes of a smaller dtype."""
    if run.compute >= FLOAT32:
        return 0
    return FLOAT32 * max((parameter.entries for parameter in run.in_layers if parameter.trained), default=0)


def _gathered_layers(run: Run) -> int:
    """Bytes that FSDP2 adds: two gathered layers, the gradient of one, and its float32 copy for the reduction."""
    by_layer: dict[str, int] = {}
    for parameter in run.in_layers:
        if parameter.size == 0:  # of a frozen base: FSDP2 does not shard it
            continue

        weight = parameter.entries * run.compute
        if parameter.gathered:
            weight = parameter.quantized * run.ranks
        gradient = parameter.entries * (run.compute + FLOAT32) if parameter.trained else 0

        by_layer.setdefault(parameter.layer, 0)
        by_layer[parameter.layer] += 2 * weight + gradient
    return max(by_layer.values())


def _largest_entries(run: Run) -> int:
    """Entries of the largest matrix of the decoder layers."""
    return max(parameter.entries for parameter in run.in_layers)
