"""OpenAI's Files and Batch APIs of the faulty server."""

from __future__ import annotations

import json
import re
from typing import Any

from support.faulty_apis.reply import Reply, as_json, openai_refusal, parsed


class FaultyFiles:
    """The APIs. `fault` names what they do wrongly."""

    def __init__(self, fault: str, model: str) -> None:
        self.fault, self.model = fault, model
        self.files: dict[str, tuple[dict[str, Any], bytes]] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.made = 0

    def reply(self, method: str, path: str, body: bytes) -> Reply | None:
        parts = path.removeprefix("/v1/").split("/")
        if parts[0] == "files":
            if self.fault == "route missing":
                return openai_refusal(501, "switched off")
            return self._file(method, parts[1:], body)
        if parts[0] == "batches":
            return self._batch(method, parts[1:], body)
        return None

    def _kept(self, content: bytes, purpose: str, name: str = "referee.jsonl") -> dict[str, Any]:
        self.made += 1
        shown = {"id": f"file-{self.made}", "object": "file", "bytes": len(content), "created_at": 1}
        shown |= {"filename": name, "purpose": purpose, "status": "processed"}
        self.files[f"file-{self.made}"] = shown, content
        return shown

    def _file(self, method: str, where: list[str], body: bytes) -> Reply:
        if not where:
            return self._upload(body) if method == "POST" else self._list("files", [f for f, _ in self.files.values()])
        if where[0] not in self.files:
            unknown = where[0].endswith("00000000")
            as_text = self.fault == "error as text" and unknown
            return openai_refusal(400 if self.fault == "400 for an unknown file" and unknown else 404, "no such file", as_text=as_text)  # fmt: skip
        shown, content = self.files[where[0]]
        if method == "DELETE":
            if self.fault != "deleted file found":
                del self.files[where[0]]
            name = "file-0" if self.fault == "another id deleted" else where[0]
            return as_json(200, {"id": name, "object": "file", "deleted": True})
        if where[1:] == ["content"]:
            is_source = self.fault == "line ends changed" and content.startswith(b'{"custom_id": "referee"')
            return Reply(200, content.replace(b"\n", b"\r\n") if is_source else content)
        return as_json(200, {**shown, "filename": "other"} if self.fault == "another name" else shown)

    def _list(self, what: str, found: list[dict[str, Any]]) -> Reply:
        left_out = self.fault == f"list of {what} without the newest"
        return as_json(200, {"object": "list", "data": found[:-1] if left_out else found, "has_more": False})

    def _upload(self, body: bytes) -> Reply:
        mark = body.split(b"\r\n", 1)[0]
        parts = {}
        for part in body.split(mark)[1:-1]:
            head, _, content = part.partition(b"\r\n\r\n")
            named = re.search(rb'name="(\w+)"', head)
            assert named is not None
            parts[named[1].decode()] = content.removesuffix(b"\r\n")
        if "file" not in parts:
            return openai_refusal(500 if self.fault == "500 without a file" else 400, "missing", "file")
        if "purpose" not in parts and self.fault != "purpose optional":
            return openai_refusal(400, "missing", "purpose")
        shown = dict(self._kept(parts["file"], parts.get("purpose", b"batch").decode()))
        if self.fault == "bytes missing":
            del shown["bytes"]
            del self.files[shown["id"]][0]["bytes"]
        return as_json(200, shown)

    def _batch(self, method: str, where: list[str], body: bytes) -> Reply:
        if not where:
            return self._create(parsed(body)) if method == "POST" else self._list("batches", [*self.batches.values()])
        if where[0] not in self.batches:
            return openai_refusal(500 if self.fault == "500 for an unknown batch" else 404, "no such batch")
        return as_json(200, self._advanced(self.batches[where[0]]))

    def _create(self, asked: dict[str, Any]) -> Reply:
        if asked["input_file_id"] not in self.files:
            return openai_refusal(500 if self.fault == "500 for an unknown input" else 400, "no such file")
        if asked["endpoint"] != "/v1/chat/completions" and self.fault != "any endpoint taken":
            return openai_refusal(400, "no such endpoint")
        name = f"batch_{len(self.batches)}"
        self.batches[name] = batch = {"id": name, "object": "batch", **asked, "status": "in_progress", "created_at": 1}
        batch |= {"output_file_id": None, "error_file_id": None, "request_counts": {}}
        return as_json(200, {**batch, "object": "job"} if self.fault == "object of a batch wrong" else batch)

    def _advanced(self, batch: dict[str, Any]) -> dict[str, Any]:
        if batch["status"] != "in_progress" or self.fault == "batch never ends":
            return batch
        source = [json.loads(line) for line in self.files[batch["input_file_id"]][1].splitlines()]
        good = [line for line in source if "messages" in line["body"]]
        bad = [line for line in source if "messages" not in line["body"]]
        if self.fault == "failed by one line" and bad:
            return batch | {"status": "expired"}
        status = 500 if self.fault == "lines refused" else 200
        output = [self._result(line, status) for line in good]
        if self.fault == "a line twice" and not bad:
            output.append(output[0])
        batch["output_file_id"] = self._results(output)
        if bad:
            batch["error_file_id"] = self._results([self._result(line, 400) for line in bad])
        counted = {"total": len(source), "completed": len(good), "failed": len(bad)}
        if self.fault == "counts missing" and not bad:
            counted = {}
        batch |= {"status": "completed", "request_counts": counted}
        if self.fault == "called expired" and not bad:
            batch["status"] = "expired"
        return batch

    def _result(self, line: dict[str, Any], status: int) -> dict[str, Any]:
        answer: dict[str, Any] = {"choices": []} if status == 200 else {"error": {"message": "no", "type": "x"}}
        response = {"status_code": status, "request_id": "1", "body": answer}
        return {"id": "1", "custom_id": line["custom_id"], "response": response, "error": None}

    def _results(self, found: list[dict[str, Any]]) -> str:
        text = "".join(json.dumps(line) + "\n" for line in found)
        name: str = self._kept(text.encode(), "batch_output", "output.jsonl")["id"]
        return name
