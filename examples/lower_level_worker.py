"""A worker without an engine class: a runtime, an endpoint, a handler.

    DYN_DISCOVERY_BACKEND=file python examples/lower_level_worker.py lower-level
    python -m dynamo.frontend --discovery-backend file --http-port 8000

Use this path when you drive the runtime yourself. You then do by hand what `run(MyEngine)` does: register the model,
serve, leave discovery at the end. The contract (validation, abort, drain, engine metrics) is not part of it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from dynamo.common.utils.graceful_shutdown import install_signal_handlers
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model, unregister_model
from dynamo.runtime import Context, DistributedRuntime, dynamo_worker
from dynamo.runtime.logging import configure_dynamo_logging


async def count_up(request: dict[str, Any], context: Context) -> AsyncIterator[dict[str, Any]]:
    """Answer 1, 2, 3, ... until max_tokens, or until the request is cancelled."""
    total = (request.get("stop_conditions") or {}).get("max_tokens") or 16
    for done in range(1, total + 1):
        if context.is_stopped():
            yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
            return
        await asyncio.sleep(0.005)
        yield {"token_ids": [ord("0") + done % 10], "index": 0, "finish_reason": "length" if done == total else None}


@dynamo_worker()  # makes a runtime as the DYN_ variables say, and closes it when the function returns
async def worker(runtime: DistributedRuntime, model_name: str) -> None:
    endpoint = runtime.endpoint("dynamo.lower.generate")
    # At SIGTERM: out of discovery, the grace period, then runtime.shutdown().
    install_signal_handlers(asyncio.get_running_loop(), runtime, [endpoint])
    # A model name that is neither a directory nor known to the hub is served with the built-in byte tokenizer.
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        model_name,
        worker_type=WorkerType.Aggregated,
    )
    print(f"serving {model_name}", flush=True)
    try:
        await endpoint.serve_endpoint(count_up)  # returns after runtime.shutdown(), when the streams have ended
    finally:
        await unregister_model(endpoint)


if __name__ == "__main__":
    configure_dynamo_logging()
    asyncio.run(worker(sys.argv[1] if len(sys.argv) > 1 else "lower-level"))
