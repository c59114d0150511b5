"""The page in a real browser, over a picture that the test writes."""

from __future__ import annotations

import json
import re
import shlex
import time
from typing import TYPE_CHECKING, Any

import pytest

from dynamo.protocol.inspector.views import CandidateView, ErrorGroup, RequestDetail, RoutingView
from support.browser import Watched, watched
from support.inspector_fake import (
    FakeInspector,
    a_cache,
    a_model,
    a_prefix,
    a_resident,
    a_stream,
    a_worker,
    an_event,
    fake_inspector,
    now_ms,
)
from support.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PATIENCE_MS = PATIENCE_SECONDS * 1000
VIEWS = (
    "fleet", "models", "workers", "streams", "recent", "routing", "prefixes", "errors", "batches", "keys", "playground",
    "config",
)  # fmt: skip
# Values of cards that lie over the label before them, or stick out of their cell.
OVERLAPPING = """(cells) => cells.filter((cell) => {
    if (!cell.offsetParent || !cell.dataset.label) return false;
    const pen = document.createElement("canvas").getContext("2d");
    pen.font = getComputedStyle(cell).font;
    const content = document.createRange();
    content.selectNodeContents(cell);
    const [box, value] = [cell.getBoundingClientRect(), content.getBoundingClientRect()];
    const parts = [...cell.querySelectorAll("*")].map((one) => one.getBoundingClientRect()).filter((one) => one.width);
    const left = Math.min(value.left, ...parts.map((one) => one.left));
    const right = Math.max(value.right, ...parts.map((one) => one.right));
    return left < box.left + pen.measureText(cell.dataset.label).width - 1 || right > box.right + 1;
}).map((cell) => `${cell.dataset.label}: ${cell.textContent}`)"""
NOT_HERE = "Failed to load resource: the server responded with a status of 40"  # the fake has no batches and no keys


def opened(page: Watched, fake: FakeInspector, hash: str = "") -> Any:
    """The page at an address, once it is live."""
    page.page.set_default_timeout(PATIENCE_MS)
    page.page.goto(fake.url + hash)
    page.page.locator(".top .state.ok").wait_for()
    return page.page


def until(page: Any, script: str) -> None:
    """Wait for a script to say yes; playwright's own way needs `eval`, which the page's policy forbids."""
    ends_at = time.monotonic() + PATIENCE_SECONDS
    while not page.evaluate(script):
        assert time.monotonic() < ends_at, f"waited in vain for {script}"
        page.wait_for_timeout(20)


def rows(page: Any) -> Any:
    return page.locator("main tbody tr[role=row]")


def until_rows(page: Any, count: int, *, filter: str) -> None:
    """Wait until a filter is in the address, and so many rows are drawn."""
    drawn = "document.querySelectorAll('main tbody tr[role=row]').length"
    page.wait_for_function(f"location.hash.endsWith('filter={filter}') && {drawn} === {count}")


def test_every_view_loads_under_the_policy_without_an_error(page: Watched, fake: FakeInspector) -> None:
    page.expected = (NOT_HERE,)
    shown = opened(page, fake)
    for view in VIEWS:
        shown.locator(f'nav a[href="#/{view}"]').click()
        shown.locator(f"main.view-{view} :is(h1, .card)").first.wait_for(state="attached")
        assert shown.locator("nav a[aria-current=page]").count() == 1
    answer = shown.request.get(fake.url)
    assert "default-src 'self'" in answer.headers["content-security-policy"]


def test_the_policy_stops_what_would_be_put_into_the_page(page: Watched, fake: FakeInspector) -> None:
    page.expected = ("assignment. The action has been blocked",)
    shown = opened(page, fake)
    script = "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
    with pytest.raises(Exception, match="TrustedScript"):
        shown.evaluate(script)
    with pytest.raises(Exception, match="TrustedHTML"):
        shown.evaluate("document.body.innerHTML = '<p>'")
    assert shown.evaluate("window.ran") is None


