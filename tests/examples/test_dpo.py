"""`examples/dpo`: a trainer of a user's own, from preferences to a model in 4 bits."""

import sys
from pathlib import Path

import pytest
from lines import write_rows
from slow.toys import save_model, stored_tensors


FOLDER = Path(__file__).parents[2] / "examples" / "dpo"


@pytest.fixture
def dpo():
    """The script, imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import dpo

        yield dpo
        sys.modules.pop("dpo")


def test_it_trains_and_saves_a_low_bit_model(dpo, tmp_path):
    model = save_model(tmp_path / "model", layers=1)
    rows = []
    for number in range(16):
        rows.append({"prompt": f"{number}+1=", "chosen": f"{number + 1}#", "rejected": f"{number}#"})
    data = write_rows(tmp_path / "preferences.jsonl", rows)

    # Its arguments as a shell gives them; the last is the number of steps.
    dpo.main(model, data, str(tmp_path / "trained"), "1")

    stored = stored_tensors(tmp_path / "trained")
    assert "model.layers.0.mlp.down_proj.weight_packed" in stored
    # DPO is none of this package's trainers, so the card must take the name from TRL's.
    card = (tmp_path / "trained" / "README.md").read_text()
    assert "trained with TRL's DPO trainer" in card
