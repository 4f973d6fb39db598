"""An engine's model on a pretended GPU: started, synced, put to sleep, and all its tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from conftest import make_model
from slow.toys import copies

from .cuda import cuda


# Weights of whole kernel tiles: what pads is tested by itself.
WHOLE_TILES = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "intermediate_size": 512,
}
# Marlin pads the 480 rows of q, k and v to 512.
PADDED = {**WHOLE_TILES, "hidden_size": 384, "num_attention_heads": 8, "num_key_value_heads": 1}


def make_learner(kind: str, scheme: str, sizes: dict[str, int] = WHOLE_TILES) -> torch.nn.Module:
    """A model of a family of `conftest.KINDS`, quantized unless `scheme` is `"none"`."""
    from qarl_trl.quant import apply_quantization

    model = make_model(kind, **sizes)
    if scheme != "none":
        apply_quantization(model, scheme)
    return model


class Engine:
    """
    vLLM's model for a learner, with random weights.

    Args:
        folder: Empty, for files.
        learner: Its config and its scheme are the engine's.
        capability: The compute capability of the GPU.
        expert_parallel: Whether each of several processes has some of the experts, or a part of each.
    """

    def __init__(self, folder: str, learner: Any, capability: tuple[int, int], expert_parallel: bool = True) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model_loader

        from qarl_trl.rollout.vllm import random_start, start

        self._capability = capability
        self._settings = _settings(folder, learner, expert_parallel)
        start.keep_block_scales()
        random_start.keep_constants()
        with set_current_vllm_config(self._settings):
            _start_group(folder)
            with cuda(capability):
                loader = get_model_loader(self._settings.load_config)
                model_config = self._settings.model_config
                self.model = loader.load_model(vllm_config=self._settings, model_config=model_config)

    def sync(self, weights: dict[str, torch.Tensor]) -> None:
        """As a colocated engine is synced."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        from qarl_trl.rollout.vllm import reloading

        # What vLLM's `reload_weights` does in a worker, of which there is none here.
        def reload(stream: Iterator[tuple[str, torch.Tensor]]) -> None:
            initialize_layerwise_reload(self.model)
            self.model.load_weights(stream)
            finalize_layerwise_reload(self.model, self._settings.model_config)

        with set_current_vllm_config(self._settings), cuda(self._capability):
            reloading.reload_model(self.model, weights.items(), reload)

    def sleep(self) -> None:
        """Fill memory as a sleep of level 2 leaves it: with anything, but in buffers."""
        # vLLM saves buffers before a sleep of level 2, and restores them.
        buffers = {buffer.data_ptr() for buffer in self.model.buffers()}
        for tensor in self.places().values():
            if tensor.numel() and tensor.data_ptr() not in buffers:
                # Of all bytes: no plausible weight, scale or index.
                tensor.untyped_storage().fill_(0x7F)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that a forward could read: parameters, buffers, and what hangs on kernels and on experts."""
        tensors: dict[str, torch.Tensor] = {}
        _collect(self.model, "", tensors, seen=set())
        return tensors

    def copies(self) -> dict[str, torch.Tensor]:
        return copies(self.tensors().items())

    def places(self) -> dict[str, torch.Tensor]:
        """
        The tensors on the GPU, where a CUDA graph reads them.

        They keep their memory, so that no later tensor is at the same address by chance.
        """
        places = {}
        for name, tensor in self.tensors().items():
            # vLLM's copies for the host, which no graph reads.
            if not name.endswith("_cpu"):
                places[name] = tensor.detach()
        return places

    def query_scale(self) -> float:
        """The scale of the queries in the first layer's attention; 1 without a quantized cache."""
        return self.model.model.layers[0].self_attn.attn._q_scale_float

    def kernel(self) -> str:
        """The class that multiplies in the first layer's MLP."""
        mlp = self.model.model.layers[0].mlp
        layer = mlp.experts.routed_experts if hasattr(mlp, "experts") else mlp.down_proj
        method = layer.quant_method
        scheme = getattr(layer, "scheme", None)

        candidates = [
            getattr(scheme, "kernel", None),
            getattr(scheme, "fp8_linear", None),
            getattr(scheme, "linear_kernel", None),
            getattr(method, "experts_cls", None),
            scheme,
            method,
        ]
        # The first that is there: each scheme of vLLM has its own place for it.
        kernel = next(filter(None, candidates))
        return kernel.__name__ if isinstance(kernel, type) else type(kernel).__name__


def _settings(folder: str, learner: Any, expert_parallel: bool) -> Any:
    """vLLM's, for a model with the config of the learner; in several processes for a part of it."""
    from vllm.engine.arg_utils import EngineArgs

    from qarl_trl.export import quantization_config

    # One for each rank: another one would read a file that is being written.
    folder = os.path.join(folder, f"rank-{os.environ.get('RANK', 0)}")
    learner.config.save_pretrained(folder)
    quantization = quantization_config(learner)
    overrides = {} if quantization is None else {"quantization_config": quantization}
    arguments = EngineArgs(
        folder,
        load_format="dummy",
        hf_overrides=overrides,
        enforce_eager=True,
        max_model_len=64,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        tensor_parallel_size=int(os.environ.get("WORLD_SIZE", 1)),
        enable_expert_parallel=expert_parallel and bool(getattr(learner.config, "num_experts", 0)),
    )
    return arguments.create_engine_config()


def _start_group(folder: str) -> None:
    """The group of an engine's processes, once in a process."""
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    # vLLM's groups are global, and a process may make several engines.
    if torch.distributed.is_initialized():
        return

    os.environ.setdefault("VLLM_DIST_IDENT", "")  # of a single process; `isolated_group` gives one
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    address = "env://" if ranks > 1 else f"file://{folder}/store"
    init_distributed_environment(ranks, rank, address, rank, "gloo")
    ensure_model_parallel_initialized(ranks, 1)


def _collect(owner: Any, path: str, tensors: dict[str, torch.Tensor], seen: set[int]) -> None:
    """Add the tensors that an object holds, by every path to them; each object but tensors once."""
    if isinstance(owner, torch.Tensor):
        if owner.device.type != "meta":  # what the reload keeps of a layer's form
            name = path.replace("_modules.", "").replace("_parameters.", "").replace("_buffers.", "")
            tensors[name] = owner
        return

    if id(owner) in seen:
        return
    seen.add(id(owner))

    for name, part in _parts(owner):
        _collect(part, f"{path}.{name}".removeprefix("."), tensors, seen)


def _parts(owner: Any) -> Iterable[tuple[Any, Any]]:
    """What a container, or an object of vLLM's layers or of torch, holds."""
    if isinstance(owner, dict):
        return list(owner.items())
    if isinstance(owner, list | tuple):
        return list(enumerate(owner))
    of_layers = type(owner).__module__.startswith(("vllm.model_executor", "torch.nn"))
    if of_layers and hasattr(owner, "__dict__"):
        return list(vars(owner).items())
    return []
