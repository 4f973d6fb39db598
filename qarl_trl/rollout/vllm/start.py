"""What an engine needs at its start and TRL cannot be told.

TRL 1.16 builds a colocated engine by `LLM(...)` in `VLLMGeneration._init_vllm`, from arguments of its own. Two more
settings vLLM takes from the environment alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from trl.generation import vllm_generation


# vLLM's switch that rounds scales of float8 blocks to powers of two. It is on if DeepGEMM is installed
# (`vllm/utils/deep_gemm.py`).
BLOCK_SCALES = "VLLM_USE_DEEP_GEMM_E8M0"


def keep_block_scales() -> None:
    """Make the engine use the synced block scales; by default a Hopper engine rounds them up first."""
    os.environ[BLOCK_SCALES] = "0"


def choose_master_port() -> None:
    """Let the engine's process group meet at a free port. By default two runs would race for TRL's four ports."""
    from vllm.utils.network_utils import get_open_port

    # A port that the user or a launcher chose stays.
    os.environ.setdefault("MASTER_PORT", str(get_open_port()))


def keep_learner_eager() -> None:
    """
    Let the learner run its model as it is, where the engine runs the same class of transformers.

    For families without a class of its own (OLMo-2, StarCoder2, SmolLM3) vLLM prepares transformers' class for its
    compiler, in place. That class then asks each of its models whether to compile it, and the learner's, which is
    older than the engine, has no answer. A model that is loaded later in this process still fails.
    """
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

    # The base class that vLLM adds. An engine's own model has its own answer.
    TorchCompileWithNoGuardsWrapper.do_not_compile = True


@contextmanager
def llm_arguments(built: Callable[[Any], None], /, **extra: Any) -> Iterator[None]:
    """
    Add keyword arguments to the `vllm.LLM(...)` that TRL builds inside this context.

    Args:
        built: Is called with the engine before TRL uses it.
        extra: The arguments. They replace TRL's of the same names.
    """
    original = vllm_generation.LLM

    def build(**kwargs: Any) -> Any:
        llm = original(**kwargs | extra)
        built(llm)
        return llm

    with patch.object(vllm_generation, "LLM", build):
        yield
