"""Writes the vectors that the Rust implementation must agree on: names of KV blocks, passes of the mocker, and the frames
of the native wire.

python tools/rust_vectors.py
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec

from dynamo import errors
from dynamo.kv.engine_events import read_payload
from dynamo.kv.hashing import block_hashes, sequence_hashes
from dynamo.mocker.configuration import read_configuration
from dynamo.runtime.calls.request_plane.native.frames import (
    KILL,
    PROLOGUE_OK,
    SENTINEL,
    STOP,
    Codec,
    ConnectionInfo,
    ControlMessage,
    encode_ack,
    encode_body,
    encode_call,
    encode_request,
    encode_two_part,
    handshake,
    response_at,
)
from dynamo.runtime.calls.request_plane.native.items import FINAL_ITEM, append_item, error_item
from dynamo.scheduling import ScheduledRequest, make_core
from dynamo.worker.kv_publishing.publisher import KvEventPublisher

RUST = Path(__file__).parent.parent / "rust"


def kv_vectors() -> dict[str, Any]:
    """Compute the names of blocks."""
    cases = [
        ("blocks of 16, and a tail without a name", list(range(40)), 16, None, None),
        ("blocks of one token", [7, 8, 9], 1, None, None),
        ("a block of 256 bytes", list(range(1000, 1064)), 64, None, None),
        ("an adapter", list(range(16)), 8, "adapter", None),
        ("a salt", list(range(16)), 8, None, "tenant"),
        ("an adapter and a salt", [2**32 - 1] * 8, 4, "a", "b"),
        ("empty names are none", list(range(8)), 4, "", ""),
        ("no whole block", [1, 2, 3], 4, None, None),
    ]
    return {
        "hashes": [
            {
                "name": name,
                "token_ids": token_ids,
                "block_size": block_size,
                "lora_name": lora_name,
                "cache_salt": cache_salt,
                "blocks": (blocks := block_hashes(token_ids, block_size, lora_name=lora_name, cache_salt=cache_salt)),
                "sequence": sequence_hashes(blocks),
            }
            for name, token_ids, block_size, lora_name, cache_salt in cases
        ],
        "engine_events": engine_event_vectors(),
    }


def engine_event_vectors() -> list[dict[str, Any]]:
    """Read what engines publish on ZMQ sockets of their own, and publish it: the payloads, and the events of routers."""
    digest = bytes(range(32))
    image = "ab" * 32
    stored: dict[str, Any] = {"type": "BlockStored", "block_size": 4, "parent_block_hash": None}
    eight = stored | {"token_ids": list(range(8)), "block_hashes": [11, 12]}
    cases: list[tuple[str, int | None, list[list[Any]]]] = [
        ("maps, and blocks that follow others", None, [
            [0.5, [eight], 3],
            [1, [stored | {"token_ids": [8, 9, 10, 11], "block_hashes": [13], "parent_block_hash": 12}]],
            [2, [{"type": "BlockRemoved", "block_hashes": [13, 11]}, {"type": "AllBlocksCleared"}]],
        ]),
        ("arrays, signed names and digests", None, [
            [0, [["BlockStored", [-1, digest], None, list(range(8)), 4, None, "GPU"]]],
            [0, [["BlockRemoved", [digest], "GPU"], ["AllBlocksCleared"]]],
        ]),
        ("an adapter, a salt, pairs", None, [
            [0, [eight | {"lora_name": "adapter", "extra_keys": [["dynamo-cache-salt:tenant"], None]}]],
            [0, [stored | {"lora_id": 7, "cache_salt": "dynamo-cache-salt:x", "token_ids": [1] * 4, "block_hashes": [21]}]],
            [0, [stored | {"token_ids": [[n, n + 1] for n in range(8)], "block_hashes": [31, 32]}]],
        ]),
        ("tiers, and what is not of the main cache", None, [
            [0, [eight | {"medium": "cpu"}, eight | {"medium": "NVME"}, eight | {"medium": "S3"}]],
            [0, [eight | {"locality": "remote"}, {"type": "BlockRemoved", "block_hashes": [11], "medium": "CPU"}]],
            [0, [eight | {"kv_cache_spec_kind": "sliding_window", "group_idx": 1}]],
            [0, [{"type": "BlockRemoved", "block_hashes": [11], "group_idx": 1}]],
            [0, [eight | {"kv_cache_spec_kind": "full_attention", "group_idx": 0}]],
        ]),
        ("what contradicts itself or cannot be read", None, [
            [0, [eight | {"parent_block_hash": 12}, eight | {"block_hashes": [5, 5]}]],
            [0, [eight | {"block_size": 0}, eight | {"token_ids": [-1] * 8}, {"type": "Other"}, 7, ["BlockRemoved"]]],
            [0, [eight | {"block_size": 8, "block_hashes": [11]}, eight]],
        ]),
        ("media whose hashes are appended", None, [
            [0, [eight | {"extra_keys": [[image], None]}]],
            [0, [eight | {"block_mm_infos": [None, {"mm_objects": [{"mm_hash": 9, "offsets": []}]}]}]],
        ]),
        ("media in the places of a placeholder", 3, [
            [0, [eight | {"token_ids": [3, 3, 1, 3, 3, 2, 2, 2], "extra_keys": [[image, ["cd" * 32, 0]], [image]]}]],
        ]),
    ]  # fmt: skip
    return [
        {"name": name, "image_token_id": token, **asyncio.run(_published(token, payloads))}
        for name, token, payloads in cases
    ]


async def _published(image_token_id: int | None, payloads: list[list[Any]]) -> dict[str, Any]:
    class Silent:
        def publish(self, payload: object) -> None:
            pass

    publisher = KvEventPublisher(None, 7, 4, image_token_id=image_token_id, channel=Silent())
    groups: set[int] = set()
    counts = [0, 0, 0]
    for payload in payloads:
        batch = read_payload(msgspec.msgpack.encode(payload), groups)
        counts = [counts[0] + batch.filtered, counts[1] + batch.suspicious, counts[2] + len(batch.issues)]
        publisher.take_engine_events(batch.events)
    events = publisher.answer(1, None).get("Events", {"events": []})["events"]
    for event in events:
        if isinstance(stored := event["event"]["data"], dict) and "stored" in stored:
            for block in stored["stored"]["blocks"]:
                block["mm_extra_info"] = None  # what the worker in Rust does not report
    publisher.shutdown()
    return {
        "payloads": [msgspec.msgpack.encode(payload).hex() for payload in payloads],
        "events": events,
        "filtered": counts[0],
        "suspicious": counts[1],
        "issues": counts[2],
    }


def mocker_vectors() -> list[dict[str, Any]]:
    """Run the schedulers of the mocker; a pass is [ms, requests that got a token, blocks in use, preemptions so far]."""
    small = {"num_gpu_blocks": 40, "block_size": 16}
    engines: list[dict[str, Any]] = [
        {"num_gpu_blocks": 4096, "block_size": 16},
        small,
        small | {"preemption_mode": "fifo", "max_num_batched_tokens": 64},
        small | {"enable_chunked_prefill": False, "max_num_batched_tokens": 50},
        small | {"enable_prefix_caching": False, "max_num_seqs": 3},
        small | {"backend": "trtllm"},
        small | {"backend": "sglang", "sglang": {"chunked_prefill_size": 64}},
        small | {"backend": "sglang", "block_size": 1, "num_gpu_blocks": 500, "sglang": {"schedule_policy": "lpm"}},
    ]
    requests = [{"first": n % 5 * 1000, "prompt": 70 + n * 13 % 60, "output": 20 + n * 7 % 40} for n in range(24)]
    return [{"engine": engine, "requests": requests, "passes": _passes(engine, requests)} for engine in engines]


def _passes(engine: dict[str, Any], requests: list[dict[str, int]]) -> list[list[Any]]:
    options = read_configuration({"engine": engine})
    core = make_core(options.scheduler, options.timing)
    for number, request in enumerate(requests):
        prompt = range(request["first"], request["first"] + request["prompt"])
        output = iter(range(1_000_000 + number * 1000, 2_000_000))  # nobody else's: output blocks are not shared
        core.submit(
            ScheduledRequest.of_tokens(
                "", prompt, request["output"], options.scheduler.block_size, output, owner=number
            ),
            0.0,
        )
    passes = []
    while (plan := core.begin_pass(0.0)) is not None:
        emitted = [request.owner for request in core.end_pass().emitted]
        passes.append([round(plan.duration_ms, 6), emitted, core.pool.used, core.preemptions])
    return passes


BODY = {"token_ids": [1, 300, 70_000], "stop_conditions": {"max_tokens": 4}, "output_options": {}}


def native_vectors() -> dict[str, Any]:
    """Encode requests, words and streams of the native wire. Bytes are in hex."""
    return {
        "requests": _native_requests(),
        "refused": [
            {"name": name, "bytes": _request(message).hex(), "field": field} for name, message, field in _refused()
        ],
        "words": [
            {"bytes": frame.hex(), "word": word}
            for frame, word in [
                (STOP, "stop"),
                (KILL, "kill"),
                (SENTINEL, None),
                (encode_two_part(b'"stop"', b"x"), None),
            ]
        ],
        "acks": [{"text": text, "bytes": encode_ack(text).hex()} for text in ("", "Server overloaded: full")],
        "greetings": [
            {"subject": subject, "bytes": (handshake(subject) + PROLOGUE_OK).hex()} for subject in ("s-1", 'ä"b')
        ],
        "streams": [_native_stream(codec, name, items) for codec in _CODECS for name, items in _streams()],
        "errors": _native_errors(),
    }


_CODECS: tuple[Codec, ...] = ("msgpack", "json")


def _request(message: ControlMessage, headers: dict[str, str] | None = None, codec: Codec = "msgpack") -> bytes:
    return encode_request("1f/ns/c/e", headers or {}, encode_call(message, encode_body(BODY, codec)))


def _native_requests() -> list[dict[str, Any]]:
    trace = {"traceparent": "00-1-2-01", "x-dynamo-prompt-tokens": "3", "x-endpoint-path": "1f/ns/c/e"}
    cases: list[tuple[str, str, Codec, dict[str, str], dict[str, str] | None]] = [
        ("a plain request in msgpack", "10.0.0.1:80", "msgpack", {}, None),
        ("a plain request in JSON", "host.example:65535", "json", {}, None),
        ("a request with everything", "[fe80::1]:8080", "msgpack", trace, {"tag": "t", "ü": "\u2028"}),
    ]
    vectors = []
    for name, address, codec, headers, metadata in cases:
        message = _message(address, payload_codec=codec, metadata=metadata)
        host, _, port = address.rpartition(":")
        means = {
            "path": "1f/ns/c/e",
            "headers": headers,
            "id": "r-1",
            "codec": codec,
            "metadata": metadata or {},
            "host": host.strip("[]"),
            "port": int(port),
            "subject": "s-1",
            "body": BODY,
        }
        vectors.append({"name": name, "bytes": _request(message, headers, codec).hex(), "means": means})
    return vectors


def _message(address: str = "10.0.0.1:80", **more: Any) -> ControlMessage:
    fields = {"connection_info": response_at(address, "s-1", "r-1")} | more
    return ControlMessage(id="r-1", request_type="single_in", response_type="many_out", **fields)


def _refused() -> list[tuple[str, ControlMessage, str]]:
    def info(name: str, value: str) -> ConnectionInfo:
        there = {"address": "10.0.0.1:80", "subject": "s-1", "context": "r-1", "stream_type": "response"}
        return ConnectionInfo("tcp_server", json.dumps(there | {name: value}))

    return [
        ("another codec", _message(payload_codec="xml"), "payload_codec"),
        ("another transport", _message(connection_info=ConnectionInfo("nats", "{}")), "transport"),
        ("an address without a port", _message(connection_info=info("address", "10.0.0.1")), "address"),
        ("another context", _message(connection_info=info("context", "r-2")), "context"),
        ("a stream of requests", _message(connection_info=info("stream_type", "request")), "stream_type"),
        (
            "information that is not JSON",
            _message(connection_info=ConnectionInfo("tcp_server", "{")),
            "connection_info",
        ),
    ]


def _streams() -> list[tuple[str, list[dict[str, Any]]]]:
    usage = {"completion_usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}
    candidate = {"rank": 1, "token_id": 5, "token": None, "logprob": -0.5}
    return [
        ("one token", [{"token_ids": [5], "index": 0}]),
        (
            "a burst, and its end",
            [{"token_ids": [1, 300, 70_000], "index": 0}, {"token_ids": [], "finish_reason": "stop"}],
        ),
        ("an end with usage", [{**usage, "token_ids": [6], "index": 0, "finish_reason": "length"}]),
        ("a second choice", [{"token_ids": [7], "index": 1}, {"token_ids": [8], "index": 200}]),
        ("log probabilities", [{"log_probs": [-0.5], "top_logprobs": [[candidate]], "token_ids": [5], "index": 0}]),
        ("text of the engine", [{"text": 'say "ä"', "tokens": ["a", None], "token_ids": [1, 2], "index": 0}]),
        ("many tokens", [{"token_ids": list(range(20)), "index": 0}]),
    ]


def _native_stream(codec: Codec, name: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    out = bytearray()
    for item in items:
        data = {"index": 0} | item
        tail = ("token_ids", "index", "finish_reason")  # as the sink writes them, behind what else a chunk has
        ordered = {key: value for key, value in data.items() if key not in tail}
        append_item(out, {"data": ordered | {key: data[key] for key in tail if key in data}}, codec)
    return {"name": name, "codec": codec, "items": items, "bytes": (out + FINAL_ITEM[codec] + SENTINEL).hex()}


def _native_errors() -> list[dict[str, Any]]:
    plain: list[errors.DynamoException] = [kind("because") for kind in _KINDS]
    asserted = [
        (errors.InvalidArgument if status < 500 else errors.Unknown)(json.dumps({"message": "words", "code": status}))
        for status in _STATUSES
    ]
    return [
        {"kind": errors.describe(error)["error_type"], "message": str(error), "record": error_item(error)["error"]}
        for error in (*plain, *asserted)
    ]


_KINDS = (
    *(errors.InvalidArgument, errors.Cancelled, errors.Unknown, errors.CannotConnect, errors.Disconnected),
    *(errors.EngineShutdown, errors.StreamIncomplete, errors.WorkerUnavailable, errors.ConnectionTimeout),
    *(errors.ResponseTimeout, errors.Overloaded),
)
_STATUSES = (400, 401, 403, 404, 408, 409, 413, 415, 418, 422, 429, 431, 499, 500, 501, 502, 503, 504, 511, 529)


def write(name: str, vectors: Any) -> None:
    """Write one file of vectors."""
    (RUST / name).write_text(json.dumps(vectors) + "\n")


if __name__ == "__main__":
    write("kv-vectors.json", kv_vectors())
    write("mocker-vectors.json", mocker_vectors())
    write("native-vectors.json", native_vectors())
