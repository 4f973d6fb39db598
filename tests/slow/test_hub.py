"""From a run to the Hub and back: what the downloaded model answers is what the training engine answered."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hub_server import WRITER, running_hub

from slow.isolated import ENVIRONMENT, isolated
from slow.toys import engine_logprobs, fresh_engine_logprobs, make_trainer, save_model


pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def train_and_push(model: str, folder: str) -> Any:
    """Answers of the training engine after the last sync."""
    changes = {"push_to_hub": True, "hub_model_id": "me/toy", "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(model, Path(folder), **changes)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    answers = engine_logprobs(trainer.vllm_generation.llm)
    trainer.push_to_hub()
    return answers


def download_and_answer(folder: str) -> Any:
    """Answers of a new engine on the repository's main branch, by the real client."""
    from huggingface_hub import snapshot_download

    return fresh_engine_logprobs(snapshot_download("me/toy", local_dir=folder))


def run(code: str, **environment: str) -> str:
    """What a new Python printed: the client reads its environment at import."""
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"} | environment
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def call(function: Any, *args: Any, before: str = "", **environment: str) -> Any:
    """What `function` returns in a new Python, after the code `before`."""
    code = f"import json\nfrom slow.test_hub import *\n{before}\nprint(json.dumps({function.__name__}(*{args!r})))"
    return json.loads(run(code, **environment).splitlines()[-1])


def test_the_downloaded_model_answers_as_the_training_engine(tmp_path):
    model = save_model(tmp_path / "model")
    with running_hub() as hub:
        there = {"HF_ENDPOINT": hub.url, "HF_TOKEN": WRITER, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        there["HF_HOME"] = str(tmp_path / "home")
        expected = call(train_and_push, model, str(tmp_path / "run"), **there)
        card = hub.files("me/toy")["README.md"].decode()
        snippet = next(b for b in re.findall(r"```python\n(.*?)```", card, re.DOTALL) if "vllm" in b)
        assert 'LLM("me/toy")' in snippet
        # As pasted, but for vLLM's compiler, which is off in these tests.
        before = snippet.replace('LLM("me/toy")', 'LLM("me/toy", enforce_eager=True)')
        arithmetic = (
            "from qarl_trl.cpu_exact.arithmetic import choose_arithmetic as choose; choose()\n"  # as the trainer did
        )
        found = call(download_and_answer, str(tmp_path / "pulled"), before=arithmetic + before, **there)
        assert found == expected  # tokens and log-probs, bit for bit
        other = isolated(fresh_engine_logprobs, save_model(tmp_path / "other", seed=1))
        assert list(other) != expected and other[0] != expected[0]  # control
    assert not (tmp_path / "pulled" / "training_args.bin").exists()
    files = [tmp_path / folder / "model.safetensors" for folder in ("run", "pulled")]
    assert files[0].read_bytes() == files[1].read_bytes()
