"""The private parts of vLLM's web server by which a request reaches the workers of its engine."""

from __future__ import annotations

import asyncio
from typing import Any


async def ask_workers(app: Any, method: str, args: list[Any]) -> list[Any]:
    """
    Call a method of [`~qarl_trl.rollout.server.worker.WorkerExtension`] in all workers.

    Args:
        app: vLLM's web server, from the scope of a request to it.
        method: The method's name.
        args: Its arguments.

    Returns:
        The answer of each worker.

    Raises:
        RuntimeError: if the engine's process dies meanwhile, for which vLLM itself would wait forever.
    """
    engine = app.state.engine_client
    call = asyncio.ensure_future(engine.collective_rpc("qarl", args=(method, *args)))
    try:
        while True:
            done, _ = await asyncio.wait({call}, timeout=1)  # seconds
            if done:
                return await call
            if engine.errored:
                raise RuntimeError("The engine of this server died: start it again.")
    finally:
        call.cancel()
