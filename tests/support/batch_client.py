"""The Files and Batches APIs over an in-process frontend, and what a batch's files hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final

from support.asgi_client import Exchange
from support.frontend_cluster import Cluster
from support.patience import PATIENCE_SECONDS

BOUNDARY = "----boundary-7f3a"
FINAL = frozenset({"failed", "completed", "expired", "cancelled"})
CHAT: Final = "/v1/chat/completions"


def form(data: bytes, *, filename: str = "in.jsonl", **fields: str) -> bytes:
    """A form as clients write it: the fields, then the file."""
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    ]
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n'
    head += "Content-Type: application/octet-stream\r\n\r\n"
    return "".join(parts).encode() + head.encode() + data + f"\r\n--{BOUNDARY}--\r\n".encode()


FORM_HEADERS = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def chat_line(custom_id: str, content: str = "hi", *, model: str = "m", **changes: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | changes


def jsonl(lines: Sequence[Any]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


async def upload(house: Cluster, data: bytes, *, purpose: str = "batch", **fields: str) -> Exchange:
    exchange = house.client.begin("POST", "/v1/files", form(data, purpose=purpose, **fields), headers=FORM_HEADERS)
    return await exchange.done()


async def begin(house: Cluster, lines: Sequence[Any], **members: Any) -> dict[str, Any]:
    """Upload lines and make a batch of them."""
    file = await upload(house, jsonl(lines))
    assert file.status == 200, file.body
    body = {"input_file_id": file.json["id"], "endpoint": CHAT, "completion_window": "24h"} | members
    made = await house.client.call("POST", "/v1/batches", body)
    assert made.status == 200, made.body
    found: dict[str, Any] = made.json
    return found


async def poll(house: Cluster, id: str, *states: str) -> dict[str, Any]:
    """The batch once it is in one of the states (none given: in a final one)."""
    wanted = frozenset(states) or FINAL
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            answer = await house.client.get(f"/v1/batches/{id}")
            assert answer.status == 200, answer.body
            found: dict[str, Any] = answer.json
            if found["status"] in wanted:
                return found
            await asyncio.sleep(0.02)


async def results(house: Cluster, batch: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The result lines of an ended batch by custom id; no id may be there twice."""
    found: dict[str, dict[str, Any]] = {}
    for member in ("output_file_id", "error_file_id"):
        if batch[member] is None:
            continue
        content = await house.client.get(f"/v1/files/{batch[member]}/content")
        assert content.status == 200
        for line in content.body.splitlines():
            result = json.loads(line)
            assert result["custom_id"] not in found
            found[result["custom_id"]] = result
    return found
