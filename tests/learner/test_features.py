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
from slow.toys import copies, distinct_characters, prompts, save_model, settings, trained_parameters
from transformers import TrainerCallback
from trl import GRPOTrainer

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl._compat.rollout_batch import shuffled_in
from qarl_trl.learner import attention, logps
from qarl_trl.learner.packing import split_rows


# Rows have up to 28 tokens and a micro-batch has four. The first holds a micro-batch, the second cuts it.
LARGE = 22528
SMALL = 30

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


# A training and what it did -----------------------------------------------------------------------------------------


def rollout(texts: list[str], trainer: QaRLTrainer, tools: bool, ends: bool) -> dict[str, Any]:
    """
    Prompts and completions of many lengths, the same in every run.

    Every second completion is cut off, or all (`ends=False`). A second process has short ones, which would need fewer
    passes.
    """
    step = trainer.state.global_step
    rank = trainer.accelerator.process_index
    draw = torch.Generator().manual_seed(1000 * step + 100 * rank + len(texts))

    def tokens(low: int, high: int) -> list[int]:
        number = int(torch.randint(low, high + 1, (), generator=draw))
        return torch.randint(2, 17, (number,), generator=draw).tolist()

    longest_prompt, longest_completion = (8, 19) if rank == 0 else (3, 3)

    completion_ids = []
    for row in range(len(texts)):
        last = EOS if ends and row % 2 else 2
        completion_ids.append([*tokens(0, longest_completion), last])

    prompt_ids = []
    for _ in texts:
        prompt_ids.append(tokens(1, longest_prompt))
    output: dict[str, Any] = {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    if tools:
        output["env_mask"] = list(map(every_third_from_a_tool, completion_ids))
    return output


def every_third_from_a_tool(token_ids: list[int]) -> list[int]:
    """The mask of a completion, 0 for a tool's tokens: the first one and every third after it."""
    return [int(column % 3 > 0) for column in range(len(token_ids))]


def unsharded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, put together from its shards."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


class Gradients(TrainerCallback):
    """Those before each update."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        gradients = {}
        for name, param in trained_parameters(model).items():
            gradients[name] = unsharded(param.grad)
        self.seen.append(gradients)


def make(
    model: str, folder: Path, tools: bool = False, ends: bool = True, lora: bool = False, **changes: Any
) -> QaRLTrainer:
    """A trainer on the model of a folder; `changes` are fields of its config."""
    small = {
        "use_vllm": False,
        "bf16": False,
        # SGD: Adam would make a whole step of the rounding of a gradient near 0.
        "optim": "sgd",
        "learning_rate": 0.3,
        "max_steps": 2,
        "max_completion_length": 20,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
    }
    adapter = None
    if lora:
        adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")

    return QaRLTrainer(
        model,
        distinct_characters,
        QaRLConfig(**settings(folder, **small | changes)),
        train_dataset=prompts(),
        eval_dataset=prompts(2),
        rollout_func=functools.partial(rollout, tools=tools, ends=ends),
        peft_config=adapter,
    )


def train(trainer: QaRLTrainer, with_losses: bool = True) -> dict[str, Any]:
    """
    Train and evaluate.

    Args:
        trainer: The trainer.
        with_losses: Record the losses of the micro-batches, in place of the trainer's `_compute_loss`. Under FSDP2 no
            micro-batches share a pass with a loss of a user, for which it is taken.

    Returns: the losses of the micro-batches, gradients of the updates, all numbers that were logged but times, and
    sizes of the passes.
    """
    gradients = Gradients()
    trainer.add_callback(gradients)
    losses = record_losses(trainer) if with_losses else [torch.zeros(())]
    passes = record_passes(trainer)

    # TRL cuts its micro-batches in another order; here it is the same. A packing trainer has this order by itself.
    same_order: Any = contextlib.nullcontext()
    if trainer._passes is None:
        same_order = shuffled_in(trainer._row_order)

    with same_order:
        trainer.train()
    trainer.evaluate()

    return {
        "losses": torch.stack(losses).detach(),
        "gradients": gradients.seen,
        "logged": logged_numbers(trainer),
        "passes": passes,
    }


def record_losses(trainer: QaRLTrainer) -> list[torch.Tensor]:
    """The loss of each micro-batch from now on."""
    losses = []
    compute = trainer._compute_loss

    def recording(*args: Any) -> torch.Tensor:
        loss = compute(*args)
        losses.append(loss)
        return loss

    trainer._compute_loss = recording
    return losses


def record_passes(trainer: QaRLTrainer) -> list[torch.Size]:
    """The shape of each pass from now on."""
    if trainer._passes is not None:
        # It runs passes of its own, once.
        trainer._passes.packs(trainer.model)

    passes = []

    def record(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        passes.append(kwargs["input_ids"].shape)

    trainer.accelerator.unwrap_model(trainer.model).register_forward_pre_hook(record, with_kwargs=True)
    return passes


def tokens_of(passes: list[torch.Size]) -> list[int]:
    """How many tokens each pass has, with padding."""
    return [size.numel() for size in passes]


def logged_numbers(trainer: QaRLTrainer) -> list[tuple[str, float]]:
    """Names and values of all that was logged, without times."""
    numbers = []
    for row in trainer.state.log_history:
        for name, value in sorted(row.items()):
            is_time = "time" in name or "second" in name
            if isinstance(value, float) and not is_time:
                numbers.append((name, value))
    return numbers


# How far two trainings are apart ------------------------------------------------------------------------------------


def apart(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of all tensors together, relative to the norm of the second."""
    assert mine.keys() == theirs.keys()
    my_numbers = torch.cat([tensor.flatten() for tensor in mine.values()])
    their_numbers = torch.cat([tensor.flatten() for tensor in theirs.values()])
    return ((my_numbers - their_numbers).norm() / their_numbers.norm()).item()


def distances(run: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """How far two runs are apart: gradients relative to their norm, the rest absolutely."""
    names, numbers = zip(*run["logged"], strict=True)
    expected_names, expected_numbers = zip(*expected["logged"], strict=True)
    # The names depend on what was sampled.
    logged = math.inf
    if names == expected_names:
        off = torch.tensor(numbers, dtype=torch.float64) - torch.tensor(expected_numbers, dtype=torch.float64)
        logged = off.abs().max().item()

    return {
        "losses": (run["losses"] - expected["losses"]).abs().max().item(),
        "gradients": max(map(apart, run["gradients"], expected["gradients"])),
        "logged": logged,
    }


def assert_equal_runs(run, expected):
    """Measured for tbpo and stock losses: losses 1.2e-7, gradients 1.3e-6 of their norm, logged 2.9e-6 (up to 7)."""
    off = distances(run, expected)
    assert off["losses"] < 2e-6, off
    assert off["gradients"] < 1e-5, off
    assert off["logged"] < 3e-5, off


# Packed as padded ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a dense model and of a mixture, by the number of experts."""
    folders = {}
    for experts in (0, 4):
        folders[experts] = save_model(tmp_path_factory.mktemp("model"), layers=1, experts=experts)
    return folders


@pytest.fixture
def start(models, tmp_path):
    """Builds trainers by their budget of tokens in a pass; `None` for padded rows."""

    def build(budget, experts=0, **changes):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return make(models[experts], folder, max_tokens_per_pass=budget, **changes)

    return build


def plain_losses(scheme):
    """A stock loss with quantization off, where "tbpo" is refused for nothing to align."""
    changes = {"quant_scheme": scheme, "quant_kernel": "dequant"}
    if scheme is None:
        changes["loss_type"] = "grpo"
    return changes


def balance_by_passes(monkeypatch, budget):
    """Let TRL's padded method take the balancing loss of a mixture as packed passes do: the mean over passes."""
    padded = GRPOTrainer._get_per_token_logps_and_entropies

    def method(self, model, input_ids, attention_mask, *args, **kwargs):
        logps, entropies, loss = padded(self, model, input_ids, attention_mask, *args, **kwargs)
        if loss is not None:
            losses = []
            for rows in split_rows(attention_mask.sum(1).tolist(), budget):
                result = padded(self, model, input_ids[rows], attention_mask[rows], *args, **kwargs)
                losses.append(result[2])
            loss = torch.stack(losses).mean()
        return logps, entropies, loss

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", method)


def break_packing(monkeypatch, how):
    """One mistake, past the probe that would see it."""

    # The real one measures a packed pass against padded rows, and would take padded rows from here on.
    def packs(self, model):
        attention.use_packed_attention(self.unwrap(model))
        return True

    unpack = logps.unpack
    pack = logps.pack

    def unpack_exchanged(*args):
        return unpack(*args).roll(1, 0)

    def one_sequence(model, lengths, device):
        return {"sequence_lengths": (sum(lengths),)}

    def pack_twice_as_far(*args):
        row = pack(*args)
        return dataclasses.replace(row, position_ids=2 * row.position_ids)

    name, mistake = {
        "rows exchanged": ("unpack", unpack_exchanged),
        "attention across sequences": ("sequence_arguments", one_sequence),
        "positions twice as far": ("pack", pack_twice_as_far),
    }[how]
    monkeypatch.setattr(logps.PackedPasses, "packs", packs)
    monkeypatch.setattr(logps, name, mistake)


@pytest.mark.parametrize(
    ("feature", "scheme"),
    [
        *(pytest.param(feature, None, marks=() if feature in QUICK else pytest.mark.slow) for feature in FEATURES),
        ("tbpo", "W4A16"),
        ("lora and kl", "W4A16"),
        pytest.param("mixture", "W4A16", marks=pytest.mark.slow),
    ],
)
def test_packed_passes_train_as_padded_rows_do(start, monkeypatch, feature, scheme):
    changes = plain_losses(scheme) | FEATURES[feature]
    padded = train(start(None, **changes))
    large = train(start(LARGE, **changes))
    small = train(start(SMALL, **changes))

    assert_equal_runs(large, padded)

    expected_of_small = padded
    if changes.get("router_aux_loss_coef"):
        with monkeypatch.context() as patch:
            balance_by_passes(patch, SMALL)
            expected_of_small = train(start(None, **changes))
        # Control: within fewer tokens the balance is another.
        assert distances(expected_of_small, padded)["gradients"] > 1e-3
    assert_equal_runs(small, expected_of_small)

    # The smaller budget did cut micro-batches, and into the same tokens.
    tokens = tokens_of(small["passes"])
    assert len(tokens) > len(large["passes"])
    assert max(tokens) <= SMALL
    assert sum(tokens) == sum(tokens_of(large["passes"]))

    if scheme is None:
        # Control: a mistake in packing is seen.
        break_packing(monkeypatch, "rows exchanged")
        assert distances(train(start(LARGE, **changes)), padded)["gradients"] > 0.01


@pytest.mark.parametrize("how", ["rows exchanged", "attention across sequences", "positions twice as far"])
def test_mistakes_in_packing_are_seen(start, monkeypatch, how):
    changes = plain_losses(None)
    expected = train(start(None, **changes))

    break_packing(monkeypatch, how)

    assert distances(train(start(LARGE, **changes)), expected)["gradients"] > 0.01


@pytest.mark.parametrize("budget", [None, LARGE, SMALL])
def test_completions_that_are_all_cut_off_change_nothing(start, budget):
    trainer = start(budget, ends=False, mask_truncated_completions=True)
    before = copies(trainer.model.named_parameters())

    run = train(trainer)

    # 0 by 0 tokens would be NaN, of a loss that divides by those that count.
    assert len(run["losses"]) > 2
    assert not run["losses"].any()
    for name, param in trainer.model.named_parameters():
        assert torch.equal(param, before[name]), name
