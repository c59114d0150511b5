"""Checks of OpenAI's Files API."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from dynamo.cli.referee.apis.refusals import openai_error
from dynamo.cli.referee.checks import CannotJudge, Cause, Level, Probe, Row, demand, demand_route, served
from dynamo.cli.referee.exchange import Json, ServerAnswer, member

PATH: Final = "/v1/files"
PAGE: Final = "OpenAI reference, Files"
CONTENT: Final = b'{"custom_id": "referee"}\n'
NAME: Final = "referee.jsonl"
_BOUNDARY: Final = "referee-7d1c4f2a9b"
_FORM: Final = {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"}


def form(content: bytes | None, purpose: str | None) -> bytes:
    """Build the body of an upload. None leaves a member out."""
    parts = []
    if purpose is not None:
        parts.append(f'Content-Disposition: form-data; name="purpose"\r\n\r\n{purpose}'.encode())
    if content is not None:
        head = (
            f'Content-Disposition: form-data; name="file"; filename="{NAME}"\r\nContent-Type: application/jsonl\r\n\r\n'
        )
        parts.append(head.encode() + content)
    mark = f"--{_BOUNDARY}".encode()
    return b"".join(mark + b"\r\n" + part + b"\r\n" for part in parts) + mark + b"--\r\n"


async def send(probe: Probe, content: bytes | None = CONTENT, purpose: str | None = "batch") -> ServerAnswer:
    """Send an upload."""
    return await probe.post(PATH, form(content, purpose), more=_FORM, is_fresh=True)


async def is_there(probe: Probe) -> None:
    demand_route(probe, await probe.get(PATH, is_fresh=False))


async def upload(probe: Probe, content: bytes = CONTENT) -> Json:
    """Upload a file, and return its object. Raises CannotJudge where it has no id."""
    made = served(await send(probe, content)).json()
    if not isinstance(member(made, "id"), str):
        raise CannotJudge("the object of an upload has no id", Cause.SERVER)
    return made


async def delete(probe: Probe, name: str) -> ServerAnswer:
    """Delete a file."""
    return await probe.get(f"{PATH}/{quote(name)}", "DELETE")


async def _uploaded(probe: Probe) -> tuple[Json, dict[str, ServerAnswer]]:
    """Upload a file, read it in each way, and delete it: once for all checks."""

    async def make() -> tuple[Json, dict[str, ServerAnswer]]:
        made = await upload(probe)
        where = f"{PATH}/{quote(made['id'])}"
        found = {
            "retrieve": await probe.get(where),
            "content": await probe.get(f"{where}/content"),
            "list": await probe.get(PATH),
            "delete": await delete(probe, made["id"]),
            "after": await probe.get(where),
        }
        return made, found

    found: tuple[Json, dict[str, ServerAnswer]] = await probe.step("file", make)
    return found


async def check_upload(probe: Probe) -> None:
    made, _ = await _uploaded(probe)
    demand(member(made, "object") == "file", f"object is {member(made, 'object')!r}, not 'file'")
    demand(member(made, "bytes") == len(CONTENT), f"bytes is {member(made, 'bytes')!r}, not {len(CONTENT)}")
    demand(isinstance(member(made, "created_at"), int), "created_at is not a whole number")
    demand(member(made, "filename") == NAME, f"filename is {member(made, 'filename')!r}, not {NAME!r}")
    demand(member(made, "purpose") == "batch", f"purpose is {member(made, 'purpose')!r}, not 'batch'")


async def check_retrieve(probe: Probe) -> None:
    made, found = await _uploaded(probe)
    shown = served(found["retrieve"]).json()
    for name in ("id", "object", "bytes", "filename", "purpose"):
        demand(member(shown, name) == member(made, name), f"{name} is {member(shown, name)!r}, not that of the upload")


async def check_content(probe: Probe) -> None:
    _, found = await _uploaded(probe)
    demand(served(found["content"]).body == CONTENT, "the content is not that of the upload")


async def check_list(probe: Probe) -> None:
    made, found = await _uploaded(probe)
    shown = served(found["list"]).json()
    demand(member(shown, "object") == "list", f"object is {member(shown, 'object')!r}, not 'list'")
    names = [member(each, "id") for each in member(shown, "data") or []]
    if made["id"] not in names and member(shown, "has_more"):
        raise CannotJudge("the file is not on the first page of the list")
    demand(made["id"] in names, "the uploaded file is not in the list")


async def check_delete(probe: Probe) -> None:
    made, found = await _uploaded(probe)
    shown = served(found["delete"]).json()
    demand(member(shown, "id") == made["id"], f"id is {member(shown, 'id')!r}, not that of the file")
    demand(member(shown, "deleted") is True, f"deleted is {member(shown, 'deleted')!r}, not true")


async def check_deleted(probe: Probe) -> None:
    _, found = await _uploaded(probe)
    demand(found["after"].status == 404, f"a deleted file is found with status {found['after'].status}")


async def check_unknown(probe: Probe) -> None:
    answer = await probe.get(f"{PATH}/file-00000000000000000000000000000000")
    demand(answer.status == 404, f"expected status 404, got {answer.message}")


async def check_error_shape(probe: Probe) -> None:
    answer = await probe.get(f"{PATH}/file-00000000000000000000000000000000")
    if answer.status < 400:
        raise CannotJudge("the server does not refuse a file that does not exist", Cause.SERVER)
    openai_error(answer.json())


async def check_missing_file(probe: Probe) -> None:
    answer = await send(probe, content=None)
    demand(answer.status == 400, f"expected status 400, got {answer.message}")


async def check_missing_purpose(probe: Probe) -> None:
    answer = await send(probe, purpose=None)
    made = member(answer.json(), "id")
    if answer.status == 200 and isinstance(made, str):
        await delete(probe, made)
    demand(answer.status == 400, f"expected status 400, got HTTP {answer.status}")


_CORE, _AGENT = Level.CORE, Level.AGENT
ROWS: Final[tuple[Row, ...]] = (
    ("upload", check_upload, _CORE, "major", f"{PAGE}, The file object: id, object, bytes, created_at, filename and purpose", "Write every required member with its type"),
    ("retrieve", check_retrieve, _CORE, "major", f"{PAGE}, Retrieve file: the object of the upload", "Serve GET /v1/files/ID"),
    ("content", check_content, _CORE, "major", f"{PAGE}, Retrieve file content: the bytes of the upload", "Keep the bytes as they came"),
    ("list", check_list, _CORE, "major", f"{PAGE}, List files: a list with every file", "Serve GET /v1/files"),
    ("delete", check_delete, _CORE, "major", f"{PAGE}, Delete file: id and deleted", "Serve DELETE /v1/files/ID"),
    ("deleted", check_deleted, _CORE, "major", f"{PAGE}, Delete file: a deleted file is gone", "Forget the file"),
    ("error.unknown-file", check_unknown, _CORE, "major", "OpenAI reference, Error codes: a file that does not exist is 404", "Refuse it with 404"),
    ("error.shape", check_error_shape, _CORE, "major", "OpenAI reference, Error codes: A refusal has the error object of the API", "Write errors as JSON of that form"),
    ("error.missing-file", check_missing_file, _CORE, "major", f"{PAGE}, Upload file: file is required; without it the status is 400", "Refuse it with 400"),
    ("error.missing-purpose", check_missing_purpose, _CORE, "minor", f"{PAGE}, Upload file: purpose is required; without it the status is 400", "Refuse it with 400"),
)  # fmt: skip
