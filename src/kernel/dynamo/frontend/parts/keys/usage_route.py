"""`GET /admin/usage`: what keys have used, added up."""

from __future__ import annotations

import time
from typing import Final
from urllib.parse import parse_qs

from dynamo.errors import InvalidArgument
from dynamo.frontend.base.asgi import Receive, Scope, Send, reply, reply_rejected
from dynamo.frontend.parts.keys.metering import UsageMeter
from dynamo.frontend.parts.keys.usage_store import UsageQuery, UsageUnavailable
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.escaping import json_line

__all__ = ["UsageRoute"]

DEFAULT_SECONDS: Final = 7 * 86_400
_KNOWN: Final = frozenset({"group_by", "since", "until"})


class UsageRoute:
    """Sums of a span of time (`since`, `until`: seconds since the epoch), grouped by `group_by`, separated by commas."""

    def __init__(self, meter: UsageMeter | None) -> None:
        """`meter`: None where no route needs a key."""
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._meter is None:
                raise RequestRejected(404, "no keys are in use: start the frontend with --keys FILE")
            query = _query_of(scope["query_string"].decode("latin-1"))
            try:
                data = await self._meter.rows(query)
            except InvalidArgument as error:
                raise RequestRejected(400, str(error), param="group_by") from None
            except UsageUnavailable as error:
                raise RequestRejected(503, str(error)) from None
        except RequestRejected as rejected:
            await reply_rejected(send, rejected)
            return
        body = {"object": "list", "since": query.since * 60, "until": query.until * 60, "data": data}
        await reply(send, 200, json_line(body))


def _query_of(text: str) -> UsageQuery:
    given = {name: values[-1] for name, values in parse_qs(text, keep_blank_values=True).items()}
    for name in given:
        if name not in _KNOWN:
            raise RequestRejected(
                400, f"{name[:64]} is not a parameter; there are {', '.join(sorted(_KNOWN))}", param=name[:64]
            )
    now = int(time.time())
    until = _seconds(given, "until", now + 60)
    since = _seconds(given, "since", until - DEFAULT_SECONDS)
    groups = tuple([group.strip() for group in given.get("group_by", "key").split(",")])
    if len(set(groups)) != len(groups):
        raise RequestRejected(400, "group_by names a group twice", param="group_by")
    return UsageQuery(groups, since // 60, -(-until // 60))


def _seconds(given: dict[str, str], name: str, default: int) -> int:
    value = given.get(name)
    if value is None:
        return max(0, default)
    if not (value.isascii() and value.isdecimal() and len(value) <= 12):
        raise RequestRejected(400, f"{name} must be seconds since the epoch, got {value[:64]!r}", param=name)
    return int(value)
