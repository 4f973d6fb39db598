"""A short run beside a real colocated engine on a GPU: fresh syncs, aligned log-probs, a checkpoint that loads."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from slow.isolated import isolated
from slow.toys import engine_logprobs, fresh_engine_logprobs, make_trainer, save_model, stored_tensors, sync

from qarl_trl.quant.table import SUPPORTED, gpu_generation


pytestmark = pytest.mark.gpu
# The last two have stages of first_run.py too, which may leave no time for all.
SCHEMES = ["W8A8", "W4AFP8", "W4A16", "FP8_DYNAMIC"]


def _run(model: str, folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    if "vllm_engine_kwargs" in changes:
        torch._dynamo.config.disable = False  # which `isolated` has switched off
    trainer = make_trainer(model, Path(folder), use_cpu=False, max_completion_length=32, **changes)
    trainer.train()
    llm = trainer.vllm_generation.llm
    first = sync(trainer.vllm_generation)
    before = engine_logprobs(llm)
    master_weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    sync(trainer.vllm_generation)
    other = engine_logprobs(llm)
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            p.copy_(master_weights[name])
    sync(trainer.vllm_generation)
    trainer.save_model(folder)
    saved = stored_tensors(folder)
    logp_diffs = [
        row["mismatch/logp_diff_mean"] for row in trainer.state.log_history if "mismatch/logp_diff_mean" in row
    ]
    return {
        "logp_diff": sum(logp_diffs) / len(logp_diffs),
        "fresh": engine_logprobs(llm) == before != other,
        "saved": all(torch.equal(t.cpu(), saved[name]) for name, t in first.items()),
        "answers": before[0],
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("gpu") / "model", layers=4)


@pytest.fixture(scope="module")
def floor(model, tmp_path_factory):
    return isolated(_run, model, str(tmp_path_factory.mktemp("floor")), {"quant_scheme": "none"})["logp_diff"]


@pytest.fixture(scope="module")
def baseline(model, tmp_path_factory):
    """The mismatch of a learner in bfloat16."""

    @functools.cache
    def logp_diff(scheme):
        folder = str(tmp_path_factory.mktemp("baseline"))
        return isolated(_run, model, folder, {"quant_scheme": scheme, "quantize_learner": False})["logp_diff"]

    return logp_diff


def needs(scheme):
    if gpu_generation(torch.cuda.get_device_capability()) not in SUPPORTED[scheme].gpus:
        pytest.skip(f"{scheme} needs one of {SUPPORTED[scheme].gpus}")


@pytest.mark.parametrize(("scheme", "kernel"), [("W4A16", "auto"), ("W4A16", "engine"), ("FP8_DYNAMIC", "engine")])
def test_a_compiled_engine_with_graphs_answers_from_what_was_synced(model, baseline, tmp_path, scheme, kernel):
    """As users have it; the others run eagerly, which starts faster."""
    needs(scheme)
    changes = {"quant_scheme": scheme, "quant_kernel": kernel, "vllm_engine_kwargs": {"enforce_eager": False}}
    found = isolated(_run, model, str(tmp_path / "run"), changes)
    assert found["fresh"]
    assert found["saved"]
    assert found["logp_diff"] < baseline(scheme)


@pytest.mark.parametrize("kernel", ["auto", "engine"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_syncs_are_fresh_and_the_checkpoint_is_what_was_synced(model, floor, baseline, tmp_path, scheme, kernel):
    needs(scheme)
    found = isolated(_run, model, str(tmp_path / "run"), {"quant_scheme": scheme, "quant_kernel": kernel})
    assert found["fresh"]
    assert found["saved"]
    assert isolated(fresh_engine_logprobs, str(tmp_path / "run"))[0] == found["answers"]
    assert found["logp_diff"] < baseline(scheme)
    if SUPPORTED[scheme].activations == "none":
        assert found["logp_diff"] <= 1.2 * floor
