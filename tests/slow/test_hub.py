"""From a run to the Hub and back: what the downloaded model answers is what the training engine answered."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hub_server import WRITER, running_hub

from slow.isolated import ENVIRONMENT, isolated
from slow.toys import engine_logprobs, fresh_engine_logprobs, make_trainer, prompts, save_model


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


@contextlib.contextmanager
def serving(command: str, log: Path) -> Iterator[Callable[[], list[list[int]]]]:
    """vLLM's server, started by the `command` of a card; what gives its greedy tokens for the prompts of `engine_logprobs`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sizes = "--max-model-len 64 --max-num-seqs 16 --max-num-batched-tokens 4096 --enforce-eager"
    program, *arguments = shlex.split(f"{command} --host 127.0.0.1 --port {port} {sizes}")
    assert program == "python"
    # As the card says.
    environment = os.environ | ENVIRONMENT | {"VLLM_CPU_INT4_W4A8": "0", "VLLM_CPU_ATTN_SPLIT_KV": "0"}
    asked = {"model": arguments[arguments.index("--model") + 1], "prompt": [row["prompt"] for row in prompts(6)]}
    asked |= {"temperature": 0, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
    address = f"http://127.0.0.1:{port}"

    def answers() -> list[list[int]]:
        while not _answers(f"{address}/health"):
            assert server.poll() is None, log.read_text()[-3000:]
            time.sleep(0.5)
        found = httpx.post(f"{address}/v1/completions", json=asked, timeout=60).raise_for_status().json()
        return [choice["token_ids"] for choice in sorted(found["choices"], key=lambda choice: choice["index"])]

    with log.open("w") as output:
        to = {"stdout": output, "stderr": output, "env": environment}
        server = subprocess.Popen([sys.executable, *arguments], start_new_session=True, **to)
    try:
        yield answers
    finally:
        with contextlib.suppress(ProcessLookupError):  # with the engine, a process of its own
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url).status_code == 200
    return False


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
        arithmetic = "from qarl_trl.rollout.cpu import choose_arithmetic as choose; choose()\n"  # as the trainer did
        command = next(line for line in card.splitlines() if line.startswith("python -m vllm"))
        with serving(command.replace("me/toy", str(tmp_path / "run")), tmp_path / "server.log") as answers:
            found = call(download_and_answer, str(tmp_path / "pulled"), before=arithmetic + before, **there)
            assert found == expected  # tokens and log-probs, bit for bit
            other = isolated(fresh_engine_logprobs, save_model(tmp_path / "other", seed=1))
            assert list(other) != expected and other[0] != expected[0]  # control
            assert answers() == expected[0]
    assert not (tmp_path / "pulled" / "training_args.bin").exists()
    files = [tmp_path / folder / "model.safetensors" for folder in ("run", "pulled")]
    assert files[0].read_bytes() == files[1].read_bytes()  # the server's and the downloaded one
