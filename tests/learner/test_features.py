"""Each feature of TRL's loss through `QaRLTrainer`: packed passes train as padded rows do."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from slow.toys import distinct_characters, prompts, save_model, settings
from transformers import TrainerCallback
from trl import GRPOTrainer

from qarl_trl import QaRLConfig, QaRLTrainer, _compat
from qarl_trl.learner import attention, logps
from qarl_trl.learner.packing import split_rows


# Rows have up to 28 tokens and a micro-batch has four. The first holds a micro-batch, the second cuts it.
LARGE, SMALL = 22528, 30
EOS = 1
FEATURES: dict[str, dict[str, Any]] = {
    "tbpo": {},
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "tool mask": {"tools": True},
    "truncated completions": {"mask_truncated_completions": True},
    "entropy bonus": {"entropy_coef": 0.5},
    "entropy quantile": {"loss_type": "dapo", "top_entropy_quantile": 0.3},
    "kl": {"beta": 0.3},
    "two iterations": {"num_iterations": 2, "max_steps": 4},
    "four steps per generation": {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
    "lora": {"lora": True},
    "lora and kl": {"lora": True, "beta": 0.3},
    "mixture": {"experts": 4, "router_aux_loss_coef": 0.0},
    "mixture and balance": {"experts": 4, "router_aux_loss_coef": 0.3},
}
# In the fast tier; the others are slow by their number alone.
QUICK = ("tool mask", "two iterations", "mixture and balance")


def rollout(texts: list[str], trainer: QaRLTrainer, tools: bool, ends: bool) -> dict[str, Any]:
    """
    Prompts and completions of many lengths, the same in every run; every second completion is cut off, or all (`ends=False`).

    A second process has short ones, which would need fewer passes.
    """
    step, rank = trainer.state.global_step, trainer.accelerator.process_index
    draw = torch.Generator().manual_seed(1000 * step + 100 * rank + len(texts))

    def tokens(low: int, high: int) -> list[int]:
        number = int(torch.randint(low, high + 1, (), generator=draw))
        return torch.randint(2, 17, (number,), generator=draw).tolist()

    longest = (8, 19) if rank == 0 else (3, 3)
    completions = [[*tokens(0, longest[1]), EOS if ends and row % 2 else 2] for row in range(len(texts))]
    by_model = [[int(column % 3 > 0) for column in range(len(c))] for c in completions]
    given = {"env_mask": by_model} if tools else {}
    prompt_ids = [tokens(1, longest[0]) for _ in texts]
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None, **given}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, put together from its shards."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


class Gradients(TrainerCallback):
    """Those before each update."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.seen.append({n: whole(p.grad) for n, p in model.named_parameters() if p.requires_grad})


