"""A worker for `smg` as it calls an engine by gRPC: token ids come, token ids go back, and nothing is computed.

Then that gateway reads the request, renders the template, tokenises, and makes text of the ids, as our frontend does. The
rhythms are those of `engine.py`. The interface is vLLM's servicer of `smg-grpc-proto`, so the Python that runs this must
have that package and `grpcio`, as the environment of `tools/gateway_venvs.sh` does.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any, Final

messages: Final[Any] = import_module("smg_grpc_proto.generated.vllm_engine_pb2")
services: Final[Any] = import_module("smg_grpc_proto.generated.vllm_engine_pb2_grpc")
health: Final[Any] = import_module("grpc_health.v1.health")
health_services: Final[Any] = import_module("grpc_health.v1.health_pb2_grpc")
server_of: Final[Any] = import_module("grpc.aio").server


class Steps:
    """The waits between tokens."""

    def __init__(self, delay: float, step: float) -> None:
        self._delay, self._step = delay, step
        self._next: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until the next token is due."""
        if self._delay:
            await asyncio.sleep(self._delay)
        elif self._step:
            await self._shared()

    def _shared(self) -> asyncio.Future[None]:
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            loop.call_at((loop.time() // self._step + 1) * self._step, self._end)
        return self._next

    def _end(self) -> None:
        ended, self._next = self._next, None
        if ended is not None:
            ended.set_result(None)


class Engine(services.VllmEngineServicer):  # type: ignore[misc]
    """The calls that a gateway makes."""

    def __init__(self, model: str, steps: Steps) -> None:
        self._model, self._steps = model, steps

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Yield a chunk for each token, or all at the end where nothing is streamed."""
        count = request.sampling_params.max_tokens or 16
        prompt = len(request.tokenized.input_ids)
        ids = [1000 + number % 20000 for number in range(count)]
        for number, token in enumerate(ids):
            await self._steps.wait()
            if request.stream:
                chunk = messages.GenerateStreamChunk(
                    token_ids=[token], prompt_tokens=prompt, completion_tokens=number + 1
                )
                yield messages.GenerateResponse(chunk=chunk)
        complete = messages.GenerateComplete(
            output_ids=ids, finish_reason="length", prompt_tokens=prompt, completion_tokens=count
        )
        yield messages.GenerateResponse(complete=complete)

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        """Report health."""
        return messages.HealthCheckResponse(healthy=True, message="ok")

    async def Abort(self, request: Any, context: Any) -> Any:
        """Accept the end of a request."""
        return messages.AbortResponse()

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        """Describe the model."""
        return messages.GetModelInfoResponse(
            model_path=self._model,
            tokenizer_path=self._model,
            served_model_name="bench",
            is_generation=True,
            max_context_length=65536,
            vocab_size=32000,
            model_type="llama",
            architectures=["LlamaForCausalLM"],
            eos_token_ids=[2],
            max_req_input_len=65536,
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        """Describe the server."""
        return messages.GetServerInfoResponse(server_type="vllm-grpc", data_parallel_size=1, max_num_seqs=1024)

    async def GetLoads(self, request: Any, context: Any) -> Any:
        """Report an idle engine."""
        return messages.GetLoadsResponse(version="0", dp_rank_count=1, loads=[messages.SchedulerLoad()])


async def serve(port: int, model: str, steps: Steps) -> None:
    """Serve until killed."""
    server = server_of()
    services.add_VllmEngineServicer_to_server(Engine(model, steps), server)
    reporter = health.aio.HealthServicer()
    health_services.add_HealthServicer_to_server(reporter, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--step", type=float, default=0.0)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.port, arguments.model, Steps(arguments.delay, arguments.step)))
