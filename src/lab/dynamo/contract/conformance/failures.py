"""The names of broken promises."""

from __future__ import annotations

from typing import Any, Final

FAILURE_NAMES: Final[dict[str, str]] = {
    "StartFailed": "start() must succeed and return an EngineConfig",
    "EmptyModelInConfig": "the EngineConfig that start() returns must name its model",
    "KvEventSourcesFailed": "kv_event_sources() must return a list of ZmqSource or PushSource",
    "KvEventSourcesNotIdempotent": "kv_event_sources() must name the same ranks at every call",
    "SetupMetricsFailed": "register_prometheus() and component_metrics_dp_ranks() must succeed",
    "ComponentMetricsNotIdempotent": "component_metrics_dp_ranks() must return the same ranks at every call",
    "GenerateFailed": "generate() must return an async generator",
    "NoChunksYielded": "a request must be answered by at least one chunk",
    "StreamYieldedError": "a plain request must be served without an error",
    "ChunkTimedOut": "a chunk must come within five seconds of the request or of the chunk before it",
    "EventLoopBlocked": "generate() must not block the event loop; work that takes long belongs in a thread",
    "TokenIdsInvalid": "token_ids must be integers in 0..4294967295",
    "IndexInvalid": "a request for one choice must be answered with index 0",
    "UnknownFinishReason": "finish_reason must be stop, eos, length, cancelled, content_filter, tool_calls or abort",
    "MaxTokensIgnored": "an answer must not have more tokens than max_tokens",
    "NoTerminalChunk": "the last chunk must have a finish_reason",
    "ChunkAfterTerminal": "nothing may follow the chunk that has a finish_reason",
    "CompletionTokensMismatch": "usage.completion_tokens must count every token that was yielded",
    "ConcurrentGenerateFailed": "eight requests at a time must all be served",
    "CancellationNotObserved": "a cancelled request must end within two seconds",
    "CancellationIgnored": 'a cancelled request must end with finish_reason "cancelled"',
    "MapErrorFailed": "map_error() must return an exception or None",
    "DeathReportedWhileAlive": "wait_dead() must not return while the engine serves",
    "CleanupFailed": "cleanup() must succeed",
    "SecondCleanupFailed": "cleanup() must be safe to call twice",
    "CleanupWithoutStartFailed": "cleanup() must be safe on an engine that never started",
    "ProcessesLeft": "no child process may be left after cleanup()",
    "EncodeChunkCount": "an encode request must be answered by exactly one chunk",
    "EncodeTerminalExpected": 'the encode chunk must be terminal, with finish_reason "stop"',
    "EncodeTokensNotEmpty": "the encode chunk must not carry tokens",
    "EncoderResultExpectedObject": "the encode chunk must carry encoder_result as an object",
    "EncodeUsageMismatch": "the encode chunk's usage must be prompt n, completion 0, total n",
    "RawEngineAdvertisedLlmRegistration": "a raw engine's config must not carry token-pipeline fields",
}
"""Every failure name, and the promise it stands for."""


class ConformanceFailure(AssertionError):
    """An engine broke a promise of the contract. `name` is its name in FAILURE_NAMES, `data` holds the figures."""

    def __init__(self, name: str, detail: str = "", **data: Any) -> None:
        promise = FAILURE_NAMES[name]
        figures = "{" + ", ".join(f"{key}: {value}" for key, value in data.items()) + "}" if data else ""
        super().__init__(f"{name}{figures}: {promise}" + (f" ({detail})" if detail else ""))
        self.name = name
        self.data = data
