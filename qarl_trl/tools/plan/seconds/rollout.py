"""Seconds of a rollout: bytes and products of each decoding step, and processor time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from ..gpus import Gpu
from ..memory.engine import cache_tokens, token_bytes
from ..run import BFLOAT16, FLOAT32, Parameter, Run
from .batch import Batch, answer_lengths
from .costs import COSTS, Costs
from .weights import active_entries, expert_share, kind_of, products_per_second


# Bytes for each word of the vocabulary that sampling a token reads and writes: logits and probabilities, four float32
# copies; counted.
SAMPLING = 4 * FLOAT32


def engines(run: Run) -> int:
    """
    Number of engines, which share the answers.

    Args:
        run: The run.
    """
    return 1 if run.engine == "server" else run.ranks // run.engine_ranks


def sequences_at_once(run: Run, batch: Batch) -> int:
    """
    Sequences that an engine runs at once: all of its answers, or as many as its cache holds; 0 if it holds not one.

    Args:
        run: The run.
        batch: Its rollout batch.
    """
    capacity = cache_tokens(run)
    if capacity < run.tokens:
        return 0

    answers = math.ceil(batch.answers / engines(run))
    lengths = answer_lengths(answers, batch.answer_tokens, batch.longest)
    # In the mean over time a sequence holds its prompt and half of its answer, and long answers stay longer.
    half_answer = sum(length**2 for length in lengths) / sum(lengths) / 2
    return max(1, min(answers, int(capacity / (batch.prompt_tokens + half_answer))))


def rollout_seconds(run: Run, batch: Batch, gpu: Gpu, costs: Costs = COSTS) -> float:
    """
    Seconds of a rollout: prefill, then decoding until the last answer has ended.

    An answer starts when another has ended, if the cache does not hold all. What an engine computes twice because its
    cache was full is not counted.

    Args:
        run: The run, whose engine holds at least one sequence.
        batch: Its rollout batch.
        gpu: The GPU.
        costs: What operations cost.
    """
    return _prefill_seconds(run, batch, gpu, costs) + _decoding_seconds(run, batch, gpu, costs)


def _prefill_seconds(run: Run, batch: Batch, gpu: Gpu, costs: Costs) -> float:
    """Seconds for the prompts, each of which is computed once."""
    tokens = batch.prompts * batch.prompt_tokens / engines(run)
    # A multiplication and an addition for each entry of a matrix.
    flops = 2 * sum(active_entries(run, parameter) for parameter in run.in_layers)
    return tokens * flops / run.engine_ranks / (gpu.bf16 * costs.bf16_share)


def _decoding_seconds(run: Run, batch: Batch, gpu: Gpu, costs: Costs) -> float:
    """Seconds from the first token of an answer to the end of the last answer."""
    step = _DecodingStep.of(run, gpu, costs)
    answers = math.ceil(batch.answers / engines(run))
    waiting = answer_lengths(answers, batch.answer_tokens, batch.longest)
    places = sequences_at_once(run, batch)

    seconds = 0.0
    running: list[tuple[int, int]] = []  # the step at which an answer ends, and its length
    now = 0  # steps
    held = 0.0  # tokens in the cache
    while waiting or running:
        while waiting and len(running) < places:
            length = waiting.pop()
            heappush(running, (now + length, length))
            held += batch.prompt_tokens

        # Until the next answer ends each step adds a token to each sequence. The mean of them counts.
        count = len(running)
        end, length = heappop(running)
        steps = end - now
        seconds += steps * step.seconds(count, held + count * steps / 2)

        held += count * steps - batch.prompt_tokens - length
        now = end
    return seconds


@dataclass(frozen=True)
class _Products:
    """
    The products of a decoding step with weights of one kind, in seconds.

    Attributes:
        read_dense: To read the weights that every token uses.
        read_experts: To read the weights of all experts.
        multiply: To multiply one token by what it uses.
    """

    read_dense: float
    read_experts: float
    multiply: float

    def seconds(self, count: int, touched: float) -> float:
        """For `count` tokens, of which some use the share `touched` of the experts."""
        reading = self.read_dense + touched * self.read_experts
        return max(reading, count * self.multiply)


@dataclass(frozen=True)
class _DecodingStep:
    """
    One decoding step of an engine, on each of its GPUs.

    Attributes:
        products: Those with each kind of weights.
        expert_share: Share of the experts that a token uses; 1 for a dense model.
        cached_token: Seconds to read keys and values of a token.
        head: Seconds to read the output layer.
        sampled_token: Seconds to sample a token.
        kernels: Seconds that kernels take beside what they move and multiply.
        processor_step: Processor seconds of a step.
        processor_token: Processor seconds of each sequence in it.
        overlaps: Whether the processor prepares the next step meanwhile.
    """

    products: list[_Products]
    expert_share: float
    cached_token: float
    head: float
    sampled_token: float
    kernels: float
    processor_step: float
    processor_token: float
    overlaps: bool

    @classmethod
    def of(cls, run: Run, gpu: Gpu, costs: Costs) -> _DecodingStep:
        """The step of a run's engine."""
        bandwidth = gpu.bandwidth * costs.bandwidth_share * run.engine_ranks
        words = run.config.vocab_size
        served = [parameter for parameter in run.in_layers if run.frozen or not parameter.in_adapter]
        return cls(
            products=_products(run, served, gpu, costs, bandwidth),
            expert_share=expert_share(run),
            # Each rank reads the heads that it has.
            cached_token=token_bytes(run) / (gpu.bandwidth * costs.bandwidth_share),
            head=BFLOAT16 * words * run.config.hidden_size / bandwidth,
            sampled_token=SAMPLING * words / (gpu.bandwidth * costs.bandwidth_share),
            kernels=_kernel_seconds(run, served, costs),
            processor_step=costs.engine_step,
            processor_token=costs.engine_token,
            # A colocated engine runs in the trainer's process: scheduler and GPU take turns (measured on an H200).
            overlaps=run.engine == "server",
        )

    def seconds(self, count: int, held: float) -> float:
        """Seconds of a step of `count` sequences, which hold `held` tokens in the cache."""
        touched = 1 - (1 - self.expert_share) ** count  # share of the experts that some token uses
        products = sum(of_kind.seconds(count, touched) for of_kind in self.products)

        on_gpu = products + held * self.cached_token + self.head + count * self.sampled_token + self.kernels
        on_processor = self.processor_step + count * self.processor_token
        if self.overlaps:
            return max(on_gpu, on_processor)
        return on_gpu + on_processor


