"""What a learner and the engine of a server must have in common.

A server is started by hand, and from the model's files. If its model, scheme, vLLM or revision of this package is not
that of the run, a sync may still succeed. So both ends state the same facts, and the trainer compares them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers.utils import flatten_dict

from ..._compat.versions import installed_version


# The version of weights that no sync has replaced yet (`worker.py`).
RANDOM = "random"
# Fields of a config that tell most text models apart. The sync check sees the rest.
_OF_THE_MODEL = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_experts_per_tok",
    # Beyond the prompt of the sync check.
    "layer_types",
    "sliding_window",
    "attention_chunk_size",
    "attn_temperature_tuning",
    "floor_scale",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "tie_word_embeddings",
)


def digest_of_sources(package: Path) -> str:
    """
    Name a revision of a package by its source, since all revisions between two releases have one version number.

    Args:
        package: Its folder.

    Returns:
        The first digits of a SHA-256 over the names and the bytes of its Python files.
    """
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


# When this process loads the packages, because their files may change while a server runs.
_REVISION = digest_of_sources(Path(__file__).resolve().parents[2])
_VLLM = installed_version("vllm")


def engine_facts(
    config: PretrainedConfig,
    quantization: dict[str, Any] | None,
    cache_dtype: str = "auto",
    adapter: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """
    Facts that learner and server must share.

    Args:
        config: The model's config.
        quantization: compressed-tensors' config of its schemes; `None` for bfloat16.
        cache_dtype: vLLM's `kv_cache_dtype`.
        adapter: The arguments of `vllm.LLM` for the adapter of a frozen base; `None` without one.

    Returns:
        Plain values by dotted name, such as `config.hidden_size`.
    """
    text_config = config.get_text_config()
    facts = {
        "config": {name: getattr(text_config, name, None) for name in _OF_THE_MODEL},
        "quantization_config": quantization,
        "kv_cache_dtype": cache_dtype,
        "adapter": adapter,
        "vllm": _VLLM,
        "revision of qarl_trl": _REVISION,
    }

    # The server's facts come through JSON, so these go through it too: tuples become lists.
    plain = json.loads(json.dumps(facts))
    return {name: value for name, value in flatten_dict(plain).items() if value != {}}
