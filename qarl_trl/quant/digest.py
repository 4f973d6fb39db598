"""A digest of a model with its low bits, of which a `state_dict` has few or none."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from .layers.layer import quantized_modules
from .scheme import describe_scheme


def with_low_bits(digest: str, model: nn.Module) -> str:
    """
    Join the low bits of a model to a digest of its `state_dict`, which has no tensor of a frozen base, and says
    nothing of the scheme by which master weights are rounded.

    TRL's DPO and KTO (1.16) keep the log-probs of a reference on disk, beside the data set, under such a digest
    (`precompute_ref_log_probs`): runs of other low bits, and those in high precision, would read each other's.

    Args:
        digest: That of the `state_dict`.
        model: The model.

    Returns:
        `digest` itself for a model that computes in high precision.
    """
    # The others compute in high precision (`quantize_learner=False`).
    layers = [(name, layer) for name, layer in quantized_modules(model) if layer.quantized_forward]
    if not layers:
        return digest

    joined = hashlib.sha256(digest.encode())
    for name, layer in layers:
        joined.update(f"{name} {describe_scheme(layer.scheme)}".encode())
        if layer.frozen_weight is None:
            continue
        for tensor_name, tensor in layer.frozen_weight.data.items():
            joined.update(tensor_name.encode())
            # A process that reads no weights has no bytes; TRL takes the key of the first process, which has.
            if not tensor.is_meta:
                joined.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return joined.hexdigest()