def test_a_row_appears_within_a_second_of_its_stream_and_goes_with_it(page: Watched, fake: FakeInspector) -> None:
    shown = opened(page, fake, "#/streams")
    shown.get_by_text("Nothing is in flight.").wait_for()
    fake.show("streams", a_stream("chatcmpl-52a1"))
    rows(shown).get_by_text("chatcmpl-52a1").wait_for(timeout=1000)
    fake.show("streams", a_stream("chatcmpl-52a1", output_tokens=191))
    rows(shown).get_by_text("191/1,024").wait_for(timeout=1000)
    fake.drop("streams", "chatcmpl-52a1")
    shown.get_by_text("Nothing is in flight.").wait_for(timeout=1000)


def test_the_filter_is_in_the_address_and_says_what_it_does_not_understand(page: Watched, fake: FakeInspector) -> None:
    fake.show("streams", a_stream("chatcmpl-1"), a_stream("chatcmpl-2", model="big", is_stalled=True))
    shown = opened(page, fake, "#/streams")
    shown.keyboard.press("/")
    shown.keyboard.type("model:big stalled")
    until_rows(shown, 1, filter="model%3Abig%20stalled")  # while it is typed it holds for others, or for none
    shown.reload()
    shown.locator(".top .state.ok").wait_for()
    until_rows(shown, 1, filter="model%3Abig%20stalled")
    shown.locator("#filter").fill("colour:red")
    shown.get_by_role("alert").get_by_text("colour is not a field; there are id, model").wait_for()
    until_rows(shown, 2, filter="colour%3Ared")


def test_a_deep_link_opens_its_stream_and_back_leads_to_the_list(page: Watched, fake: FakeInspector) -> None:
    fake.show("streams", a_stream("cmpl/odd id?#1"), a_stream("chatcmpl-2"))
    shown = opened(page, fake, "#/streams/chatcmpl-2")
    shown.get_by_role("heading", name="chatcmpl-2").wait_for()
    shown.keyboard.press("Escape")
    rows(shown).get_by_text("cmpl/odd id?#1").click()
    shown.get_by_role("heading", name="cmpl/odd id?#1").wait_for()
    shown.go_back()
    rows(shown).first.wait_for()