def make(
    model: str, folder: Path, tools: bool = False, ends: bool = True, lora: bool = False, **changes: Any
) -> QaRLTrainer:
    # SGD: Adam would make a whole step of the rounding of a gradient near 0.
    small = {"use_vllm": False, "bf16": False, "optim": "sgd", "learning_rate": 0.3, "max_steps": 2}
    small |= {"max_completion_length": 20, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    return QaRLTrainer(
        model,
        distinct_characters,
        QaRLConfig(**settings(folder, **small | changes)),
        train_dataset=prompts(),
        eval_dataset=prompts(2),
        rollout_func=functools.partial(rollout, tools=tools, ends=ends),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM") if lora else None,
    )


def train(trainer: QaRLTrainer) -> dict[str, Any]:
    """Losses of the micro-batches and of an evaluation, gradients of the updates, all that was logged, and sizes of the passes."""
    gradients, losses, passes, compute = Gradients(), [], [], trainer._compute_loss
    trainer.add_callback(gradients)
    trainer._compute_loss = lambda *given: losses.append(compute(*given)) or losses[-1]
    if trainer._passes is not None:
        trainer._passes.packs(trainer.model)  # asks with passes of its own
    watch = lambda module, _, given: passes.append(given["input_ids"].shape)  # noqa: E731
    trainer.accelerator.unwrap_model(trainer.model).register_forward_pre_hook(watch, with_kwargs=True)
    # TRL cuts its micro-batches in another order; here it is the same.
    same = _compat.shuffled_in(trainer._row_order) if trainer._passes is None else contextlib.nullcontext()
    with same:
        trainer.train()
    trainer.evaluate()
    logged = [value for row in trainer.state.log_history for value in sorted(row.items())]
    return {
        "losses": torch.stack([loss.detach() for loss in losses]),
        "gradients": gradients.seen,
        "logged": [(k, v) for k, v in logged if isinstance(v, float) and not ("time" in k or "second" in k)],
        "passes": passes,
    }


def apart(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert mine.keys() == theirs.keys()
    a, b = (torch.cat([tensor.flatten() for tensor in run.values()]) for run in (mine, theirs))
    return ((a - b).norm() / b.norm()).item()


def distances(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """How far two runs are apart: gradients relative to their norm, the rest absolutely; names depend on what was sampled."""
    same = [name for name, _ in found["logged"]] == [name for name, _ in expected["logged"]]
    numbers = zip(found["logged"], expected["logged"], strict=False)
    return {
        "losses": (found["losses"] - expected["losses"]).abs().max().item(),
        "gradients": max(map(apart, found["gradients"], expected["gradients"])),
        "logged": max(abs(mine - theirs) for (_, mine), (_, theirs) in numbers) if same else math.inf,
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a dense model and of a mixture, by the number of experts."""
    return {n: save_model(tmp_path_factory.mktemp("model"), layers=1, experts=n) for n in (0, 4)}


@pytest.fixture
def start(models, tmp_path):
    def build(budget, experts=0, **changes):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return make(models[experts], folder, max_tokens_per_pass=budget, **changes)

    return build


def balance_by_passes(monkeypatch, budget):
    """Let TRL's padded method take the balancing loss of a mixture as packed passes do: the mean over what they hold."""
    padded = GRPOTrainer._get_per_token_logps_and_entropies

    def method(self, model, input_ids, attention_mask, *args, **kwargs):
        logps, entropies, loss = padded(self, model, input_ids, attention_mask, *args, **kwargs)
        if loss is not None:
            bins = split_rows(attention_mask.sum(1).tolist(), budget)
            each = [padded(self, model, input_ids[b], attention_mask[b], *args, **kwargs)[2] for b in bins]
            loss = torch.stack(each).mean()
        return logps, entropies, loss

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", method)


def break_packing(monkeypatch, how):
    """One mistake, past the probe that would see it."""

    def packs(self, model):
        attention.use_packed_attention(self.unwrap(model))
        return True

    monkeypatch.setattr(logps.PackedPasses, "packs", packs)
    if how == "rows exchanged":
        right = logps.unpack
        monkeypatch.setattr(logps, "unpack", lambda *given: right(*given).roll(1, 0))
    elif how == "attention across sequences":
        monkeypatch.setattr(
            logps, "sequence_arguments", lambda model, lengths, _: {"sequence_lengths": (sum(lengths),)}
        )
    else:
        right = logps.pack

        def pack(*given):
            row = right(*given)
            return dataclasses.replace(row, position_ids=2 * row.position_ids)

        monkeypatch.setattr(logps, "pack", pack)


def assert_equal_runs(found, expected):
    """Measured for tbpo and the stock losses: losses 1.2e-7, gradients 1.3e-6 of their norm, what is logged 2.9e-6 (up to 7)."""
    off = distances(found, expected)
    assert off["losses"] < 2e-6 and off["gradients"] < 1e-5 and off["logged"] < 3e-5, off


def plain_losses(scheme):
    """A stock loss with quantization off, where "tbpo" is refused for nothing to align."""
    return {"quant_scheme": scheme, "quant_kernel": "dequant"} | ({} if scheme else {"loss_type": "grpo"})


@pytest.mark.parametrize(
    ("feature", "scheme"),
    [
        *(pytest.param(f, None, marks=() if f in QUICK else pytest.mark.slow) for f in FEATURES),
        *((f, "W4A16") for f in ("tbpo", "lora and kl")),
        pytest.param("mixture", "W4A16", marks=pytest.mark.slow),
    ],
)
def test_packed_passes_train_as_padded_rows_do(start, monkeypatch, feature, scheme):
    changes = plain_losses(scheme) | FEATURES[feature]
    expected = large_of = train(start(None, **changes))
    large, small = (train(start(budget, **changes)) for budget in (LARGE, SMALL))
    assert_equal_runs(large, expected)
    if changes.get("router_aux_loss_coef"):
        with monkeypatch.context() as patch:
            balance_by_passes(patch, SMALL)
            expected = train(start(None, **changes))
        assert distances(expected, large_of)["gradients"] > 1e-3  # control: within fewer tokens the balance is another
    assert_equal_runs(small, expected)
    tokens = [size.numel() for size in small["passes"]]
    assert len(tokens) > len(large["passes"]) and max(tokens) <= SMALL
    assert sum(tokens) == sum(size.numel() for size in large["passes"])
    if scheme is None:
        break_packing(monkeypatch, "rows exchanged")  # control
        assert distances(train(start(LARGE, **changes)), large_of)["gradients"] > 0.01


@pytest.mark.parametrize("how", ["rows exchanged", "attention across sequences", "positions twice as far"])
def test_mistakes_in_packing_are_seen(start, monkeypatch, how):
    changes = plain_losses(None)
    expected = train(start(None, **changes))
    break_packing(monkeypatch, how)
    assert distances(train(start(LARGE, **changes)), expected)["gradients"] > 0.01


@pytest.mark.parametrize("budget", [None, LARGE, SMALL])
def test_completions_that_are_all_cut_off_change_nothing(start, budget):
    trainer = start(budget, ends=False, mask_truncated_completions=True)
    before = {name: whole(p) for name, p in trainer.model.named_parameters()}
    found = train(trainer)
    assert len(found["losses"]) > 2 and not found["losses"].any()
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
