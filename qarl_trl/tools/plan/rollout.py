"""Seconds of a rollout: bytes and products of each decoding step, and processor time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from . import items
from .batch import Batch, answer_lengths
from .costs import COSTS, Costs, Gpu
from .run import Parameter, Run
from .weights import active_entries, expert_share, is_expert, kind_of, products_per_second


BFLOAT16 = 2  # bytes
# Bytes of the logits and probabilities of a token, for each word, that sampling reads and writes: four float32 copies.
SAMPLING = 16


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
    capacity = items.cache_tokens(run)
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
    step = _DecodingStep.of(run, gpu, costs)
    answers = math.ceil(batch.answers / engines(run))
    waiting = answer_lengths(answers, batch.answer_tokens, batch.longest)
    places = sequences_at_once(run, batch)

    seconds = _prefill_seconds(run, batch, gpu, costs)
    running: list[tuple[int, int]] = []  # the step at which an answer ends, and its length
    now = 0
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


def _prefill_seconds(run: Run, batch: Batch, gpu: Gpu, costs: Costs) -> float:
    """Seconds for the prompts, each of which is computed once."""
    tokens = batch.prompts * batch.prompt_tokens / engines(run)
    flops = 2 * sum(active_entries(run, parameter) for parameter in run.in_layers)
    return tokens * flops / run.engine_ranks / (gpu.bf16 * costs.bf16_share)


@dataclass(frozen=True)
class _DecodingStep:
    """
    One decoding step of an engine, on each of its GPUs.

    Attributes:
        products: For each kind of weights the seconds to read those that every token uses, to read all experts, and
            to multiply by one token.
        expert_share: Share of the experts that a token uses; 1 for a dense model.
        cached_token: Seconds to read keys and values of a token.
        head: Seconds to read the output layer.
        sampled_token: Seconds to sample a token.
        kernels: Seconds that kernels take beside what they move and multiply.
        processor: Processor seconds of a step, and of each sequence in it.
        overlaps: Whether the processor prepares the next step meanwhile.
    """

    products: list[tuple[float, float, float]]
    expert_share: float
    cached_token: float
    head: float
    sampled_token: float
    kernels: float
    processor: tuple[float, float]
    overlaps: bool

    @classmethod
    def of(cls, run: Run, gpu: Gpu, costs: Costs) -> _DecodingStep:
        """The step of a run's engine."""
        bandwidth = gpu.bandwidth * costs.bandwidth_share * run.engine_ranks
        words = run.config.vocab_size
        served = [parameter for parameter in run.in_layers if run.frozen or not parameter.in_adapter]
        return cls(
            products=list(_products(run, served, gpu, costs, bandwidth)),
            expert_share=expert_share(run),
            # Each rank reads the heads that it has.
            cached_token=items.token_bytes(run) / (gpu.bandwidth * costs.bandwidth_share),
            head=BFLOAT16 * words * run.config.hidden_size / bandwidth,
            sampled_token=SAMPLING * words / (gpu.bandwidth * costs.bandwidth_share),
            kernels=_kernel_seconds(run, served, costs),
            processor=(costs.engine_step, costs.engine_token),
            # A colocated engine runs in the trainer's process: scheduler and GPU take turns (measured on an H200).
            overlaps=run.engine == "server",
        )

    def seconds(self, count: int, held: float) -> float:
        """Seconds of a step of `count` sequences, which hold `held` tokens in the cache."""
        touched = 1 - (1 - self.expert_share) ** count  # share of the experts that some token uses
        products = sum(max(dense + touched * experts, count * multiply) for dense, experts, multiply in self.products)

        on_gpu = products + held * self.cached_token + self.head + count * self.sampled_token + self.kernels
        on_processor = self.processor[0] + count * self.processor[1]
        return max(on_gpu, on_processor) if self.overlaps else on_gpu + on_processor


def _products(
    run: Run, served: Iterable[Parameter], gpu: Gpu, costs: Costs, bandwidth: float
) -> Iterable[tuple[float, float, float]]:
    """For each kind of weights: seconds to read the dense ones, all experts, and to multiply by a token."""
    by_kind: dict[str, list[Parameter]] = {}
    for parameter in served:
        by_kind.setdefault(kind_of(parameter), []).append(parameter)

    for kind, parameters in by_kind.items():
        dense = 0.0
        experts = 0.0
        flops = 0.0
        for parameter in parameters:
            size = parameter.stored or BFLOAT16 * parameter.entries
            if is_expert(parameter):
                experts += size
            else:
                dense += size
            flops += 2 * active_entries(run, parameter)
        speed = products_per_second(kind, gpu, costs) * run.engine_ranks
        yield dense / bandwidth, experts / bandwidth, flops / speed


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
