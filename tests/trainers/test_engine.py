"""`qarl_trl.trainers.engine`: what the engine of a trainer is checked with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from configs import config

from qarl_trl.rollout.sync_check.prompt import LENGTH
from qarl_trl.trainers.engine import build_sync_check


@pytest.mark.parametrize(
    ("of_model", "of_engine", "length"),
    [
        (256, None, LENGTH),
        # Of a small model the engine refuses a longer prompt.
        (64, None, 63),
        (256, 32, 31),
        (256, 256, LENGTH),
    ],
)
def test_the_prompt_of_the_check_fits_the_context(tmp_path, tiny_model, tiny_tokenizer, of_model, of_engine, length):
    # What the check reads of a trainer, and no more.
    trainer = SimpleNamespace(
        args=config(tmp_path, vllm_max_model_length=of_engine),
        model=tiny_model(num_hidden_layers=1, max_position_embeddings=of_model),
        processing_class=tiny_tokenizer,
        accelerator=SimpleNamespace(gather=None),
        _log_with_training=None,
    )

    assert len(build_sync_check(trainer).token_ids) == length
