"""Pictures of systems for tests of what shows them."""

from __future__ import annotations

from typing import Any

from dynamo.protocol.inspector.views import (
    AttemptView,
    CacheView,
    CandidateView,
    CountersView,
    ErrorGroup,
    EventView,
    FallbackView,
    FleetView,
    FrontendView,
    ModelView,
    Picture,
    PrefixView,
    RecentView,
    RequestDetail,
    ResidentView,
    RoutingView,
    StreamView,
    WorkerView,
)

NOW_MS = 1_790_000_000_000
MINUTE_MS = 60_000
DAY_MS = 24 * 60 * MINUTE_MS

FLEET = FleetView(
    cluster="demo-cluster",
    started_ms=NOW_MS - 3 * DAY_MS,
    frontends=2,
    workers=4,
    models=3,
    now=CountersView(
        requests_per_second=41.2,
        input_tokens_per_second=182_400.0,
        output_tokens_per_second=6210.0,
        running=62,
        waiting=2,
        ttft_p50_seconds=0.084,
        ttft_p99_seconds=0.412,
        itl_p50_seconds=0.019,
        itl_p99_seconds=0.044,
        error_share=0.0002,
        kv_share=0.71,
        prefix_hit_share=0.58,
    ),
    history={
        "requests_per_second": [12.0, 19.5, 24.0, None, 31.0, 36.5, 44.0, 41.2],
        "output_tokens_per_second": [2000.0, 2900.0, 4100.0, 5200.0, 6100.0, 6300.0, 6050.0, 6210.0],
    },
    version="0.1.0",
)
FRONTENDS = [
    FrontendView(id="fe-1", host="node-a", pid=4711, started_ms=NOW_MS - 3 * DAY_MS, stage="serving", in_flight=40,
                 cpu_share=0.41, rss_bytes=212 << 20, loop_lag_seconds=0.0004, version="0.1.0"),
    FrontendView(id="fe-2", host="node-a", pid=4712, started_ms=NOW_MS - 3 * DAY_MS, stage="serving", in_flight=22,
                 cpu_share=0.28, rss_bytes=198 << 20, loop_lag_seconds=0.0003, version="0.1.0"),
]  # fmt: skip
MODELS = [
    ModelView(id="dynamo/demo", name="demo", namespace="dynamo", types=["chat", "completions"], is_ready=True,
              workers={"agg": 3}, in_flight=59, waiting=2, limit=256, context_length=131072, block_size=16,
              router_mode="kv", adapters=["demo-law"]),
    ModelView(id="dynamo/demo-law", name="demo-law", namespace="dynamo", types=["chat"], is_ready=True,
              workers={"agg": 3}, in_flight=0, context_length=131072, router_mode="kv", parent="demo"),
    ModelView(id="dynamo/big", name="big", namespace="dynamo", types=["chat"], is_ready=False,
              why_not="no decode worker: a model with prefill workers needs one", workers={"prefill": 1}, in_flight=3),
]  # fmt: skip
RESIDENTS = [
    ResidentView(id="fe-1/demo", name="demo", state="loaded", taken_bytes=949_000_000, needed_bytes=949_000_000, running=3,
                 is_pinned=True, presets=["coding"], used_ms=NOW_MS - 200),
    ResidentView(id="fe-1/big", name="big", state="loading", taken_bytes=558_000_000, needed_bytes=558_000_000, waiting=2,
                 used_ms=NOW_MS - 3_000),
    ResidentView(id="fe-1/broken", name="broken", state="failed", why="exited with 1: the weights have a hole",
                 needed_bytes=158_000_000, used_ms=NOW_MS - 9 * MINUTE_MS),
    ResidentView(id="fe-1/never", name="never", state="absent", needed_bytes=317_000_000),
]  # fmt: skip
WORKERS = [
    WorkerView(id="694d9a3c5d8f7e9f", role="agg", models=["demo"], address="10.0.0.11:41233", wire="mux", state="ready",
               since_ms=NOW_MS - 3 * DAY_MS, running=28, limit=64, queued=0, silent_ms=NOW_MS - 20,
               output_tokens_per_second=2110.0, kv_blocks_used=6888, kv_blocks_total=8192, prefix_hit_share=0.61,
               version="0.1.0", card="a91c"),
    WorkerView(id="694d9a3c5d8f7ea0", role="agg", models=["demo"], address="10.0.0.12:40021", wire="mux", state="ready",
               since_ms=NOW_MS - 3 * DAY_MS, running=31, limit=64, queued=2, queue_age_seconds=0.4,
               silent_ms=NOW_MS - 12_400, output_tokens_per_second=2204.0, kv_blocks_used=7946, kv_blocks_total=8192,
               prefix_hit_share=0.58, version="0.1.0", card="a91c"),
    WorkerView(id="694d9a3c5d8f7ea1", role="agg", models=["demo"], address="10.0.0.13:40377", wire="mux",
               state="quarantined", note="connect refused", state_until_ms=NOW_MS + 3_000,
               since_ms=NOW_MS - 3 * DAY_MS, running=0, limit=64, queued=0, output_tokens_per_second=0.0,
               kv_blocks_used=1802, kv_blocks_total=8192),
    WorkerView(id="694d9a3c5d8f7ea2", role="prefill", models=["big"], address="10.0.0.14:39001", wire="native",
               state="draining", note="leaves", state_until_ms=NOW_MS + 24_000, since_ms=NOW_MS - 2 * 60 * MINUTE_MS,
               running=3, limit=16, queued=0, silent_ms=NOW_MS - 100, output_tokens_per_second=310.0,
               kv_blocks_used=4915, kv_blocks_total=8192, prefix_hit_share=0.40),
]  # fmt: skip
STREAMS = [
    StreamView(id="chatcmpl-52a1f00d", frontend="fe-1", key="team-a", model="demo", endpoint="chat/completions",
               phase="decode", started_ms=NOW_MS - 41_000, phase_ms=NOW_MS - 40_800, is_streaming=True,
               queued_seconds=0.0, ttft_seconds=0.09, prompt_tokens=8120, cached_tokens=7936, output_tokens=1904,
               max_tokens=4096, tokens_per_second=47.1, last_token_ms=NOW_MS - 20, workers=["694d9a3c5d8f7e9f"]),
    StreamView(id="chatcmpl-9c03beef", frontend="fe-1", key="batch", model="demo", endpoint="chat/completions",
               phase="decode", started_ms=NOW_MS - 38_200, phase_ms=NOW_MS - 36_400, is_streaming=True,
               queued_seconds=1.2, ttft_seconds=1.61, prompt_tokens=512, cached_tokens=0, output_tokens=211,
               max_tokens=1024, tokens_per_second=0.0, last_token_ms=NOW_MS - 12_400, workers=["694d9a3c5d8f7ea0"],
               is_stalled=True),
    StreamView(id="chatcmpl-11de0001", frontend="fe-2", model="big", endpoint="chat/completions", phase="prefill",
               started_ms=NOW_MS - 2_000, phase_ms=NOW_MS - 1_900, queued_seconds=0.1, prompt_tokens=61_440,
               cached_tokens=0, max_tokens=2048, workers=["694d9a3c5d8f7ea2"]),
]  # fmt: skip
RECENT = [
    RecentView(id="chatcmpl-77aa", frontend="fe-1", key="team-a", model="demo", endpoint="chat/completions",
               started_ms=NOW_MS - 9_000, ended_ms=NOW_MS - 1_000, status=200, outcome="ok", finish_reason="stop",
               ttft_seconds=0.08, prompt_tokens=900, cached_tokens=640, output_tokens=377,
               workers=["694d9a3c5d8f7e9f"]),
    RecentView(id="chatcmpl-88bb", frontend="fe-2", key="batch", model="demo", endpoint="chat/completions",
               started_ms=NOW_MS - 30_000, ended_ms=NOW_MS - 20_000, status=502, outcome="failed",
               code="worker_lost", message="the worker was lost", prompt_tokens=400, cached_tokens=0, output_tokens=12,
               workers=["694d9a3c5d8f7ea1", "694d9a3c5d8f7ea0"], attempts=2, has_bundle=True),
]  # fmt: skip
CANDIDATES = [
    CandidateView(worker="694d9a3c5d8f7ea0", overlap_blocks=0.0, prefill_tokens=512.0, decode_blocks=41.0, cost=53.1,
                  is_chosen=True),
    CandidateView(worker="694d9a3c5d8f7e9f", overlap_blocks=0.0, prefill_tokens=512.0, decode_blocks=55.2, cost=67.3),
    CandidateView(worker="694d9a3c5d8f7ea1", left_out="quarantined (connect refused 12:02:58)"),
]  # fmt: skip
ROUTING = [
    RoutingView(id="d1", request_id="chatcmpl-9c03beef", model="demo", stage="decode", at_ms=NOW_MS - 38_190,
                policy="kv", decided_by="lowest cost", prompt_tokens=512, block_size=16, candidates=CANDIDATES,
                candidates_in_all=3),
]  # fmt: skip
CACHES = [
    CacheView(id=worker.id, model="demo", role="agg", block_size=16, trust="exact", blocks_known=known,
              blocks_total=4096, index_share=share, tiers={"device": known}, prompt_blocks_per_minute=9000.0,
              hit_blocks_per_minute=9000.0 * hits, hit_share=hits, history=[float(n % 7) for n in range(60)],
              evicted_blocks_per_minute=evicted, gaps=gaps, resyncs=None if gaps is None else gaps // 2)
    for worker, known, share, hits, evicted, gaps in zip(
        WORKERS[:3], (3440, 3970, 910), (0.41, 0.48, 0.11), (0.61, 0.58, 0.0), (0.0, 5210.0, None), (0, 3, None), strict=True)
]  # fmt: skip
PREFIXES = [
    PrefixView(id="8f00aa11", model="demo", blocks=512, depth=512, holders=[w.id for w in WORKERS[:3]], hits=9120),
    PrefixView(id="31cc90fe", model="demo", blocks=96, depth=96, holders=[WORKERS[0].id], hits=88),
]
ERRORS = [
    ErrorGroup(id="e1", status=502, code="worker_lost", model="demo", worker="694d9a3c5d8f7ea1",
               message="worker <id> lost after <n> tokens", count=17, per_minute=0.4, first_ms=NOW_MS - 55 * MINUTE_MS,
               last_ms=NOW_MS - 20_000, example="chatcmpl-88bb"),
    ErrorGroup(id="e2", status=400, code="context_length_exceeded", model="big", worker=None,
               message="the prompt has <n> tokens", count=3, per_minute=0.0, first_ms=NOW_MS - 40 * MINUTE_MS,
               last_ms=NOW_MS - 31 * MINUTE_MS, example="chatcmpl-99cc"),
]  # fmt: skip
EVENTS = [
    EventView(id="v1", at_ms=NOW_MS - 42_000, kind="worker quarantined", text="connect refused; 4 requests migrated",
              worker="694d9a3c5d8f7ea1", model="demo"),
    EventView(id="v2", at_ms=NOW_MS - 6_000, kind="action", text="drain: new kernel", worker="694d9a3c5d8f7ea2",
              by="ops"),
]  # fmt: skip
DETAIL = RequestDetail(
    stream=STREAMS[1],
    timeline=[
        ("admitted", NOW_MS - 38_200, NOW_MS - 38_199),
        ("preprocess", NOW_MS - 38_199, NOW_MS - 38_193),
        ("route", NOW_MS - 38_193, NOW_MS - 38_192),
        ("queued", NOW_MS - 38_192, NOW_MS - 36_992),
        ("prefill", NOW_MS - 36_992, NOW_MS - 36_590),
        ("decode", NOW_MS - 36_590, None),
    ],
    routing=ROUTING,
    fallbacks=[FallbackView(model="local", next_model="demo", reason="unavailable", error="CannotConnect", at_ms=NOW_MS - 38_195)],
    attempts=[AttemptView(number=1, worker="694d9a3c5d8f7ea0", at_ms=NOW_MS - 38_190, outcome="running",
                          output_tokens=211)],
    attempt_limit=4,
    parameters={"temperature": 0.7, "max_tokens": 1024, "tools": 2, "response_format": "json_schema", "seed": None},
    token_rates=[47.0, 46.0, 48.0, 44.0, 47.0, 21.0, *([0.0] * 12)],
    events=[EventView(id="r1", at_ms=NOW_MS - 36_590, kind="first token", text="first token"),
            EventView(id="r2", at_ms=NOW_MS - 12_400, kind="last token", text="last token")],
)  # fmt: skip


def demo_picture(**changes: Any) -> Picture:
    """A picture with something in every view."""
    members: dict[str, Any] = {
        "seq": 7, "taken_ms": NOW_MS, "fleet": FLEET, "frontends": FRONTENDS, "models": MODELS, "residents": RESIDENTS,
        "workers": WORKERS,
        "streams": STREAMS, "recent": RECENT, "routing": ROUTING, "caches": CACHES, "prefixes": PREFIXES, "errors": ERRORS,
        "events": EVENTS,
    }  # fmt: skip
    return Picture(**(members | changes))


def ready_picture(**changes: Any) -> Picture:
    """One in which nothing is wrong."""
    return demo_picture(
        **({"models": MODELS[:2], "workers": WORKERS[:1], "streams": STREAMS[:1]} | changes),
    )


def many_streams(count: int) -> list[StreamView]:
    """So many requests in flight, each a little different."""
    return [
        StreamView(id=f"chatcmpl-{place:08x}", frontend="fe-1", key=f"team-{place % 7}", model="demo",
                   endpoint="chat/completions", phase="decode", started_ms=NOW_MS - 50 * place,
                   phase_ms=NOW_MS - 50 * place, is_streaming=True, ttft_seconds=0.08, prompt_tokens=100 + place,
                   cached_tokens=place, output_tokens=place, max_tokens=2048, tokens_per_second=40.0 + place % 9,
                   last_token_ms=NOW_MS - 20, workers=[WORKERS[place % 3].id])
        for place in range(count)
    ]  # fmt: skip
