"""Runs for tests of the plan: a recipe for 8 GPUs in numbers, with any of them replaced."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig

from qarl_trl.tools.plan import model as meta
from qarl_trl.tools.plan.rank import GIB, Run


def example_run(model: nn.Module, config: PretrainedConfig, muon: bool = True, **changes: Any) -> Run:
    settings = {
        "parameters": meta.parameters(model, muon),
        "layer": meta.decoder_layer(model, config, low_bit_forward=True),
        "layers": config.num_hidden_layers,
        "vocabulary": config.vocab_size,
        "ranks": 1,
        "sharded": False,
        "memory": 79 * GIB,
        "rows": 4,
        "tokens": 18432,
        "budget": 22528,
        "checkpointing": True,
        "half": True,
        "utilization": 0.5,
        "sleep": True,
        "engine_ranks": 1,
    }
    return Run(**settings | changes)
