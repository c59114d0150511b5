"""A replay over workers of two roles: prefill workers compute the prompts, decode workers make the answers. Pure.

It is two replays, one behind the other: a request arrives at the decode workers when its prompt was computed and handed
over. That is exact as long as no decode worker keeps a prefill worker waiting, which is so where prompts are handed over in
the prefill worker's answer: it frees its blocks whatever the decode workers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.mocker.timing import PolynomialTiming
from dynamo.replay.figures import ReplayFigures, summary_of
from dynamo.replay.flight import RequestFigures
from dynamo.replay.modes import frontend_of
from dynamo.replay.run import run_replay
from dynamo.replay.setup import ReplaySetup
from dynamo.replay.trace import StretchTree, Trace, TraceRequest
from dynamo.scheduling import PassTiming, SchedulerOptions


class SplitSetup(msgspec.Struct, frozen=True):
    """How many workers of each role, and what lies between them."""

    prefill: int
    decode: int
    transfer_ms_per_token: float = 0.0  # of the prompt, from the prefill worker to the decode worker


def check_split(trace: Trace) -> None:
    """Raise InvalidArgument for a trace that cannot be replayed in two parts: a turn in it waits for the answer before."""
    for request in trace.requests:
        if request.delay_ms is not None:
            raise InvalidArgument(
                f"request {request.request_id} waits for the answer before it (delay): prefill and decode workers are not "
                "simulated with such a trace"
            )


def run_split(
    trace: Trace,
    split: SplitSetup,
    setup: ReplaySetup,
    options: SchedulerOptions,
    *,
    mode: str,
    tree: StretchTree | None = None,
    timing: PassTiming | None = None,
) -> ReplayFigures:
    """Replay a trace over prefill and decode workers; `options` is every worker's engine but for its role.

    Of `setup` the seed, the rate and the delays of events count; the numbers of workers come from `split`. The figures are
    those that a client sees: the time to first token ends with the first token of the decode worker, and a request of one
    token is answered by its prefill worker. Hits and computed prompts are those of the prefill workers. Raises
    InvalidArgument (see `check_split`; and for a closed loop).
    """
    check_split(trace)
    if setup.concurrency is not None:
        raise InvalidArgument("concurrency: prefill and decode workers are simulated with requests at their times only")
    tree = tree or StretchTree(options.block_size)
    timing = timing or PolynomialTiming()

    def replayed(part: Trace, role: str, own: ReplaySetup) -> ReplayFigures:
        engine = replace(options, role=role)
        return run_replay(part, own, engine, frontend_of(mode, engine), mode=mode, tree=tree, pooled=0.0, timing=timing)

    prompts = replayed(trace, "prefill", msgspec.structs.replace(setup, workers=split.prefill))
    handed = _handed_over(trace, prompts.requests, split.transfer_ms_per_token)
    if not handed:
        return prompts
    # Decode workers publish no KV events, and start at the time of the first request that is handed to them.
    later = msgspec.structs.replace(setup, workers=split.decode, publishes_events=False, arrival_speedup_ratio=1.0)
    begin = handed[0][1].arrival_ms
    answers = replayed(Trace(trace.name, [request for _, request in handed]), "decode", later)
    requests = list(prompts.requests)
    for (number, _), answer in zip(handed, answers.requests, strict=True):
        requests[number] = _joined(requests[number], answer, begin)
    return _whole(prompts, answers, requests)


def _handed_over(
    trace: Trace, prompts: Sequence[RequestFigures], ms_per_token: float
) -> list[tuple[int, TraceRequest]]:
    """Return the requests that decode workers get, each with its place in the trace, in the order of their arrival there."""
    found = [
        (
            number,
            msgspec.structs.replace(
                request,
                arrival_ms=prompt.first_token_ms + ms_per_token * request.prompt_tokens,
                session_id=None,
            ),
        )
        for number, (request, prompt) in enumerate(zip(trace.requests, prompts, strict=True))
        if prompt.first_token_ms is not None and request.output_tokens > 1
    ]
    return sorted(found, key=lambda each: (each[1].arrival_ms, each[0]))


def _joined(prompt: RequestFigures, answer: RequestFigures, begin_ms: float) -> RequestFigures:
    """Return one request with the end that the decode workers gave it; their time begins at `begin_ms`."""

    def at(milliseconds: float | None) -> float | None:
        return None if milliseconds is None else begin_ms + milliseconds

    def after(milliseconds: float | None) -> float | None:
        return None if milliseconds is None else round(begin_ms + milliseconds - prompt.arrival_ms, 4)

    return msgspec.structs.replace(
        prompt,
        status=answer.status,
        worker=answer.worker,
        first_token_ms=at(answer.first_token_ms),
        last_token_ms=at(answer.last_token_ms),
        ttft_ms=after(answer.first_token_ms),
        ttst_ms=answer.ttst_ms,
        itl_ms=answer.itl_ms,
        e2e_latency_ms=after(answer.last_token_ms),
        output_tokens=answer.output_tokens,
    )


def _whole(prompts: ReplayFigures, answers: ReplayFigures, requests: Sequence[RequestFigures]) -> ReplayFigures:
    served = [request for request in requests if request.ttft_ms is not None]
    begin = min((request.arrival_ms for request in requests), default=0.0)
    return msgspec.structs.replace(
        prompts,
        requests=requests,
        latencies={
            **answers.latencies,
            "ttft": summary_of(request.ttft_ms for request in served if request.ttft_ms is not None),
            "e2e_latency": summary_of(
                request.e2e_latency_ms for request in served if request.e2e_latency_ms is not None
            ),
        },
        output_tokens=sum(request.output_tokens for request in served),
        duration_ms=max((request.last_token_ms or 0.0 for request in served), default=begin) - begin,
        worker_requests=[*prompts.worker_requests, *answers.worker_requests],
        preemptions=prompts.preemptions + answers.preemptions,
    )