def test_a_thousand_streams_take_at_most_a_frame_for_each_patch(page: Watched, fake: FakeInspector) -> None:
    fake.show("streams", *[a_stream(f"chatcmpl-{n:04x}", output_tokens=n) for n in range(1000)])
    shown = opened(page, fake, "#/streams")
    shown.get_by_text("1,000", exact=True).first.wait_for()
    assert rows(shown).count() < 100
    shown.evaluate(
        """window.taken = []; new PerformanceObserver((list) => window.taken.push(...list.getEntries()))
        .observe({entryTypes: ["measure"]})"""
    )
    for turn in range(20):
        fake.show("streams", *[a_stream(f"chatcmpl-{n:04x}", output_tokens=n + turn) for n in range(1000)])
        until(shown, f"window.taken.filter((one) => one.detail === 'patch').length > {turn}")
    taken = shown.evaluate("window.taken.filter((one) => one.detail === 'patch').map((one) => one.duration)")
    median = sorted(taken)[len(taken) // 2]
    print(f"1,000 streams, all changed: {min(taken):.1f} to {max(taken):.1f} ms a patch, in the middle {median:.1f} ms")
    # Of the wall's time: a machine that does other things as well makes some of them long, and none short.
    assert min(taken) <= 16


def test_all_of_a_thousand_rows_can_be_reached_by_the_keyboard(page: Watched, fake: FakeInspector) -> None:
    fake.show("streams", *[a_stream(f"chatcmpl-{n:04d}", started_ms=fake.started_ms + n) for n in range(1000)])
    shown = opened(page, fake, "#/streams")
    shown.keyboard.press("ArrowDown")
    shown.keyboard.press("ArrowDown")
    selected = shown.locator("tr[aria-selected=true]")
    selected.get_by_text("chatcmpl-0000").wait_for()
    shown.keyboard.press("End")
    selected.get_by_text("chatcmpl-0999").wait_for()
    assert selected.bounding_box()["y"] < 900
    shown.keyboard.press("Enter")
    shown.get_by_role("heading", name="chatcmpl-0999").wait_for()


def test_the_page_works_by_keys_alone(page: Watched, fake: FakeInspector) -> None:
    page.expected = (NOT_HERE,)
    fake.show("streams", a_stream("chatcmpl-52a1"))
    shown = opened(page, fake)
    for letter, view in (("m", "models"), ("w", "workers"), ("o", "routing"), ("c", "config"), ("s", "streams")):
        shown.keyboard.press("g")
        shown.keyboard.press(letter)
        shown.locator(f"main.view-{view}").wait_for()
    shown.keyboard.press("?")
    shown.get_by_role("dialog").get_by_text("abort it").wait_for()
    shown.keyboard.press("Escape")
    shown.get_by_role("dialog").wait_for(state="detached")
    shown.keyboard.press("/")
    assert shown.evaluate("document.activeElement.id") == "filter"
    shown.keyboard.press("Escape")  # out of the filter, to the table
    shown.keyboard.press("j")
    shown.keyboard.press("a")
    dialog = shown.get_by_role("dialog")
    dialog.get_by_text("Abort request chatcmpl-52a1?").wait_for()
    shown.keyboard.type("too slow")
    shown.keyboard.press("Tab")
    shown.keyboard.type("52a1")
    shown.keyboard.press("Enter")
    shown.get_by_text("The server has accepted it.").first.wait_for()
    assert fake.posts == [("/admin/v1/requests/chatcmpl-52a1/abort", {"reason": "too slow"})]


def test_tab_reaches_every_link_filter_heading_and_button_in_order(page: Watched, fake: FakeInspector) -> None:
    fake.show("streams", a_stream("chatcmpl-52a1"))
    shown = opened(page, fake, "#/streams")
    shown.evaluate("document.activeElement.blur()")
    seen = []
    for _ in range(60):
        shown.keyboard.press("Tab")
        seen.append(
            shown.evaluate(
                "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent || document.activeElement.id"
            )
        )
        if seen[-1] == "Abort chatcmpl-52a1":
            break
    order = ["Copy", "Light or dark", "Keys", "Fleet", "Streams", "filter", "Streams", "Request", "Abort chatcmpl-52a1"]
    at = -1
    for wanted in order:
        at = next((place for place in range(at + 1, len(seen)) if seen[place].startswith(wanted)), -1)
        assert at >= 0, (wanted, seen)


def test_nothing_is_aborted_before_the_end_of_the_id_is_typed(page: Watched, fake: FakeInspector) -> None:
    fake.show("streams", a_stream("chatcmpl-52a1"))
    shown = opened(page, fake, "#/streams/chatcmpl-52a1")
    shown.get_by_role("button", name="Abort chatcmpl-52a1").click()
    sure = shown.get_by_role("button", name="Abort it")
    assert sure.is_disabled()
    shown.locator("dialog input[name=typed]").fill("52a")
    shown.keyboard.press("Enter")
    assert sure.is_disabled()
    shown.keyboard.press("Escape")
    shown.get_by_role("dialog").wait_for(state="detached")
    assert fake.posts == []


@pytest.mark.parametrize(("read_only", "role"), [(True, "admin"), (False, "viewer")])
def test_who_may_not_act_sees_no_buttons(page: Watched, fake: FakeInspector, read_only: bool, role: str) -> None:
    fake.read_only, fake.role = read_only, role
    fake.show("streams", a_stream("chatcmpl-52a1"))
    shown = opened(page, fake, "#/streams")
    rows(shown).get_by_text("chatcmpl-52a1").wait_for()
    assert shown.get_by_role("button", name="Abort").count() == 0
    rows(shown).first.click()
    shown.get_by_role("heading", name="chatcmpl-52a1").wait_for()
    assert shown.get_by_role("button", name="Abort").count() == 0


def test_a_worker_is_drained_and_another_taken_back(page: Watched, fake: FakeInspector) -> None:
    shown = opened(page, fake, "#/workers")
    for name, typed in (("Drain it: 7e9f", "7e9f"), ("Take it back: 7ea0", "7ea0")):
        shown.get_by_role("button", name=name).click()
        shown.locator("dialog input[name=typed]").fill(typed)
        shown.keyboard.press("Enter")
        shown.get_by_role("dialog").wait_for(state="detached")
    # A notice is also in the live region, so only banners tell how many there are.
    shown.locator(".banner").filter(has_text="The server has accepted it.").nth(1).wait_for()
    assert [path for path, _ in fake.posts] == ["/admin/v1/workers/7e9f/drain", "/admin/v1/workers/7ea0/undrain"]


def test_a_lost_connection_is_said_and_its_figures_stand_still(page: Watched, fake: FakeInspector) -> None:
    page.expected = ("ERR_",)
    fake.show("streams", a_stream("chatcmpl-52a1"))
    shown = opened(page, fake, "#/streams")
    fake.stop()
    shown.get_by_text("Connection lost").first.wait_for()
    shown.get_by_text("These figures are of").wait_for()
    shown.get_by_text("not connected").wait_for()
    ages = rows(shown).locator("td[data-label=Age]")
    before = ages.inner_text()
    until(shown, "/Connection lost [3-9] s ago/.test(document.body.textContent)")
    assert ages.inner_text() == before
    fake.start()
    shown.locator(".top .state.ok").wait_for()
    shown.get_by_text("Connected again after").first.wait_for()
    assert shown.get_by_text("was restarted").count() == 0


def test_a_restart_of_the_server_is_said_and_the_page_goes_on(page: Watched, fake: FakeInspector) -> None:
    page.expected = ("ERR_",)
    fake.show("streams", a_stream("chatcmpl-before"))
    shown = opened(page, fake, "#/streams")
    rows(shown).get_by_text("chatcmpl-before").wait_for()
    fake.stop()
    shown.get_by_text("Connection lost").first.wait_for()
    fake.restart()
    shown.get_by_text("The server was restarted at").first.wait_for()
    shown.get_by_text("Nothing is in flight.").wait_for()
    fake.show("streams", a_stream("chatcmpl-after"))
    rows(shown).get_by_text("chatcmpl-after").wait_for()


def test_a_sampled_list_and_a_missing_member_are_said(page: Watched, fake: FakeInspector) -> None:
    fake.totals, fake.partial = {"streams": 3412}, ["10.0.0.7:8001"]
    fake.show("streams", *[a_stream(f"chatcmpl-{n}") for n in range(100)])
    shown = opened(page, fake, "#/streams")
    shown.get_by_text("100 of 3,412").wait_for()
    shown.get_by_text("Did not answer in time: 10.0.0.7:8001").wait_for()
    shown.locator("#filter").fill("model:demo")  # of rows that were not sent, too: the server has to look
    while "filter=model%3Ademo" not in fake.watched[-1]:
        shown.wait_for_timeout(20)


def test_what_is_not_known_is_a_dash(page: Watched, fake: FakeInspector) -> None:
    fake.show(
        "streams",
        a_stream("chatcmpl-1", ttft_seconds=None, last_token_ms=None, tokens_per_second=None, prompt_tokens=None),
    )
    shown = opened(page, fake, "#/streams")
    for column in ("TTFT", "Last", "Tok/s", "In/cached", "Key", "Unsent"):
        assert rows(shown).locator(f'td[data-label="{column}"]').inner_text() == "-"


def test_the_key_is_taken_from_the_address_once(browser: Browser) -> None:
    with fake_inspector(key="s3cret") as fake, watched(browser, fake.url.removesuffix("/inspect/")) as page:
        shown = opened(page, fake, "#k=s3cret")
        assert "s3cret" not in shown.url
        assert shown.evaluate("[sessionStorage.length, document.cookie]") == [0, ""]
        shown.go_back()
        assert "s3cret" not in shown.url


def test_the_key_is_asked_for_once_and_kept_only_on_wish(browser: Browser) -> None:
    with fake_inspector(key="s3cret") as fake, watched(browser, fake.url.removesuffix("/inspect/")) as page:
        page.expected = ("status of 401",)
        shown = page.page
        shown.set_default_timeout(PATIENCE_MS)
        shown.goto(fake.url)
        shown.locator("dialog input[name=key]").fill("wrong")
        shown.keyboard.press("Enter")
        shown.get_by_text("The server does not know this key").wait_for()
        shown.locator("dialog input[name=key]").fill("s3cret")
        shown.keyboard.press("Enter")
        shown.locator(".top .state.ok").wait_for()
        assert shown.evaluate("sessionStorage.length") == 0
        shown.reload()
        shown.locator("dialog input[name=key]").fill("s3cret")
        shown.locator("dialog input[name=keep]").check()
        shown.get_by_role("button", name="Use this key").click()
        shown.locator(".top .state.ok").wait_for()
        shown.reload()
        shown.locator(".top .state.ok").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_every_view_fits_its_screen(browser: Browser, fake: FakeInspector, scheme: Any, width: int) -> None:
    fake.show(
        "streams",
        *[a_stream(f"chatcmpl-{n:032x}", model="a-rather/long-name-of-a-model-8B-Instruct") for n in range(60)],
    )
    fake.show(
        "models",
        a_model("a-rather/long-name-of-a-model-8B-Instruct", is_ready=False, why_not="there is no prefill worker"),
    )
    fake.show("events", *[an_event(f"{n}", "worker 7e9f joined " * 5) for n in range(30)])
    long_name = "a-rather/long-name-of-a-model-8B-Instruct"
    fake.show("caches", a_cache("7e9f", model=long_name), a_cache("7ea0", blocks_known=None, history=[]))
    fake.show("prefixes", a_prefix("8f00aa1131cc90fe", model=long_name, holders=["694d9a3c5d8f7e9f"] * 6))
    fake.show("residents", a_resident(long_name, state="failed", why="exited with 1: there is a hole in the weights"))
    size = {"width": width, "height": 800}
    with watched(browser, fake.url.removesuffix("/inspect/"), viewport=size, color_scheme=scheme) as page:
        page.expected = (NOT_HERE,)
        shown = opened(page, fake)
        ground = shown.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", ground)[:3])) < 60) is (scheme == "dark")
        for view in (*VIEWS, "streams/chatcmpl-" + f"{3:032x}", "workers/7e9f"):
            shown.goto(f"{fake.url}#/{view}")
            shown.locator("main :is(h1, .card)").first.wait_for(state="attached")
            wide = shown.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            assert wide[0] <= wide[1], view
            if width == 400:  # no value of a card lies over its neighbour
                assert shown.locator("tbody tr[role=row] td").evaluate_all(OVERLAPPING) == [], view
        shown.goto(f"{fake.url}#/streams")
        rows(shown).first.wait_for()
        label = rows(shown).first.locator("td").nth(2).evaluate("(cell) => getComputedStyle(cell, '::before').content")
        assert (label == '"Model"') is (width == 400)  # cards name their figures themselves


@pytest.mark.parametrize("width", [1280, 1440])
def test_the_tables_fit_the_screen_of_a_laptop(browser: Browser, fake: FakeInspector, width: int) -> None:
    fake.show("workers", *[a_worker(f"{number:x}" * 12) for number in range(1, 5)])
    fake.show("streams", *[a_stream(f"chatcmpl-{number:036d}") for number in range(5)])
    fake.show("models", a_model("m"))
    fake.show("residents", a_resident("m", why="exited with 1: there is a hole in the weights"))
    with watched(browser, fake.url.removesuffix("/inspect/"), viewport={"width": width, "height": 900}) as page:
        for view in ("models", "workers", "streams", "recent"):
            shown = opened(page, fake, f"#/{view}")
            until(shown, "document.querySelectorAll('main table, main .empty').length > 0")
            cut = shown.evaluate(
                "[...document.querySelectorAll('.table')].map((one) => one.scrollWidth - one.clientWidth).filter((by) => by > 2)"
            )
            assert cut == [], (view, cut)


def test_the_models_on_demand_are_shown_with_their_memory_and_what_waits(page: Watched, fake: FakeInspector) -> None:
    shown = opened(page, fake, "#/models")
    assert shown.get_by_role("heading", name="On demand").count() == 0  # this frontend loads none on demand
    fake.budget_bytes = 1_500_000_000
    failed = a_resident("b", state="failed", why="the weights have a hole", taken_bytes=None, running=0, waiting=7)
    fake.show("residents", a_resident("demo", taken_bytes=900_000_000), failed)
    shown.reload()
    panel = shown.locator(".panel", has=shown.get_by_role("heading", name="On demand"))
    panel.get_by_text("900.0 MB in memory of 1.5 GB").wait_for()
    other, loaded = panel.locator("tbody tr[role=row]").all()
    texts = [row.text_content() or "" for row in (loaded, other)]
    assert [text for text in ("loaded", "900.0 MB", "pinned", "coding") if text not in texts[0]] == []
    assert [text for text in ("failed", "7", "the weights have a hole") if text not in texts[1]] == []
    assert shown.locator(".strip .one", has_text="models").text_content() == "models900.0 MB"
    loaded.click(position={"x": 3, "y": 8})
    shown.locator("main .head h1", has_text="demo").wait_for()


def test_light_and_dark_can_be_turned_and_stay(page: Watched, fake: FakeInspector) -> None:
    shown = opened(page, fake)
    before = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    shown.keyboard.press("t")
    until(shown, f"getComputedStyle(document.body).backgroundColor !== '{before}'")
    shown.reload()
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_a_view_is_copied_as_text(browser: Browser, fake: FakeInspector) -> None:
    fake.show("streams", a_stream("chatcmpl-1"), a_stream("chatcmpl-2", is_stalled=True))
    origin = fake.url.removesuffix("/inspect/")
    with watched(browser, origin, permissions=["clipboard-read", "clipboard-write"]) as page:
        shown = opened(page, fake, "#/streams")
        shown.keyboard.press("y")
        shown.get_by_text("Copied this view as text.").first.wait_for()
        copied = shown.evaluate("navigator.clipboard.readText()")
    lines = copied.splitlines()
    assert lines[0].startswith("Streams, test, 2")
    assert "#/streams" in lines[1]
    assert re.match(r"Request +Key +Model", lines[3])
    assert any(line.startswith("chatcmpl-2") and "decode STALLED" in line for line in lines)


def test_a_worker_with_trouble_is_named_in_words(page: Watched, fake: FakeInspector) -> None:
    fake.show("workers", a_worker("7ea2", state="draining", note="leaves in 24s"))
    shown = opened(page, fake)
    tiles = shown.locator(".tile")
    assert "quarantined" in tiles.nth(1).inner_text()
    assert "draining" in tiles.nth(2).inner_text()
    assert "leaves in 24s" in tiles.nth(2).inner_text()


def test_a_request_is_copied_as_a_command_that_a_shell_reads(browser: Browser, fake: FakeInspector) -> None:
    stream = a_stream("chatcmpl-1", endpoint="chat_completions", model='it\'s `a` "model" $HOME')
    fake.show("streams", stream)
    parameters = {"temperature": 0.7, "stop": ["'; rm -rf /"]}
    fake.detail = lambda: RequestDetail(stream=stream, parameters=parameters)
    origin = fake.url.removesuffix("/inspect/")
    with watched(browser, origin, permissions=["clipboard-read", "clipboard-write"]) as page:
        shown = opened(page, fake, "#/streams/chatcmpl-1")
        shown.get_by_text("0.7").wait_for()
        shown.get_by_role("button", name="Copy as curl").click()
        shown.get_by_text("Copied a curl command").first.wait_for()
        words = shlex.split(shown.evaluate("navigator.clipboard.readText()"))
    assert words[:2] == ["curl", f"{origin}/v1/chat/completions"]
    message = {"messages": [{"role": "user", "content": "PROMPT"}], "stream": True}
    assert json.loads(words[-1]) == {"model": stream.model, **parameters, **message}


def test_a_bundle_is_downloaded_as_it_came(page: Watched, fake: FakeInspector) -> None:
    bundle = {"id": "chatcmpl-1", "attempts": [{"worker": "7e9f", "text": "<b>"}]}
    fake.answers["/admin/v1/errors/chatcmpl-1"] = lambda: (200, bundle)
    fake.lists["errors"]["g1"] = ErrorGroup(
        id="g1", status=500, code="engine_error", model="demo", worker="7e9f", message="it failed at <n>", count=3,
        per_minute=0.1, first_ms=now_ms(), last_ms=now_ms(), example="chatcmpl-1",
    )  # fmt: skip
    shown = opened(page, fake, "#/errors")
    rows(shown).get_by_text("it failed at <n>").click()
    with shown.expect_download() as download:
        shown.get_by_role("button", name="Download the bundle").click()
    assert download.value.suggested_filename == "chatcmpl-1.json"
    assert json.loads(download.value.path().read_text()) == bundle


def test_what_if_shows_every_candidate_and_sends_no_request(page: Watched, fake: FakeInspector) -> None:
    page.expected = (NOT_HERE,)
    answer = RoutingView(
        id="x", request_id=None, model="demo", stage="decode", at_ms=now_ms(), policy="kv", decided_by="lowest cost",
        candidates=[CandidateView(worker="7e9f", cost=53.1, is_chosen=True), CandidateView(worker="7ea0", left_out="quarantined")],
        candidates_in_all=2,
    )  # fmt: skip
    fake.answers["/admin/v1/routing/explain"] = lambda: (200, answer)
    shown = opened(page, fake, "#/routing")
    shown.locator(".what-if textarea").fill("where to?")
    shown.get_by_role("button", name="Explain").click()
    assert "53.1" in shown.locator(".decision .is-chosen").inner_text()
    assert "left out: quarantined" in shown.locator(".decision .is-out").inner_text()
    shown.locator(".what-if select").nth(1).select_option("token_ids")
    shown.locator(".what-if textarea").fill("1, 2 x")
    shown.get_by_role("button", name="Explain").click()
    shown.get_by_role("alert").get_by_text("the 3. token id is not a whole number").wait_for()
    asked = {"model": "demo", "messages": [{"role": "user", "content": "where to?"}]}
    assert fake.posts == [("/admin/v1/routing/explain", asked)]


def test_an_address_that_leads_nowhere_is_said(page: Watched, fake: FakeInspector) -> None:
    shown = opened(page, fake, "#/nonsense/%zz")
    shown.get_by_text('There is no view "nonsense".').wait_for()
    for key in ("y", "?", "Escape", "Escape"):
        shown.keyboard.press(key)
    shown.goto(fake.url + "#/workers/nobody")
    shown.get_by_text("There is no worker nobody now.").wait_for()


def test_a_viewer_too_many_is_told_so(page: Watched, fake: FakeInspector) -> None:
    page.expected = ("status of 429",)
    text = "8 viewers watch this frontend, and more may not"
    fake.answers["/admin/v1/watch"] = lambda: (429, {"message": text, "code": "too_many_viewers"})
    page.page.goto(fake.url)
    page.page.get_by_text(text).wait_for()
    del fake.answers["/admin/v1/watch"]
    page.page.locator(".top .state.ok").wait_for()
