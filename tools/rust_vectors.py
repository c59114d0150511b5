"""Writes the vectors that the Rust implementation must agree on: names of KV blocks, and passes of the mocker.

python tools/rust_vectors.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dynamo.kv.hashing import block_hashes, sequence_hashes
from dynamo.mocker.configuration import read_configuration
from dynamo.scheduling import ScheduledRequest, make_core

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
        ]
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


def write(name: str, vectors: Any) -> None:
    """Write one file of vectors."""
    (RUST / name).write_text(json.dumps(vectors) + "\n")


if __name__ == "__main__":
    write("kv-vectors.json", kv_vectors())
    write("mocker-vectors.json", mocker_vectors())
