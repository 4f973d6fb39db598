"""`log_token_stats`: what a file holds is what the run trained on."""

import math
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from slow.toys import distinct_characters, prompts, save_model, settings

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.metrics.token_stats import TokenStats


COLUMNS = [
    "step",
    "rollout_step",
    "prompt",
    "completion",
    "reward",
    "advantage",
    "token_ids",
    "old_logps",
    "current_logps",
    "engine_logps",
    "mask",
    "error_mask",
    "ratio",
    "mismatch_weight",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), layers=1)


def run(model, folder, **changes):
    """A run of two rollout batches of 16 with two updates each, its files by step, and the micro-batches of its losses."""
    small = {"use_vllm": False, "max_completion_length": 8, "bf16": False, "num_iterations": 1}
    args = QaRLConfig(**settings(folder, **small | changes))
    trainer = QaRLTrainer(model, distinct_characters, args, train_dataset=prompts(), eval_dataset=prompts(8))
    seen, compute = [], trainer._compute_loss

    def spy(model, inputs):
        forward, logps = trainer._get_per_token_logps_and_entropies, []
        trainer._get_per_token_logps_and_entropies = lambda *a, **k: logps.append(forward(*a, **k)) or logps[-1]
        loss = compute(model, inputs)
        trainer._get_per_token_logps_and_entropies = forward
        seen.append((trainer.state.global_step + 1, logps[0][0].detach(), inputs))
        return loss

    trainer._compute_loss = spy
    trainer.train()
    evaluated = len(seen)
    trainer.evaluate()
    assert len(seen) > evaluated
    files = sorted(Path(folder, "token_stats").glob("*.parquet"))
    return {path.stem: pq.read_table(path).to_pylist() for path in files}, seen[:evaluated]


def test_a_row_is_a_completion_as_it_was_trained(model, tmp_path):
    files, seen = run(model, tmp_path, log_token_stats=6)
    assert list(files) == [f"token_stats_{step:08d}" for step in (1, 2, 3, 4)]
    rows = [row for file in files.values() for row in file]
    assert [*rows[0]] == COLUMNS and len(rows) == 12  # two rollout batches, each completion trained on once
    assert {(row["step"], row["rollout_step"]) for row in rows} == {(1, 1), (2, 1), (3, 3), (4, 3)}
    for row in rows:
        expected = [
            (logps[i], inputs, i)
            for step, logps, inputs in seen
            for i, mask in enumerate(inputs["completion_mask"].bool())
            if step == row["step"] and inputs["completion_ids"][i][mask].tolist() == row["token_ids"]
            and inputs["old_per_token_logps"][i][mask].tolist() == row["old_logps"]
        ]  # fmt: skip
        (logps, inputs, i), *same = expected
        assert not same
        mask = inputs["completion_mask"][i].bool()
        assert row["current_logps"] == logps[mask].tolist()
        assert row["advantage"] == inputs["advantages"][i].item()
        assert row["mask"] == [True] * len(row["token_ids"]) and row["error_mask"] == [False] * len(row["token_ids"])
        steps = [now - old for now, old in zip(row["current_logps"], row["old_logps"], strict=True)]
        assert row["ratio"] == pytest.approx(math.exp(sum(steps) / len(steps)), rel=1e-6)
        assert row["engine_logps"] is None and row["mismatch_weight"] is None
        text = row["completion"].replace("<eos>", "").replace("<pad>", "")
        assert row["reward"] == len(set(text))  # still beside its own text
        assert row["prompt"] in {p["prompt"] for p in prompts()}
    assert len({row["reward"] for row in rows}) > 1
    assert any(row["ratio"] != 1 for row in rows if row["step"] in (2, 4))


def test_completions_out_of_the_loss_keep_their_tokens(model, tmp_path):
    files, _ = run(model, tmp_path, log_token_stats=16, mask_truncated_completions=True, max_steps=2)
    cut = [row for file in files.values() for row in file if row["token_ids"][-1] != 1]
    assert cut and all(len(row["token_ids"]) > 4 and not any(row["mask"]) for row in cut)


def test_without_the_field_nothing_is_written(model, tmp_path):
    files, seen = run(model, tmp_path, max_steps=2)
    assert files == {} and "reward" not in seen[0][2]
    assert not Path(tmp_path, "token_stats").exists()


def test_what_the_engine_could_not_score_is_null(tmp_path):
    tokenizer = SimpleNamespace(pad_token_id=0, decode=lambda ids: "".join(chr(96 + int(i)) for i in ids))
    old, engine = (
        torch.tensor([[-1.0, -2.0, 0.0], [-3.0, -1.0, -2.0]]),
        torch.tensor([[-1.5, math.nan, 0], [-3, -2, -2]]),
    )
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    batch = {
        "prompt_ids": torch.tensor([[0, 5], [6, 7]]), "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
        "completion_ids": torch.tensor([[1, 2, 0], [3, 4, 1]]), "completion_mask": mask,
        "tool_mask": torch.tensor([[1, 1, 1], [1, 0, 1]]), "advantages": torch.tensor([1.0, -1.0]),
        "old_per_token_logps": old, "sampling_per_token_logps": engine,
    }  # fmt: skip
    stats = TokenStats(tmp_path / "stats", 2, tokenizer, cap=1.2)
    stats.add(7, 5, batch, old, torch.zeros(2, 3, dtype=torch.bool))  # not followed
    stats.follow(batch, torch.tensor([2.0, math.nan]))
    stats.add(7, 5, batch, old, torch.tensor([[False, True, False]] * 2))
    stats.on_step_end(None, SimpleNamespace(global_step=7), None)
    first, second = pq.read_table(tmp_path / "stats" / "token_stats_00000007.parquet").to_pylist()
    assert (first["prompt"], first["completion"], second["prompt"], second["completion"]) == ("e", "ab", "fg", "cda")
    assert first["engine_logps"] == [-1.5, None] and first["error_mask"] == [False, True]
    assert first["mismatch_weight"] == pytest.approx(1.2)  # exp(0.5 / 2), capped
    assert second["mask"] == [True, False, True] and second["mismatch_weight"] == 1.0
    assert first["reward"] == 2.0 and math.isnan(second["reward"])
    del batch["old_per_token_logps"]  # as TRL where no update comes between the sampling and the loss
    stats.add(8, 8, batch, old, torch.zeros(2, 3, dtype=torch.bool))
    stats.on_step_end(None, SimpleNamespace(global_step=8), None)
    first, _ = pq.read_table(tmp_path / "stats" / "token_stats_00000008.parquet").to_pylist()
    assert first["old_logps"] is None and first["mismatch_weight"] == pytest.approx(1.2)
