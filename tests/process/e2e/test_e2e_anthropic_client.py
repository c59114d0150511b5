"""Anthropic's own client and real processes: each class of error, cancellation, and what a proxy in between would see."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic", reason="pip install -e '.[dev]'")

from support.http_client import script  # noqa: E402
from support.patience import PATIENCE_SECONDS  # noqa: E402
from support.processes import Stack  # noqa: E402

MODEL = "scripted"
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(stack: Stack) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=stack.frontend.url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def create(client: Any, *steps: Any, **more: Any) -> Any:
    options = {"model": MODEL, "max_tokens": 1000, "messages": HI, **more}
    return client.messages.create(extra_headers=script(*steps) if steps else {}, **options)


def test_an_answer_and_its_stream(client: Any) -> None:
    said = ["say", "héllo wörld 😀", 0.002]
    message = create(client, said)
    assert (message.content[0].text, message.stop_reason) == ("héllo wörld 😀", "end_turn")
    assert message._request_id
    with client.messages.stream(model=MODEL, max_tokens=1000, messages=HI, extra_headers=script(said)) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[0].text == message.content[0].text
    assert final.usage == message.usage
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


@pytest.mark.parametrize(
    ("fields", "error", "kind"),
    [
        ({"model": "nobody"}, anthropic.NotFoundError, "not_found_error"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error"),
        ({"steps": [["raise", 401, "who"]]}, anthropic.AuthenticationError, "authentication_error"),
        ({"steps": [["raise", 403, "not you"]]}, anthropic.PermissionDeniedError, "permission_error"),
        ({"steps": [["raise", 413, "long"]]}, anthropic.RequestTooLargeError, "request_too_large"),
        ({"steps": [["raise", 422, "no"]]}, anthropic.UnprocessableEntityError, "invalid_request_error"),
        ({"steps": [["raise", 429, "slow"]]}, anthropic.RateLimitError, "rate_limit_error"),
        ({"steps": [["raise", "Unknown", "x"]]}, anthropic.InternalServerError, "api_error"),
        ({"steps": [["raise", "WorkerUnavailable", "x"]]}, anthropic.ServiceUnavailableError, "overloaded_error"),
        ({"steps": [["raise", "ResponseTimeout", "x"]]}, anthropic.DeadlineExceededError, "timeout_error"),
        ({"steps": [["raise", "Overloaded", "x"]]}, anthropic.OverloadedError, "overloaded_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_each_class_of_error(client: Any, fields: dict[str, Any], error: Any, kind: str, stream: bool) -> None:
    steps = fields.get("steps", ())
    with pytest.raises(error) as caught:
        create(client, *steps, stream=stream, **{name: value for name, value in fields.items() if name != "steps"})
    assert type(caught.value) is error
    assert caught.value.body["error"]["type"] == kind
    assert caught.value.request_id == caught.value.body["request_id"]


def test_a_stream_that_fails_raises_the_error(client: Any) -> None:
    with (
        pytest.raises(anthropic.APIStatusError) as caught,
        client.messages.stream(
            model=MODEL,
            max_tokens=1000,
            messages=HI,
            extra_headers=script(["say", "half", 0.001], ["raise", "Unknown", "x"]),
        ) as stream,
    ):
        for _ in stream:
            pass
    assert caught.value.body["error"] == {"type": "api_error", "message": "Internal server error"}


def test_the_client_waits_as_long_as_an_overload_asks(stack: Stack) -> None:
    with anthropic.Anthropic(base_url=stack.frontend.url, api_key="none", max_retries=0) as client:
        raw = client.messages.with_raw_response
        with pytest.raises(anthropic.OverloadedError) as caught:
            raw.create(model=MODEL, max_tokens=9, messages=HI, extra_headers=script(["raise", "Overloaded", "full"]))
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_a_body_that_is_no_json_has_the_form_of_the_api(stack: Stack) -> None:
    for body, kind, status in ((b"{", "application/json", 400), (b"{}", "text/html", 415)):
        sent = urllib.request.Request(
            f"{stack.frontend.url}/v1/messages", body, {"content-type": kind, "anthropic-version": "2023-06-01"}
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(sent, timeout=PATIENCE_SECONDS)
        assert caught.value.code == status
        found = json.load(caught.value)
        assert found["error"]["type"] == "invalid_request_error"
        assert found["request_id"] == caught.value.headers["request-id"]


def test_a_refusal_of_the_listener_has_the_form_of_the_api(stack: Stack) -> None:
    sent = urllib.request.Request(
        f"{stack.frontend.url}/v1/messages", b"{}", {"anthropic-version": "2023-06-01", "x-long": "x" * 200_000}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(sent, timeout=PATIENCE_SECONDS)
    assert caught.value.code == 431
    assert json.load(caught.value)["error"]["type"] == "invalid_request_error"


async def test_a_client_that_leaves_stops_the_engine(stack: Stack, tag: str) -> None:
    headers = {**script(["say", "begin"], ["wait"]), "x-dynamo-meta-tag": tag}
    async with (
        anthropic.AsyncAnthropic(base_url=stack.frontend.url, api_key="none", max_retries=0) as client,
        client.messages.stream(model=MODEL, max_tokens=1000, messages=HI, extra_headers=headers) as stream,
    ):
        async for event in stream:
            if event.type == "text":
                break
    await stack.scripted.sees("stopped", tag)
