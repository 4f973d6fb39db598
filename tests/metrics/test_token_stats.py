"""`log_token_stats`: what a file holds is what the run trained on."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from slow.toys import distinct_characters, prompts, save_model, settings

from qarl_trl import QaRLConfig, QaRLTrainer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), layers=1)


def run(model, folder, **changes):
    """A run of two rollout batches of 16 with two updates each, its files by step, and the micro-batches of its losses."""
    small = {"use_vllm": False, "max_completion_length": 8, "bf16": False, "num_iterations": 1}
    args = QaRLConfig(**settings(folder, **small | changes))
    trainer = QaRLTrainer(model, distinct_characters, args, train_dataset=prompts(), eval_dataset=prompts(8))
    seen, measure = [], trainer._measure
    trainer._measure = lambda logps, inputs: (
        seen.append((trainer.state.global_step + 1, logps, inputs)) or measure(logps, inputs)
    )
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
    assert len(rows) == 12  # two rollout batches, each completion trained on once
    for row in rows:
        ((logps, inputs, i),) = [
            (logps[i], inputs, i)
            for step, logps, inputs in seen
            for i, mask in enumerate(inputs["completion_mask"].bool())
            if step == row["step"] and inputs["completion_ids"][i][mask].tolist() == row["token_ids"]
            and inputs["old_per_token_logps"][i][mask].tolist() == row["old_logps"]
        ]  # fmt: skip
        mask = inputs["completion_mask"][i].bool()
        assert row["current_logps"] == logps[mask].tolist()
        assert row["advantage"] == inputs["advantages"][i].item()
        assert row["mask"] == [True] * len(row["token_ids"]) and row["error_mask"] == [False] * len(row["token_ids"])
        assert row["engine_logps"] is None
        text = row["completion"].replace("<eos>", "").replace("<pad>", "")
        assert row["reward"] == len(set(text))  # still beside its own text
        assert row["prompt"] in {p["prompt"] for p in prompts()}
    assert len({row["reward"] for row in rows}) > 1
    assert any(row["current_logps"] != row["old_logps"] for row in rows if row["step"] in (2, 4))


def test_completions_out_of_the_loss_keep_their_tokens(model, tmp_path):
    files, _ = run(model, tmp_path, log_token_stats=16, mask_truncated_completions=True, max_steps=2)
    cut = [row for file in files.values() for row in file if row["token_ids"][-1] != 1]
    assert cut and all(len(row["token_ids"]) > 4 and not any(row["mask"]) for row in cut)


def test_without_the_field_nothing_is_written(model, tmp_path):
    files, seen = run(model, tmp_path, max_steps=2)
    assert files == {} and "reward" not in seen[0][2]
    assert not Path(tmp_path, "token_stats").exists()
