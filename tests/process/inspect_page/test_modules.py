"""The page's modules by themselves, in the browser that runs them: the filter against the server's, texts, the reader of events."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo.protocol.inspector.filters import FilterError, parse_filter
from support.browser import watched
from support.inspector_fake import a_stream, a_worker, fake_inspector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

NOW_MS = 1_800_000_000_000


@pytest.fixture(scope="module")
def module_page(browser: Browser) -> Iterator[Any]:
    with fake_inspector() as fake, watched(browser, fake.url.removesuffix("/inspect/")) as found:
        found.expected = ("status of 404",)  # the browser looks for an icon of the icon
        found.page.goto(fake.url + "icon.svg")  # of the same origin, with no application in it
        yield found.page


STREAMS = [
    a_stream("chatcmpl-52a1", started_ms=NOW_MS - 41_000, last_token_ms=NOW_MS - 20, is_stalled=False, key="team-a", served_by="cloud"),
    a_stream("chatcmpl-9c03", started_ms=NOW_MS - 3_000, last_token_ms=NOW_MS - 12_400, is_stalled=True, model="big model"),
    a_stream("cmpl-11de", started_ms=NOW_MS - 2_000, last_token_ms=None, phase="client slow", key=None, workers=[], attempt=2),
    a_stream("chatcmpl-52a2", client_request_id="MINE-52", is_streaming=False, workers=["7e9f", "7ea0"], prompt_tokens=None, started_ms=NOW_MS),
]  # fmt: skip
WORKERS = [
    a_worker("7e9f", silent_ms=NOW_MS - 20, since_ms=NOW_MS - 1000),
    a_worker("7ea0", state="quarantined", role="prefill", kv_blocks_used=97, queued=2, since_ms=None),
    a_worker("8000", kv_blocks_total=None, models=["a", "b"], kv_blocks_used=None, since_ms=NOW_MS),
]
WORDS = st.sampled_from(
    [
        "model:demo", "model:DEMO", 'model:"big model"', "model:*mo", "model:cloud", "fallback", "!fallback", "model:b*l", "key:team-a", "key:", "key:*", "worker:7e", "worker:7ea0",
        "id:chat", "id:52a1", "endpoint:/v1", "phase:decode", 'phase:"client slow"', "stalled", "!stalled", "STREAMING", "!model:demo",
        "age>30", "age>=2s", "age<0.05m", "age=41", "age>1k", "ttft<100ms", "silent>10", "in>=512", "in>0.5k", "in>1s", "out=190", "attempt>1",
        "n=1", "52a", "mine", '"52a1"', "!", "nosuch:1", "nosuch>1", "age>x", "age", "state:ready", "role:agg", "kv>80", "kv<=80", "queued>1",
        "running=3", "quarantined", "priority=0", "rate>47", 'a"b', "**", "model:*", "worker:*", "wire:m*x",
    ]
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(WORDS, max_size=4), which=st.sampled_from(["STREAMS", "WORKERS"]))
def test_the_page_filters_as_the_server_does(module_page: Any, words: list[str], which: str) -> None:
    rows: Any = STREAMS if which == "STREAMS" else WORKERS
    text = " ".join(words)
    found = module_page.evaluate(
        """async ([text, which, rows, now]) => {
            const filter = await import("/inspect/filter.js");
            const {matches, problem} = filter.compile(text, filter[which]);
            return {problem, matched: rows.filter((row) => matches(row, now)).map((row) => row.id)};
        }""",
        [text, which, json.loads(msgspec.json.encode(rows)), NOW_MS],
    )
    try:
        wanted = [row.id for row in rows if parse_filter(text).matches(row, NOW_MS)]
    except FilterError:
        assert found["problem"] is not None
        return
    # The server's fields are those of all kinds of rows; the page says which ones its rows have.
    if found["problem"] is None:
        assert found["matched"] == wanted
    else:
        assert "is not a f" in found["problem"]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("count(6210)", "6,210"), ("count(null)", "-"), ("count(0)", "0"), ("figure(41.23)", "41.2"), ("figure(0.038)", "0.04"),
        ("figure(6210.4)", "6,210"), ("share(0.0002)", "0.02 %"), ("share(0.84)", "84 %"), ("share(undefined)", "-"),
        ("duration(0.084)", "84 ms"), ("duration(1.24)", "1.24 s"), ("duration(185)", "3m 05s"), ("duration(7500)", "2h 05m"),
        ("duration(273600)", "3d 4h"), ("duration(0.0004)", "<1 ms"), ("duration(null)", "-"), ("age(1000, 42900)", "41 s"),
        ("age(5000, 1000)", "0 s"), ("bytes(1400000)", "1.4 MB"), ("ratio(1904, 4096)", "1,904/4,096"), ("ratio(5, null)", "5"),
        ("ratio(null, 5)", "-"), ("sampled(100, 3412)", "100 of 3,412"), ("sampled(3, 3)", "3"), ("line(null)", "-"),
        (r"line('a\nb\u202ec')", "a b\\u202ec"), ("clock(0)", "-"), ("columnsText([['a', 'bb'], ['ccc', 'd']], [false, true])", "a    bb\nccc   d"),
    ],
)  # fmt: skip
def test_values_as_text(module_page: Any, call: str, text: str) -> None:
    found = module_page.evaluate(
        "async (_) => { const {count, figure, share, duration, age, bytes, ratio, sampled, line, clock, columnsText} = await import('/inspect/text.js'); return "
        + call
        + "; }",
        None,
    )
    assert found == text


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 120), max_size=12))
def test_events_survive_any_split(module_page: Any, cuts: list[int]) -> None:
    wire = 'event: snapshot\r\nid: 7\r\ndata: {"a":\r\ndata: 1}\r\n\r\n: keep-alive\n\nevent: patch\nid: 8\ndata: x: y\n\ndata:no space\n\n'
    ends = sorted({min(cut, len(wire)) for cut in cuts} | {len(wire)})
    pieces = [wire[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    found = module_page.evaluate(
        """async (pieces) => { const {EventParser} = await import("/inspect/stream.js"); const parser = new EventParser();
        return pieces.flatMap((piece) => parser.feed(piece)); }""",
        pieces,
    )
    assert [(one["event"], one["id"], one["data"]) for one in found] == [
        ("snapshot", "7", '{"a":\n1}'),
        ("patch", "8", "x: y"),
        ("message", None, "no space"),
    ]


def test_a_patch_changes_what_it_names_and_nothing_else(module_page: Any) -> None:
    found = module_page.evaluate(
        """async () => { const {Store} = await import("/inspect/store.js"); const store = new Store();
        store.replace({seq: 1, taken_ms: 1000, fleet: {cluster: "a"}, models: [{id: "ns/a/b", n: 1}], streams: [{id: "x"}, {id: "y", n: 7, output_tokens: 1}]});
        store.apply({seq: 2, taken_ms: 2000, set: {"models/ns/a/b": {id: "ns/a/b", n: 2}, fleet: {cluster: "b"}, "nosuch/1": {}}, del: ["streams/x"], totals: {streams: 9}, progress: {y: {output_tokens: 3}, nosuch: {output_tokens: 1}}});
        store.freeze(); const frozen = store.now(); store.apply({seq: 3, taken_ms: 5000, set: {}, del: []});
        return [store.fleet.cluster, store.one("models", "ns/a/b").n, store.list("streams"), store.has("workers"),
                store.total("models"), Math.round(frozen / 1000), Math.round(store.now() / 1000)]; }"""
    )
    assert found == ["b", 2, [{"id": "y", "n": 7, "output_tokens": 3}], False, 1, 2, 5]


def test_a_link_out_of_the_page_and_a_handler_as_text_are_refused(module_page: Any) -> None:
    tries = module_page.evaluate(
        """async () => { const {h, render} = await import("/inspect/dom.js"); const node = document.createElementNS("http://www.w3.org/1999/xhtml", "div");
        const refused = []; const tries = [["a", {href: "javascript:alert(1)"}], ["a", {href: "//evil.example"}], ["a", {href: "https://evil.example"}],
            ["p", {onclick: "alert(1)"}], ["iframe", {srcdoc: "x"}], ["img", {src: "x"}], ["p", {style: "x"}], ["form", {action: "x"}]];
        for (const [tag, props] of tries) { try { render(node, [h(tag, props)]); } catch (error) { refused.push(error.name); } }
        return [refused.length, tries.length]; }"""
    )
    assert tries[0] == tries[1]


def test_rows_that_stay_keep_their_elements(module_page: Any) -> None:
    kept = module_page.evaluate(
        """async () => { const {h, render} = await import("/inspect/dom.js"); const list = document.createElementNS("http://www.w3.org/1999/xhtml", "ul");
        const show = (ids) => render(list, ids.map((id) => h("li", {key: id}, id)));
        const orders = [["a", "b", "c"], ["c", "a"], ["d", "c", "b", "a"], [], ["a"], ["b", "a", "c", "d", "e"], ["e", "d", "c"]];
        const seen = []; let elements = new Map();
        for (const ids of orders) { show(ids); const now = new Map([...list.children].map((node) => [node.textContent, node]));
            seen.push([...now.keys()].join() === ids.join() && [...now].every(([id, node]) => !elements.has(id) || elements.get(id) === node)); elements = now; }
        return seen; }"""
    )
    assert all(kept)
