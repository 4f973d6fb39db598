"""`qarl-trl plan --from` with the log of a real run: its own seconds come out, and no other run's do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from slow.isolated import isolated
from slow.toys import make_trainer, save_model, settings


pytestmark = pytest.mark.slow


def _train(model: str, folder: str) -> None:
    trainer = make_trainer(model, Path(folder))
    trainer.train()
    trainer.save_state()


def test_a_plan_is_fitted_to_a_run_of_a_cpu_engine(tmp_path, capsys):
    from qarl_trl.cli import main
    from qarl_trl.tools.plan.gpus import GPUS
    from qarl_trl.tools.plan.run import Hardware
    from qarl_trl.tools.plan.seconds.arms import compare

    model = save_model(tmp_path / "model")
    run = tmp_path / "run"
    isolated(_train, model, str(run))

    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"problem": "1+1=", "answer": "2"}) + "\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(settings(run) | {"model_name_or_path": model, "dataset_name_or_path": str(data)}))

    # Of the second rollout batch, steps 3 and 4: the first one has what happens once in a run.
    log = json.loads((run / "trainer_state.json").read_text())["log_history"]
    second_batch = [row for row in log if row["step"] in (3, 4) and "time/update" in row]
    measured = dict.fromkeys(("rollout", "sync", "update"), 0.0)
    for row in second_batch:
        for part in measured:
            measured[part] += row[f"time/{part}"]

    # A CPU is no GPU of the list: the factors take up the whole difference.
    l4 = GPUS["l4"]
    comparison = compare(["--config", str(recipe)], Hardware(1, l4.memory), l4, measured_run=run)
    print(comparison.factors, measured)
    for part, seconds in measured.items():
        assert getattr(comparison.arms["QaRL W4A16"].seconds, part) == pytest.approx(seconds)
    assert comparison.batch.answer_tokens == pytest.approx(second_batch[0]["completions/mean_length"])

    # Control: the log of this run says how many bytes a W4A16 sync moved, so it is none of another scheme.
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(recipe), "--gpu", "l4", "--from", str(run), "--quant_scheme", "FP8_DYNAMIC"])
    assert "must be a run of this recipe" in capsys.readouterr().err
