"""How a request to vLLM's web server reaches the workers of its engine.

vLLM's own route for that, `/collective_rpc`, calls any method of a worker, and waits forever for an engine whose
process died. So the guard calls the engine behind the web server itself (`app.state.engine_client`, set in
`entrypoints/launchers/api_server/app_state.py`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from ..vllm.adapters import ADAPTER_NAME, request_of


async def call_workers(app: Any, method: str, args: list[Any]) -> list[Any]:
    """
    Call a method of [`~qarl_trl.rollout.server.worker.WorkerExtension`] in all workers.

    Args:
        app: vLLM's web server, from the scope of a request to it.
        method: The method's name.
        args: Its arguments.

    Returns:
        The answer of each worker.

    Raises:
        RuntimeError: if the engine's process dies meanwhile.
    """
    engine = app.state.engine_client
    call = asyncio.ensure_future(engine.collective_rpc("qarl", args=(method, *args)))

    try:
        # An engine whose process died never answers. Only the client notices, and sets `errored`.
        while True:
            done, _ = await asyncio.wait({call}, timeout=1)  # seconds
            if done:
                return await call
            if engine.errored:
                raise RuntimeError("The engine of this server died: start it again.")
    finally:
        call.cancel()


def offer_adapter(app: Any) -> None:
    """
    Let requests name the adapter that the workers hold as their model.

    vLLM's own route for it would load the adapter from any path that a request names, and read it again.

    Args:
        app: vLLM's web server, from the scope of a request to it.
    """
    # The workers have loaded it, so nobody reads this path.
    app.state.openai_serving_models.lora_requests[ADAPTER_NAME] = request_of(Path(ADAPTER_NAME))
