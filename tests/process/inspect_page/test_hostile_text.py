"""What clients and workers name and say is shown as text: nothing of it runs, paints, or leads elsewhere."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dynamo.protocol.inspector.views import (
    AttemptView,
    CacheView,
    CandidateView,
    ErrorGroup,
    EventView,
    FallbackView,
    FrontendView,
    ModelView,
    PrefixView,
    RecentView,
    RequestDetail,
    ResidentView,
    RoutingView,
    SettingView,
    StreamView,
    WorkerView,
)
from support.browser import watched
from support.inspector_fake import FakeInspector, now_ms
from support.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CORPUS = (
    "<script>window.ran='script'</script>",
    "<img src=x onerror=\"window.ran='img'\">",
    "\"><svg onload=window.ran='svg'>",
    "<iframe srcdoc=\"<script>parent.ran='iframe'</script>\">",
    "javascript:window.ran='url'",
    "<a href=javascript:window.ran=1>click</a>",
    "';window.ran='quote';//",
    "${window.ran='template'}{{constructor.constructor('window.ran=1')()}}",
    "</textarea></style></title><script>window.ran='out'</script>",
    "<style>*{display:none!important}</style>",
    "<base href=https://evil.example/>",
    "<form action=https://evil.example/><input type=submit></form>",
    "\x1b[31mred\x1b]0;title\x07\x9b31m",
    "abc\u202egnp.exe\u2066\u200b\ufeff",
    "\U0001f600 \u0301\u0302 \u5b57",
    "../../../etc/passwd?#/streams&k=stolen",
    "%3Cscript%3Ewindow.ran=1%3C/script%3E",
    "__proto__",
    "a" * 5000,
    "line one\r\nline two\tafter a tab\x00end",
)
BREAKERS = (
    "script",
    "img",
    "iframe",
    "object",
    "embed",
    "base",
    "style",
    "form[action]",
    "link[href^=http]",
    "svg[onload]",
)
ESCAPES = ("\\u001b[31mred", "\\u202egnp.exe", "\\u0000end")
KINDS = {
    "frontends": FrontendView, "models": ModelView, "residents": ResidentView, "workers": WorkerView, "streams": StreamView, "recent": RecentView,
    "routing": RoutingView, "caches": CacheView, "prefixes": PrefixView, "errors": ErrorGroup, "events": EventView,
}  # fmt: skip


def hostile(kind: type[Any], text: str, number: int) -> Any:
    """A record whose every text is the same attack, in lists and maps, too."""

    def value(hint: Any, name: str) -> Any:
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if name == "id":
            return f"{number}{text}"
        if args and type(None) in args:
            return value(next(one for one in args if one is not type(None)), name)
        if hint is str or hint is Any:
            return text
        if hint is bool:
            return False
        if hint is int:
            return now_ms() - 1000 if name.endswith("_ms") else 1
        if hint is float:
            return 0.5
        if origin is list:
            return [value(args[0], name)]
        if origin is dict:
            return {text: value(args[1], name)}
        if origin is tuple:
            return tuple(value(arg, name) for arg in args)
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return hostile(hint, text, number)
        raise AssertionError(f"a value for {hint}")

    hints = typing.get_type_hints(kind)
    return kind(**{name: value(hint, name) for name, hint in hints.items()})


@pytest.fixture
def attacked(fake: FakeInspector) -> FakeInspector:
    for view, kind in KINDS.items():
        entries = [hostile(kind, text, number) for number, text in enumerate(CORPUS)]
        fake.lists[view] = {entry.id: entry for entry in entries}
    fake.partial = list(CORPUS[:3])
    fake.answers["/admin/v1/config"] = lambda: (200, [hostile(SettingView, text, 0) for text in CORPUS])
    fake.answers["/v1/models"] = lambda: (200, {"data": [{"id": text} for text in CORPUS]})
    fake.answers["/v1/batches"] = lambda: (
        200,
        {"data": [{"id": text, "status": text, "endpoint": text} for text in CORPUS]},
    )
    fake.answers["/admin/usage"] = lambda: (200, {"data": [{"key": text, text: 1, "requests": 1} for text in CORPUS]})
    owners = [{"owner": text, "used": number} for number, text in enumerate(CORPUS)]
    bound = {"name": CORPUS[0], "unit": CORPUS[1], "limit": 9, "used": 9, "owner_limit": 4, "owners": owners}
    fake.answers["/admin/shares"] = lambda: (200, {"data": [bound]})
    return fake


def judge(page: Any, where: str) -> None:
    assert page.evaluate("window.ran") is None, where
    for breaker in BREAKERS:
        assert page.locator(f"#app {breaker}, #dialogs {breaker}").count() == 0, (where, breaker)
    links = page.locator("#app a").evaluate_all("(found) => found.map((one) => one.getAttribute('href'))")
    assert all(link.startswith("#") for link in links), where
    assert page.locator("#app nav").is_visible(), where
    controls = page.evaluate(
        r"/[\u0000-\u0008\u000e-\u001f\u0080-\u009f\u202a-\u202e\u2066-\u2069]/.test(document.getElementById('app').textContent)"
    )
    assert controls is False, where


@pytest.mark.parametrize("width", [400, 1600])
def test_no_view_takes_an_attack_for_more_than_text(browser: Browser, attacked: FakeInspector, width: int) -> None:
    origin = attacked.url.removesuffix("/inspect/")
    with watched(browser, origin, viewport={"width": width, "height": 900}) as found:
        page = found.page
        page.set_default_timeout(PATIENCE_SECONDS * 1000)
        page.on("dialog", lambda dialog: found.errors.append(f"a dialog: {dialog.message}"))
        page.goto(attacked.url)
        page.locator(".top .state.ok").wait_for()
        for view in (*KINDS, "batches", "keys", "playground", "config", "fleet"):
            if view in ("frontends", "residents", "caches", "events"):  # parts of other views
                continue
            page.goto(f"{attacked.url}#/{view}")
            page.locator(f"main.view-{view}").wait_for()
            page.wait_for_timeout(100)
            judge(page, view)
            if view not in ("fleet", "playground", "keys"):
                shown = page.locator("main").text_content() or ""
                assert "<script>window.ran" in shown, view
                assert any(escape in shown for escape in ESCAPES), view
            if view == "keys":
                page.get_by_role("heading", name="Shares").wait_for()
            if width == 1600:
                page.keyboard.press("?")
                page.get_by_role("dialog").wait_for()
                page.keyboard.press("Escape")


@pytest.mark.parametrize("number", range(len(CORPUS)))
def test_no_page_of_one_entry_takes_an_attack_for_more_than_text(
    browser: Browser, attacked: FakeInspector, number: int
) -> None:
    text = CORPUS[number]
    stream = list(attacked.lists["streams"].values())[number]
    detail = RequestDetail(
        stream=stream, timeline=[(text, now_ms() - 5000, now_ms() - 1000), ("decode", now_ms() - 1000, None)],
        routing=[hostile(RoutingView, text, 0)], fallbacks=[hostile(FallbackView, text, 0)], attempts=[hostile(AttemptView, text, 0)], parameters={text: text, "stop": [text]},
        token_rates=[1.0, 2.0], events=[hostile(EventView, text, 0)], content={text: text},
    )  # fmt: skip
    assert hostile(CandidateView, text, 0).worker == text
    origin = attacked.url.removesuffix("/inspect/")
    with watched(browser, origin) as found:
        found.expected = ("status of 404",)
        page = found.page
        page.set_default_timeout(PATIENCE_SECONDS * 1000)
        page.on("dialog", lambda dialog: found.errors.append(f"a dialog: {dialog.message}"))
        attacked.detail = lambda: detail
        attacked.answers[f"/admin/v1/errors/{text}"] = lambda: (200, {text: text, "lines": [text]})
        page.goto(attacked.url)
        page.locator(".top .state.ok").wait_for()
        for view in ("streams", "workers", "models", "errors"):
            page.goto(f"{attacked.url}#/{view}")
            row = page.locator("main tbody tr[role=row]").nth(number)
            row.click(position={"x": 3, "y": 8})
            page.locator("main .head a", has_text="←").first.wait_for()
            page.wait_for_timeout(150)
            judge(page, view)
            if view in ("streams", "workers"):
                page.get_by_role("button", name="Abort" if view == "streams" else "Drain").first.click()
                page.get_by_role("dialog").wait_for()
                judge(page, f"the dialog of {view}")
                page.keyboard.press("Escape")


@pytest.mark.parametrize("is_failing", [False, True])
def test_no_answer_in_the_playground_is_more_than_text(browser: Browser, fake: FakeInspector, is_failing: bool) -> None:
    origin = fake.url.removesuffix("/inspect/")
    with watched(browser, origin) as found:
        page = found.page
        page.set_default_timeout(PATIENCE_SECONDS * 1000)
        page.on("dialog", lambda dialog: found.errors.append(f"a dialog: {dialog.message}"))
        fake.answers["/v1/models"] = lambda: (200, {"data": [{"id": "demo"}]})
        page.goto(f"{fake.url}#/playground")
        page.locator(".top .state.ok").wait_for()
        page.locator("#prompt").wait_for()
        page.get_by_text("Parameters").wait_for()
        for text in CORPUS:
            top = [{"token": text, "logprob": -0.5}]
            call = {"index": 0, "function": {"name": text, "arguments": text}}
            delta = {"content": text, "reasoning_content": text, "tool_calls": [call]}
            logprobs = {"content": [{"token": text, "logprob": -3.0, "top_logprobs": top}]}
            chunk = {"choices": [{"delta": delta, "logprobs": logprobs, "finish_reason": text}]}
            fake.event_streams["/v1/chat/completions"] = (
                [chunk, {"error": {"message": text, "code": text}}] if is_failing else [chunk]
            )
            page.locator("#prompt").fill(text)
            page.get_by_role("button", name="Send").click()
            answer = page.locator(".said.assistant").last
            (answer.get_by_role("alert") if is_failing else answer.get_by_text("finish:")).wait_for()
            page.get_by_text("Raw request and events").click()
            judge(page, text)
            assert "<script" not in text or "<script" in (answer.text_content() or "")
            page.get_by_role("button", name="Clear").click()
