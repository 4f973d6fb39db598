"""The constants of the estimated seconds: what operations cost, all in one place.

What GPUs can do is in `gpus.py`. dev/plan.md compares the estimates with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """
    What operations cost. Shares have no unit; all else is in seconds, if a line does not say otherwise.

    "H200": measured on one with vLLM 0.26 and torch 2.11; raw figures in benchmarks/results/h200. "fitted": taken from
    those figures by a division that the line gives. "assumed": nobody has measured it.
    """

    # Shares of a data sheet's number that kernels reach ------------------------------------------------------------

    bandwidth_share: float = 0.80  # large copies; assumed
    bf16_share: float = 0.55  # products of a learner; assumed. With it 32 x 552 tokens take 0.48 of the 0.51 s (H200)
    dequantizing_share: float = 0.45  # of bf16, for kernels that dequantize 4-bit weights (Marlin); assumed
    eight_bits_share: float = 0.50  # of 8-bit products; assumed
    attention_share: float = 0.35  # of bf16, for torch's fused attention; assumed
    link_share: float = 0.67  # of a link, for collectives of all GPUs; assumed

    # Engine, each decoding step ------------------------------------------------------------------------------------

    # The kernels of a layer in a CUDA graph, beside the bytes that they move: about 12 of 3 us; assumed.
    layer_kernels: float = 35e-6
    # The same without CUDA graphs, where a processor launches each; assumed, from vLLM's reports.
    eager_layer: float = 450e-6
    # What four kernels that dequantize add to a layer; fitted: 1.5B takes 2.57 s for 512 steps, bf16 2.15 (H200).
    dequantizing_kernels: float = 40e-6
    # What rounding the inputs of a layer adds: four more kernels of 3 us; assumed.
    rounding_kernels: float = 12e-6
    # What adapters beside a frozen base add to a layer; fitted: 8B takes 4.70 s for 512 steps (H200).
    adapter_kernels: float = 40e-6
    # Two sums over the GPUs of an engine, in each layer; assumed.
    all_reduces: float = 24e-6
    # vLLM's processor time of a step, and of a sequence in it with TRL's reading of log-probs: measured on a Xeon.
    engine_step: float = 1.0e-3
    engine_token: float = 18e-6
    # Waking an engine, if it sleeps; assumed.
    wake: float = 1.0

    # Weight sync, of each tensor: Python, mostly that of vLLM's reload ----------------------------------------------

    sync_tensor: float = 0.44e-3  # bfloat16; fitted: 0.15 s of 338 tensors (H200)
    sync_packed: float = 3.0e-3  # a matrix of packed weights; fitted: 0.66 s of 196, and 142 other tensors (H200)
    sync_rounded: float = 1.7e-3  # a matrix with rounded inputs; fitted: 0.40 s of the same (H200)
    sync_adapter: float = 0.60e-3  # a factor beside a frozen base; fitted: 0.30 s of 504 (H200)
    sync_expert: float = 0.17e-3  # a matrix of an expert, bfloat16; measured on a Xeon
    # The matrices of all experts for one projection of a layer, in a model with low bits; of packed ones 4.5 ms are
    # Marlin's Python for each expert. Measured on an EPYC, times 0.48: the Xeon's share of its time for one by one.
    sync_stack: float = 0.5e-3
    sync_packed_stack: float = 5.0e-3
    sync_copies: float = 6.0  # how often a synced byte is read or written on the way; counted

    # Learner: launching ---------------------------------------------------------------------------------------------

    # A layer's forward; fitted: 8 x 552 tokens take 0.213 s of launching for 28 layers x 3.5, forward twice and a
    # backward of 1.5 (H200). Python on another processor takes another time.
    launch_layer: float = 1.93e-3
    launch_backward: float = 1.5  # a backward launches so many times what its forward does; counted
    launch_adapter: float = 0.25e-3  # an adapter of a matrix: 6 operations, where a layer has 45; assumed
    launch_dequantize: float = 0.27e-3  # a matrix, each time; fitted: 0.37 and 0.21 s, 196 matrices x 3 (H200)
    launch_round: float = 0.39e-3  # a matrix with rounded inputs; fitted: updates of 5.7 and 3.3 s (H200)
    # Share of the shorter of launching and computing that the longer does not hide; fitted: 32 x 552 tokens (H200).
    not_hidden: float = 0.2
    # TRL and the loss in each micro-batch: metrics, gathers, packing; fitted: the rest of an update of 1.5B (H200).
    micro_batch: float = 0.12
    # Quantizing a weight, each time; fitted: 0.10 s of 196 (H200).
    quantize: float = 0.51e-3

    # Learner: bytes and products ------------------------------------------------------------------------------------

    between: float = 2.5  # times the bytes that a layer saves, which kernels between products read and write; counted
    between_backward: float = 1.7  # times those of a forward; counted
    attention_backward: float = 2.5  # times the products of a forward: 5 where it has 2; counted
    round_input: float = 1.5  # bytes of each input of a matrix that is rounded; half share theirs; counted
    quantize_bytes: float = 10.5  # bytes of each quantized weight: read in float32, written, read again; counted
    adam_bytes: float = 28.0  # bytes of each trained entry in a step: weight, gradient, two moments; counted
    muon_matrix: float = 0.3e-3  # a matrix in Muon: 45 kernels of 7 us; assumed
    paging: float = 25e9  # bytes/s between host and GPU (PCIe 4), for optimizers that are paged; assumed


COSTS = Costs()
