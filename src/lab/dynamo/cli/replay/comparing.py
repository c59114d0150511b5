"""What a replay has in common with its recording. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from dynamo.cli.replay.answers import ReplayedAnswer, take_object
from dynamo.cli.replay.sending import ResentRequest
from dynamo.frontend.base.failures import message_template

SHOWN: Final = 20  # differences that are printed
_MAX_TEXT: Final = 200


class Difference(Struct, frozen=True):
    """One thing that is not as it was."""

    id: str
    what: str
    recorded: Any
    replayed: Any


class ReplayComparison(Struct, frozen=True):
    """One request."""

    replayed: ResentRequest
    compared: Sequence[str]  # status, error, finish_reason, input_tokens, output_tokens, text
    differences: Sequence[Difference]


def compare_all(found: Sequence[ResentRequest]) -> list[ReplayComparison]:
    """Compare them all."""
    return [compare(each) for each in found]


def compare(found: ResentRequest) -> ReplayComparison:
    """Compare one request with its recording.

    How it ended is always compared. Its text is compared where the request is the recorded one, word for word, and its
    answer does not depend on chance; its length in tokens, too.
    """
    request, answer = found.request, found.answer
    pairs: dict[str, tuple[Any, Any]] = {}
    if request.status is not None:
        pairs["status"] = (request.status, answer.status)
        if request.error and request.status >= 400 and answer.status >= 400:
            pairs["error"] = (message_template(request.error), message_template(answer.error))
    is_answered = request.status == 200
    if is_answered and request.is_whole:
        pairs["input_tokens"] = (request.input_tokens, answer.input_tokens)
        if _is_deterministic(request.body or {}):
            pairs["finish_reason"] = (request.finish_reason, answer.finish_reason)
            pairs["output_tokens"] = (request.output_tokens, answer.output_tokens)
            if request.response is not None:
                pairs["text"] = (_text_of(request.response), answer.texts)
    known = {
        name: pair for name, pair in pairs.items() if pair[0] is not None and (pair[1] is not None or name == "text")
    }
    differences = [
        Difference(request.id, name, before, now) for name, (before, now) in known.items() if not _equal(before, now)
    ]
    if answer.status == 0 and "status" not in known:
        differences.append(Difference(request.id, "status", None, answer.error))
    return ReplayComparison(found, tuple(known), differences)


def _equal(before: Any, now: Any) -> bool:
    return bool(before == now)


def _is_deterministic(body: Mapping[str, Any]) -> bool:
    """Return whether two answers of one engine to a request are the same."""
    return body.get("temperature") == 0 or body.get("seed") is not None or body.get("top_k") == 1


def _text_of(response: Mapping[str, Any]) -> dict[int, str]:
    answer = ReplayedAnswer(200)
    take_object(answer, response)
    return answer.texts


def table(found: Sequence[ReplayComparison]) -> list[str]:
    """Return the summary in lines."""
    lines = [f"{'':14}{'compared':>10}{'equal':>10}{'different':>11}"]
    for name in ("status", "error", "finish_reason", "input_tokens", "output_tokens", "text"):
        compared = sum(name in each.compared for each in found)
        if compared:
            wrong = sum(difference.what == name for each in found for difference in each.differences)
            lines.append(f"{name:14}{compared:>10,}{compared - wrong:>10,}{wrong:>11,}")
    for name, before, now in (
        ("ttft", [each.replayed.request.ttft_ms for each in found], [each.replayed.answer.ttft_ms for each in found]),
        (
            "total",
            [each.replayed.request.total_ms for each in found],
            [each.replayed.answer.total_ms for each in found],
        ),
    ):
        if any(value is not None for value in before) and any(value is not None for value in now):
            lines.append(f"{name:14}recorded {_spread(before)}   replayed {_spread(now)}")
    differences = [difference for each in found for difference in each.differences]
    lines += [
        f"{each.id}: {each.what} was {_shown(each.recorded)}, is {_shown(each.replayed)}"
        for each in differences[:SHOWN]
    ]
    if len(differences) > SHOWN:
        lines.append(f"and {len(differences) - SHOWN:,} further differences (--json shows them)")
    made_up = sum(not each.replayed.request.is_whole for each in found)
    if made_up:
        lines.append(f"{made_up:,} of {len(found):,} were sent with made-up texts: their content was not recorded")
    return lines


def as_json(found: Sequence[ReplayComparison]) -> dict[str, Any]:
    """Return the comparison as JSON values."""
    return {
        "requests": len(found),
        "different": sum(bool(each.differences) for each in found),
        "results": [
            {
                "id": each.replayed.request.id,
                "path": each.replayed.request.path,
                "status": each.replayed.answer.status,
                "error": each.replayed.answer.error or None,
                "compared": list(each.compared),
                "differences": [
                    {"what": one.what, "recorded": one.recorded, "replayed": one.replayed} for one in each.differences
                ],
                "is_whole": each.replayed.request.is_whole,
                "left_out": list(each.replayed.left_out),
                "ttft_ms": each.replayed.answer.ttft_ms,
                "total_ms": each.replayed.answer.total_ms,
                "late_ms": each.replayed.answer.late_ms,
            }
            for each in found
        ],
    }


def _spread(values: Sequence[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    return f"p50 {known[len(known) // 2]:,.0f} ms, p99 {known[min(len(known) - 1, len(known) * 99 // 100)]:,.0f} ms"


def _shown(value: Any) -> str:
    text = str(value) if not isinstance(value, dict) else " | ".join(value[key] for key in sorted(value))
    return repr(text[:_MAX_TEXT] + ("…" if len(text) > _MAX_TEXT else ""))
