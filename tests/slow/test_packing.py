"""Packed passes in two processes: as many on each, and the gradients of padded rows in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs

from slow.isolated import isolated_group


pytestmark = pytest.mark.slow
KEEP = 24
# First column and one after the last of 40: the first process has long rows, the second short ones.
SPANS = [[(2, 40), (5, 40), (1, 38)], [(10, 20), (12, 18), (9, 16)]]


def _model(experts: bool) -> Any:
    from conftest import make_model
    from trl.trainer.utils import add_fused_lm_head

    model = make_model("qwen3_moe" if experts else "qwen3", initializer_range=0.1)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def _batch(rank: int) -> dict[str, Any]:
    ids = torch.randint(2, 64, (3, 40), generator=torch.Generator().manual_seed(rank))
    mask = torch.zeros_like(ids)
    for row, (start, end) in enumerate(SPANS[rank]):
        mask[row, start:end] = 1
    return {"input_ids": ids * mask, "attention_mask": mask, "logits_to_keep": KEEP}


def _loss(logps: torch.Tensor, rank: int) -> torch.Tensor:
    return (logps * torch.randn(logps.shape, generator=torch.Generator().manual_seed(rank))).sum()


def _gradients(find_unused: bool, experts: bool) -> tuple[dict[str, Any], int]:
    from qarl_trl.learner.logps import PackedPasses

    torch.set_num_threads(1)
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=find_unused)]
    )
    assert accelerator.num_processes == 2
    bare = _model(experts)
    model, rank = accelerator.prepare(bare), accelerator.process_index
    assert model is not bare
    passes = PackedPasses(80, accelerator.autocast, accelerator.gather, accelerator.unwrap_model)
    assert passes.packs(model)
    number = []
    bare.register_forward_pre_hook(lambda *_: number.append(1))
    with torch.no_grad():
        old = passes.run({"model": model, **_batch(rank), "batch_size": 2})[0]
    before = len(number)
    logps = passes.run({"model": model, **_batch(rank)})[0]
    assert torch.allclose(old, logps, atol=1e-5)
    accelerator.backward(_loss(logps, rank))
    return {name: p.grad.numpy() for name, p in bare.named_parameters()}, (before, len(number) - before)


def _padded(experts: bool, order: Sequence[int] = (0, 1, 2)) -> dict[str, torch.Tensor]:
    """The gradients of both processes' rows, padded, in one process."""
    model = _model(experts)
    for rank in range(2):
        batch = _batch(rank)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        labels[:, :-KEEP] = -100
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        logps = model(**inputs, labels=labels, fused_lm_head=True).log_probs[list(order), -KEEP:]
        (_loss(logps, rank) / 2).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(("find_unused", "experts"), [(False, False), (True, False), (False, True), (True, True)])
def test_several_passes_before_a_backward_give_the_gradients_of_padded_rows(find_unused, experts):
    ranks = isolated_group(_gradients, 2, find_unused, experts)
    # The second process alone would need one pass each time; 108 and 23 tokens are not cut alike.
    assert ranks[0][1] == ranks[1][1] == (2, 2)
    expected, exchanged = _padded(experts), _padded(experts, order=[1, 0, 2])
    whole = torch.stack([grad.norm() for grad in expected.values()]).norm()
    apart = []
    for name, grad in expected.items():
        for found, _ in ranks:
            assert (torch.from_numpy(found[name]) - grad).norm() < 1e-6 * whole, name
            apart.append((torch.from_numpy(found[name]) - exchanged[name]).norm() / whole)
    assert max(apart) > 0.01  # control: the log-probs of two rows in each other's place
