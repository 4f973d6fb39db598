"""How an engine starts: arguments that TRL does not give, and settings that vLLM takes from the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from trl.generation import vllm_generation


# vLLM's switch that rounds scales of float8 blocks to powers of two. It is on if DeepGEMM is installed
# (`vllm.utils.deep_gemm`).
BLOCK_SCALES = "VLLM_USE_DEEP_GEMM_E8M0"


def keep_block_scales() -> None:
    """Make the engine use the synced block scales; by default a Hopper engine rounds them up first."""
    os.environ[BLOCK_SCALES] = "0"


def choose_master_port() -> None:
    """Let the engine's process group meet at a free port. By default two runs would race for TRL's four ports."""
    from vllm.utils.network_utils import get_open_port

    os.environ.setdefault("MASTER_PORT", str(get_open_port()))


@contextmanager
def llm_arguments(built: Callable[[Any], None] | None = None, /, **extra: Any) -> Iterator[None]:
    """
    Add keyword arguments to the `vllm.LLM(...)` that TRL builds inside this context.

    Args:
        built: Is called with the engine before TRL uses it.
        extra: The arguments. They replace TRL's of the same names.
    """
    # TRL builds the engine from arguments of its own, and has no place for others.
    original = vllm_generation.LLM

    def build(**kwargs: Any) -> Any:
        llm = original(**kwargs | extra)
        if built is not None:
            built(llm)
        return llm

    with patch.object(vllm_generation, "LLM", build):
        yield