def _products(run: Run, served: Iterable[Parameter], gpu: Gpu, costs: Costs, bandwidth: float) -> list[_Products]:
    """The products with each kind of weights; `bandwidth` is that of all GPUs of an engine, in bytes/s."""
    by_kind: dict[str, list[Parameter]] = {}
    for parameter in served:
        by_kind.setdefault(kind_of(parameter), []).append(parameter)

    products = []
    for kind, parameters in by_kind.items():
        dense = 0.0
        experts = 0.0
        flops = 0.0
        for parameter in parameters:
            # As the engine holds it: low-bit tensors, or bfloat16.
            size = parameter.stored or BFLOAT16 * parameter.entries
            if parameter.holds_experts:
                experts += size
            else:
                dense += size
            flops += 2 * active_entries(run, parameter)
        speed = products_per_second(kind, gpu, costs) * run.engine_ranks
        products.append(_Products(dense / bandwidth, experts / bandwidth, flops / speed))
    return products


def _kernel_seconds(run: Run, served: Iterable[Parameter], costs: Costs) -> float:
    """Seconds of a step that its kernels take beside what they move and multiply."""
    kinds = {kind_of(parameter) for parameter in served}
    layer = costs.eager_layer if run.eager else costs.layer_kernels
    if "packed" in kinds:
        layer += costs.dequantizing_kernels
    if "rounded" in kinds:
        layer += costs.rounding_kernels
    if run.frozen:
        layer += costs.adapter_kernels
    if run.engine_ranks > 1:
        layer += costs.all_reduces
    return layer * run.config.num_hidden_layers
