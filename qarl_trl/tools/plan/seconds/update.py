"""Seconds of the learner for a rollout batch: passes of forward and backward, and optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..gpus import Gpu
from ..memory.backward import layer_saved
from ..run import FLOAT32, Parameter, Run
from .batch import Batch
from .costs import COSTS, Costs
from .optimizer import optimizer_seconds
from .weights import active_entries, kind_of, products_per_second


def update_seconds(run: Run, batch: Batch, gpu: Gpu, costs: Costs = COSTS) -> float:
    """
    Seconds of all passes and optimizer steps of a rollout batch. Rewards, saving and evaluation are not counted.

    Args:
        run: The run.
        batch: Its rollout batch.
        gpu: The GPU.
        costs: What operations cost.
    """
    learner = Learner(run, batch, gpu, costs)
    trained = batch.iterations * batch.micro_batches

    seconds = trained * (learner.forward_per_micro_batch() + learner.backward_per_micro_batch() + costs.micro_batch)
    if batch.has_old:
        seconds += batch.micro_batches * learner.forward_per_micro_batch()
    if batch.has_reference:
        # The base of an adapter, as the learner multiplies by it; otherwise a second model, in high precision.
        reference = learner if run.has_adapter else replace(learner, run=replace(run, low_bit_forward=False))
        seconds += batch.micro_batches * reference.forward_per_micro_batch()

    seconds += batch.updates * (optimizer_seconds(run, gpu, costs) + learner.keep_matrices_per_update())
    # The sync has the last quantizing of a rollout batch.
    return seconds + (batch.updates - 1) * learner.quantize_per_update()


@dataclass(frozen=True)
class Learner:
    """
    The passes of a micro-batch, in seconds.

    Read `forward_per_micro_batch` and `backward_per_micro_batch` first: each adds up properties, whose names say what
    they are the seconds of.

    Attributes:
        run: The run.
        batch: Its rollout batch.
        gpu: The GPU.
        costs: What operations cost.
    """

    run: Run
    batch: Batch
    gpu: Gpu
    costs: Costs

    # Passes --------------------------------------------------------------------------------------------------------

    def forward_per_micro_batch(self) -> float:
        """A forward of a micro-batch, as the log-probs before the updates need it, or the loss."""
        on_gpu = self._tokens * (self._layers_per_token + self._head_per_token) + self._passes * self._weights_per_pass
        launching = self._passes * self._launch_forward_per_pass
        return self._together(on_gpu, launching, self._passes * self._gather_per_pass)

    def backward_per_micro_batch(self) -> float:
        """A backward of a micro-batch, with the forward of each layer again if gradients are checkpointed."""
        costs = self.costs
        # The product that is the gradient of the input, and if the matrix is trained the one that is its own.
        products_of_a_matrix = 2 if self._trains_matrices else 1

        products = products_of_a_matrix * self._products_in_bf16_per_token
        layers = (
            products
            + costs.attention_backward * self._attention_per_token
            + costs.between_backward * self._between_per_token
        )
        head = (1 + products_of_a_matrix) * self._head_per_token  # the fused head computes its logits again

        on_gpu = self._tokens * (layers + head) + self._passes * self._dequantizing_per_pass
        launching = self._passes * (
            costs.launch_backward * self._launch_layers_per_pass + self._launch_low_bits_per_pass
        )
        if self.run.checkpointing:
            on_gpu += self._tokens * self._layers_per_token + self._passes * self._weights_per_pass
            launching += self._passes * self._launch_forward_per_pass

        communication = self._passes * self._gather_per_pass + self._reduce_per_micro_batch
        return self._together(on_gpu, launching, communication)

    def _together(self, on_gpu: float, launching: float, communication: float) -> float:
        """Seconds of what runs at the same time: a processor that launches, a GPU, and its link."""
        longest = max(on_gpu, launching) + self.costs.not_hidden * min(on_gpu, launching)
        return max(longest, communication)

    # Sizes ---------------------------------------------------------------------------------------------------------

    @property
    def _tokens(self) -> float:
        """Tokens of a micro-batch."""
        if self.run.budget is None:  # padded
            return self.run.rows * (self.batch.prompt_tokens + self.batch.longest)
        return self.run.rows * (self.batch.prompt_tokens + self.batch.answer_tokens)

    @property
    def _passes(self) -> int:
        """Passes of a micro-batch."""
        if self.run.budget is None:
            return 1
        return max(1, math.ceil(self._tokens / self.run.budget))

    @property
    def _trains_matrices(self) -> bool:
        """Whether the matrices of the base have gradients."""
        return not self.run.has_adapter

    @property
    def _low_bits(self) -> list[Parameter]:
        """The parameters by whose low-bit values the learner multiplies."""
        if not self.run.low_bit_forward:
            return []
        return [parameter for parameter in self.run.in_layers if parameter.quantized]

    # Seconds of the GPU for a token --------------------------------------------------------------------------------

    @property
    def _layers_per_token(self) -> float:
        """All layers, forward."""
        rounded = {id(parameter) for parameter in self._low_bits if parameter.rounds_inputs}
        in_8_bits = sum(
            self._flops_per_token(parameter) for parameter in self.run.in_layers if id(parameter) in rounded
        )
        in_bf16 = sum(
            self._flops_per_token(parameter) for parameter in self.run.in_layers if id(parameter) not in rounded
        )

        products = in_8_bits / products_per_second("rounded", self.gpu, self.costs) + in_bf16 / self._bf16
        return products + self._attention_per_token + self._between_per_token

    @property
    def _products_in_bf16_per_token(self) -> float:
        """One product with each matrix of the layers, in bfloat16."""
        return sum(self._flops_per_token(parameter) for parameter in self.run.in_layers) / self._bf16

    def _flops_per_token(self, parameter: Parameter) -> float:
        return 2 * active_entries(self.run, parameter)

    @property
    def _attention_per_token(self) -> float:
        """Attention of all layers, forward: to half of the row's tokens in the mean."""
        config = self.run.config
        row = self.batch.prompt_tokens + self.batch.answer_tokens
        # Two products, of queries with keys and of scores with values, of 2 flops each; causality halves them.
        flops = row * config.num_attention_heads * self.run.attended * config.num_hidden_layers
        return flops / (self.gpu.bf16 * self.costs.attention_share)

    @property
    def _between_per_token(self) -> float:
        """Norms, rotary embeddings, SwiGLU, residuals and roundings of all layers, forward."""
        saved = layer_saved(replace(self.run, low_bit_forward=False))
        size = self.costs.between * saved * self.run.config.num_hidden_layers
        for parameter in self._low_bits:
            if parameter.rounds_inputs:
                size += self.costs.round_input * active_entries(self.run, parameter) / parameter.shape[-2]
        return size / self._bandwidth

    @property
    def _head_per_token(self) -> float:
        """The output layer, forward."""
        return 2 * self.run.config.vocab_size * self.run.config.hidden_size / self._bf16

    @property
    def _bf16(self) -> float:
        return self.gpu.bf16 * self.costs.bf16_share

    @property
    def _bandwidth(self) -> float:
        return self.gpu.bandwidth * self.costs.bandwidth_share

    # Seconds of the GPU for a pass ---------------------------------------------------------------------------------

    @property
    def _weights_per_pass(self) -> float:
        """Dequantize the weights of a forward, and cast those that are not in the dtype of the products."""
        run = self.run
        seconds = self._dequantizing_of_kind("packed")
        if run.fsdp2:  # which casts before it gathers
            return seconds

        low_bits = {id(parameter) for parameter in self._low_bits}
        for parameter in run.in_layers:
            if id(parameter) not in low_bits and parameter.size > run.compute:
                seconds += (parameter.size + run.compute) * parameter.entries / self._bandwidth
        return seconds

    @property
    def _dequantizing_per_pass(self) -> float:
        """Dequantize the weights of a backward."""
        return self._dequantizing_of_kind("packed") + self._dequantizing_of_kind("rounded")

    def _dequantizing_of_kind(self, kind: str) -> float:
        if self.run.keeps_matrices:
            return 0.0
        return self._matrix_bytes(kind) / self._bandwidth

    def _matrix_bytes(self, kind: str) -> float:
        """Bytes that dequantizing all weights of a kind reads and writes."""
        return sum(
            parameter.stored + self.run.compute * parameter.entries
            for parameter in self._low_bits
            if kind_of(parameter) == kind
        )

    # Seconds of the processor for a pass ---------------------------------------------------------------------------

    @property
    def _launch_forward_per_pass(self) -> float:
        return self._launch_layers_per_pass + self._launch_low_bits_per_pass

    @property
    def _launch_layers_per_pass(self) -> float:
        """Launch the kernels of all layers, without those of low bits."""
        seconds = self.costs.launch_layer * self.run.config.num_hidden_layers
        # A merged adapter is in the weight that is quantized, so that a pass does not see it.
        if self.run.has_adapter and (self.run.frozen or not self.run.low_bit_forward):
            factors = sum(parameter.in_adapter for parameter in self.run.in_layers)
            seconds += self.costs.launch_adapter * factors / 2
        return seconds

    @property
    def _launch_low_bits_per_pass(self) -> float:
        """Launch what low-bit weights add to a pass."""
        seconds = 0.0
        for parameter in self._low_bits:
            if parameter.rounds_inputs:
                seconds += self.costs.launch_round
            elif not self.run.keeps_matrices:
                seconds += self.costs.launch_dequantize
        return seconds

    # Communication -------------------------------------------------------------------------------------------------

    @property
    def _gather_per_pass(self) -> float:
        """Gather the weights of a pass under FSDP2."""
        run = self.run
        if not run.fsdp2:
            return 0.0

        size = 0
        for parameter in run.parameters:
            if parameter.size:  # a frozen base is not sharded
                size += parameter.quantized * run.ranks if parameter.gathered else run.compute * parameter.entries
        return size / (self.gpu.link * self.costs.link_share)

    @property
    def _reduce_per_micro_batch(self) -> float:
        """Reduce the gradients of a micro-batch under FSDP2, in float32."""
        if not self.run.fsdp2:
            return 0.0
        entries = sum(parameter.entries for parameter in self.run.parameters if parameter.trained)
        return FLOAT32 * entries / (self.gpu.link * self.costs.link_share)

    # Once in an update ---------------------------------------------------------------------------------------------

    def quantize_per_update(self) -> float:
        """Quantize all weights of the learner after an optimizer step."""
        if self.run.frozen:
            return 0.0

        entries = sum(self.run.local_entries(parameter) for parameter in self._low_bits)
        reading = self.costs.quantize_bytes * entries / self._bandwidth
        return max(reading, self.costs.quantize * len(self._low_bits))

    def keep_matrices_per_update(self) -> float:
        """Dequantize the matrices that `quant_keep_matrices` keeps; those of a frozen base stay for good."""
        if not self.run.keeps_matrices or self.run.frozen:
            return 0.0

        matrices = sum(kind_of(parameter) == "packed" for parameter in self._low_bits)
        return max(self._matrix_bytes("packed") / self._bandwidth, self.costs.launch_dequantize * matrices)
