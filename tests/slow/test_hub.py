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
# Before code that starts an engine, as a trainer did before it started its own.
CHOOSE_ARITHMETIC = "from qarl_trl.cpu_exact.arithmetic import choose_arithmetic as choose; choose()\n"


# In other processes --------------------------------------------------------------------------------------------------


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


def call(function: Any, *args: Any, before: str = "", **environment: str) -> Any:
    """What `function` returns in a new Python, after the code `before`."""
    # The result is the last line: libraries print before it.
    code = f"import json\nfrom slow.test_hub import *\n{before}\nprint(json.dumps({function.__name__}(*{args!r})))"
    return json.loads(run(code, **environment).splitlines()[-1])


def run(code: str, **environment: str) -> str:
    """What a new Python printed: the client reads its environment at import."""
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    environment = os.environ | ENVIRONMENT | paths | environment
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# The round trip ------------------------------------------------------------------------------------------------------


def _vllm_snippet(card: str) -> str:
    """The code of a model card that starts vLLM."""
    blocks = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    return next(block for block in blocks if "vllm" in block)


def test_the_downloaded_model_answers_as_the_training_engine(tmp_path):
    model = save_model(tmp_path / "model")
    with running_hub() as hub:
        environment = {
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": WRITER,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(tmp_path / "home"),
        }

        # Each call is a process of its own, for the client reads these when it is imported.
        trained = call(train_and_push, model, str(tmp_path / "run"), **environment)
        snippet = _vllm_snippet(hub.files("me/toy")["README.md"].decode())
        assert 'LLM("me/toy")' in snippet

        # As pasted, but for vLLM's compiler, which is off in these tests.
        snippet = snippet.replace('LLM("me/toy")', 'LLM("me/toy", enforce_eager=True)')
        # vLLM's progress bar divides by the seconds that it took, of which a coarse clock may count none.
        assert ", sampling)" in snippet
        snippet = snippet.replace(", sampling)", ", sampling, use_tqdm=False)")
        before = CHOOSE_ARITHMETIC + snippet
        downloaded = call(download_and_answer, str(tmp_path / "pulled"), before=before, **environment)
        # Tokens and log-probs, bit for bit.
        assert downloaded == trained

        # The control: another model.
        other_tokens, other_logprobs = isolated(fresh_engine_logprobs, save_model(tmp_path / "other", seed=1))
        assert [other_tokens, other_logprobs] != trained
        assert other_tokens != trained[0]

    # It is a pickle, which nobody should have to trust.
    assert not (tmp_path / "pulled" / "training_args.bin").exists()
    of_run = (tmp_path / "run" / "model.safetensors").read_bytes()
    pulled = (tmp_path / "pulled" / "model.safetensors").read_bytes()
    assert of_run == pulled
