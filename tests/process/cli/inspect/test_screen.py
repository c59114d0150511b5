"""The live screen, by its keys, over a server on a real socket."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.cli.inspect import app as app_module
from dynamo.cli.inspect import client as client_module
from dynamo.cli.inspect.app import InspectorApp
from dynamo.cli.inspect.client import WatchState
from dynamo.cli.inspect.printable import printable
from dynamo.cli.inspect.screens import PAGES, page_named
from dynamo.cli.inspect.store import patched
from dynamo.cli.inspect.tables import FORMS
from dynamo.cli.inspect.widgets import TableView
from dynamo.protocol.inspector.views import Patch, Picture, StreamProgress, StreamView
from support.cases import each_case
from support.inspector_pictures import DETAIL, FLEET, NOW_MS, ROUTING, STREAMS, WORKERS, demo_picture, many_streams
from support.inspector_server import InspectorServer, inspector_server
from support.properties import examples
from support.terminal_screen import TerminalScreen, terminal_screen

SNAPSHOTS = Path(__file__).parent / "snapshots"
SIZES = ((80, 24), (200, 60))


@pytest.fixture(autouse=True)
def still_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The server's clock stands still, in UTC, and a lost server is tried again at once."""
    monkeypatch.setattr(InspectorApp, "now_ms", NOW_MS)
    monkeypatch.setattr(app_module, "STALE_SECONDS", 1e9)
    monkeypatch.setattr(client_module, "FIRST_DELAY_SECONDS", 0.02)
    monkeypatch.setattr(client_module, "LONGEST_DELAY_SECONDS", 0.02)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def server() -> Iterator[InspectorServer]:
    with inspector_server(demo_picture(), detail=DETAIL, explained=ROUTING[0]) as found:
        yield found


@pytest.fixture
async def screen(server: InspectorServer) -> AsyncIterator[TerminalScreen]:
    async with terminal_screen(server) as found:
        await found.shows("─ Streams 3, 1 stalled")
        yield found


# -- what each page looks like -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_the_pages(server: InspectorServer, width: int, height: int) -> None:
    async with terminal_screen(server, width, height) as screen:
        for page in PAGES:
            await screen.press(page.key)
            words = ("demo-cluster", *(words_of(view) for view in page.tables))
            await screen.shows_snapshot(SNAPSHOTS / f"{page.name}-{width}x{height}.txt", *words)


def words_of(view: str) -> str:
    """What the title of a table says once its rows are there."""
    count = len(getattr(demo_picture(), view))
    return f"{FORMS[view].title} {count}"


@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_a_request(server: InspectorServer, width: int, height: int) -> None:
    async with terminal_screen(server, width, height) as screen:
        await screen.shows("Streams 3")
        await screen.press("down", "enter")
        await screen.shows_snapshot(SNAPSHOTS / f"request-{width}x{height}.txt", "─ Timeline")
        await screen.press("end")
        await screen.shows("text is not shown")


async def test_the_help_names_every_key_of_the_app(screen: TerminalScreen) -> None:
    await screen.press("question_mark")
    text = await screen.shows("─ Keys")
    named = {"slash": "/", "comma": ",", "colon": ":", "question_mark": "?", "escape": "Esc"}
    await screen.press("end")
    text += screen.text
    for key, _, _ in cast("list[tuple[str, str, str]]", InspectorApp.BINDINGS):
        assert f" {named.get(key, key)} " in text


# -- a walk by keyboard alone ------------------------------------------------------------------------------------------


async def test_a_walk_by_keyboard(screen: TerminalScreen) -> None:
    await screen.shows("▶chatcmpl-52a1")
    await screen.press("down")
    await screen.shows("▶chatcmpl-9c03")
    await screen.press("end", "up", "j", "k", "home", "pagedown", "pageup")
    await screen.shows("▶chatcmpl-52a1")
    await screen.press("tab")
    await screen.shows("▶…")
    await screen.press("down", "enter")
    await screen.shows("Worker 694d9a3c5d8f7ea0", "10.0.0.12:40021")
    await screen.press("escape", "m")
    await screen.shows(words_of("models"))
    await screen.press("end", "enter")
    await screen.shows("Model dynamo/demo-law", "context_length")
    await screen.press("escape", "x")
    await screen.shows("Errors 2")
    await screen.press("enter")
    await screen.shows("─ Timeline")  # the example of a group of errors
    await screen.press("escape", "comma")
    await screen.shows("by most")
    await screen.press("o")
    await screen.shows("Workers 4", "Streams 3")


async def test_going_to_a_page_a_request_and_a_worker(screen: TerminalScreen, server: InspectorServer) -> None:
    await screen.press("colon")
    await screen.type("err")
    await screen.press("enter")
    await screen.shows("Errors 2")
    await screen.press("o", "colon")
    await screen.type("11de")
    await screen.press("enter")
    await screen.shows("▶chatcmpl-11de")
    await screen.press("colon")
    await screen.type("7ea1")
    await screen.press("enter")
    await screen.until(lambda: getattr(screen.app._table().chosen, "id", "") == WORKERS[2].id)
    await screen.press("colon")
    await screen.type("chatcmpl-gone")
    await screen.press("enter")
    await screen.shows("─ Timeline")
    assert ("GET", "/admin/v1/requests/chatcmpl-gone", {}) in server.asked


async def test_every_page_is_found_by_its_key_and_its_name() -> None:
    assert [page_named(page.key) for page in PAGES] == list(PAGES)
    assert [page_named(page.name) for page in PAGES] == list(PAGES)
    assert page_named("nowhere") is None
    assert page_named("") is None


async def test_a_filter_is_sent_and_held_here_too(screen: TerminalScreen, server: InspectorServer) -> None:
    await screen.press("slash")
    await screen.type("modle:demo")
    await screen.press("enter")
    await screen.shows("'modle' is not a field")
    await screen.press(*["backspace"] * 10)
    await screen.type("stalled")
    await screen.press("enter")
    await screen.shows("/ stalled", "chatcmpl-9c03", but="chatcmpl-52a1")
    await screen.until(lambda: server.queries("/admin/v1/watch")[-1].get("filter") == ["stalled"])
    await screen.shows("Workers 4")  # the filter is for streams
    await screen.press("escape")
    await screen.shows("chatcmpl-52a1", but="/ stalled")


async def test_a_page_without_a_filter_says_so(screen: TerminalScreen) -> None:
    await screen.press("c", "slash")
    await screen.tells("only workers, streams and recent requests can be filtered")


# -- actions -----------------------------------------------------------------------------------------------------------


async def test_an_abort_needs_a_reason_and_the_end_of_the_id(screen: TerminalScreen, server: InspectorServer) -> None:
    await screen.press("down", "a")
    await screen.shows("abort request chatcmpl-9c03beef", "211 tokens so far")
    await screen.press("tab")
    await screen.type("beef")
    await screen.press("enter")
    await screen.shows("a reason is needed")
    await screen.type("stuck")
    await screen.press("enter", "x", "enter")
    await screen.shows("that is not beef")
    assert server.actions == []
    await screen.press("backspace")
    await screen.type("beef")
    await screen.press("enter")
    await screen.until(lambda: bool(server.actions))
    assert server.actions == [("/admin/v1/requests/chatcmpl-9c03beef/abort", {"reason": "stuck"})]
    await screen.tells("the frontend took it")


async def test_leaving_the_question_does_nothing(screen: TerminalScreen, server: InspectorServer) -> None:
    await screen.press("a")
    await screen.shows("Esc leaves everything as it is")
    await screen.press("escape")
    await screen.shows("Workers 4")
    assert server.actions == []


_OUT = msgspec.structs.replace(WORKERS[0], state="quarantined")


@pytest.mark.parametrize(
    ("worker", "key", "action"),
    [
        (WORKERS[0], "d", "drain"),
        (WORKERS[3], "d", "undrain"),
        (WORKERS[0], "Q", "quarantine"),
        (_OUT, "d", "undrain"),
        (_OUT, "Q", "undrain"),
    ],
    ids=["drain", "of a draining one", "quarantine", "drain of a quarantined one", "of a quarantined one"],
)
async def test_a_worker_is_put_out_or_taken_back(worker: Any, key: str, action: str) -> None:
    with inspector_server(demo_picture(workers=[worker])) as server:
        async with terminal_screen(server) as screen:
            await screen.press("w")
            await screen.shows("▶", "Workers 1", but="Streams")
            await screen.press(key)
            await screen.shows(f"{action} worker {worker.id}")
            await screen.type("new kernel")
            await screen.press("enter")
            await screen.type(worker.id[-4:])
            await screen.press("enter")
            await screen.until(lambda: bool(server.actions))
            assert server.actions == [(f"/admin/v1/workers/{worker.id}/{action}", {"reason": "new kernel"})]


async def test_an_action_that_the_server_refuses_is_told(screen: TerminalScreen, server: InspectorServer) -> None:
    await screen.press("a")
    await screen.type("stuck")
    await screen.press("enter")
    await screen.type(STREAMS[0].id[-4:])
    server.refuse = 429
    await screen.press("enter")
    await screen.tells("429: refused")


@pytest.mark.parametrize("change", [{"read_only": True}, {"role": "viewer"}])
async def test_read_only_offers_no_action(change: dict[str, Any]) -> None:
    with inspector_server(demo_picture(fleet=msgspec.structs.replace(FLEET, **change))) as server:
        async with terminal_screen(server) as screen:
            await screen.shows("[RO]", "Streams 3")
            await screen.press("a")
            await screen.tells("read-only: ")
            await screen.press("w", "d")
            await screen.tells("read-only: ")
            assert server.actions == []


async def test_where_a_prompt_would_go(screen: TerminalScreen, server: InspectorServer) -> None:
    await screen.press("m")
    await screen.shows(words_of("models"))
    await screen.press("e")
    await screen.shows("Where would this prompt go, for big?")
    await screen.type("hello")
    await screen.press("enter")
    await screen.shows("decided by: lowest cost", "◀ chosen", "left out: quarantined")
    assert server.actions[0][1]["messages"] == [{"role": "user", "content": "hello"}]


async def test_a_page_is_copied_as_text(screen: TerminalScreen) -> None:
    await screen.press("y")
    await screen.tells("copied ")
    copied = screen.app.clipboard
    assert "694d9a3c5d8f7ea1" in copied  # in full, whatever the screen has room for
    assert "chatcmpl-9c03beef" in copied


# -- a picture that moves ----------------------------------------------------------------------------------------------


def entry(stream: StreamView, **changes: Any) -> dict[str, Any]:
    return {f"streams/{stream.id}": msgspec.to_builtins(msgspec.structs.replace(stream, **changes))}


async def test_a_patch_shows_and_the_chosen_row_stays_chosen(screen: TerminalScreen, server: InspectorServer) -> None:
    await screen.press("down")
    older = msgspec.structs.replace(STREAMS[0], id="chatcmpl-older", started_ms=0)
    server.push(Patch(seq=8, taken_ms=NOW_MS, set=entry(older)))
    await screen.shows("▶chatcmpl-9c03", "Streams 4", "chatcmpl-older")
    server.push(Patch(seq=9, taken_ms=NOW_MS, set={}, gone=[f"streams/{STREAMS[0].id}"]))
    await screen.shows("▶chatcmpl-9c03", "Streams 3", but="chatcmpl-52a1")
    server.push(Patch(seq=10, taken_ms=NOW_MS, gone=[f"streams/{STREAMS[1].id}", "streams/chatcmpl-older"]))
    await screen.shows("▶chatcmpl-11de")  # its neighbour
    server.push(Patch(seq=11, taken_ms=NOW_MS, gone=[f"streams/{STREAMS[2].id}"]))
    await screen.shows("no request is in flight")
    await screen.press("a", "enter", "d", "e")  # nothing is chosen
    await screen.tells("choose a request in flight")


async def test_a_sample_says_of_how_many() -> None:
    with inspector_server(demo_picture(streams=many_streams(100), totals={"streams": 3412})) as server:
        async with terminal_screen(server) as screen:
            await screen.shows("Streams 100 of 3,412")
            await screen.press("end")
            await screen.shows("▶chatcmpl-0000", "84-100 ─")


async def test_a_paused_picture_stands_still(screen: TerminalScreen, server: InspectorServer) -> None:
    await screen.press("p")
    await screen.shows("PAUSED")
    server.push(Patch(seq=8, taken_ms=NOW_MS, set=entry(STREAMS[0], phase="sending")))
    await screen.pilot.pause(0.1)
    assert "sending" not in screen.text
    server.picture = demo_picture(streams=[msgspec.structs.replace(STREAMS[0], phase="sending")])
    await screen.press("p")
    await screen.shows("sending", but="PAUSED")


async def test_a_server_that_is_killed_is_said_and_its_return_too(
    screen: TerminalScreen, server: InspectorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "LONGEST_DELAY_SECONDS", 0.2)
    server.close()
    text = await screen.shows("stale: the picture is", "trying again in")
    assert "chatcmpl-52a1" in text  # the last picture stays
    server.picture = demo_picture(streams=STREAMS[2:])
    server.open()
    await screen.shows("Streams 1", "chatcmpl-11de", but="stale")


async def test_a_server_that_never_answered_is_said() -> None:
    with inspector_server(demo_picture()) as server:
        server.close()
        async with terminal_screen(server) as screen:
            await screen.shows("no answer from http://127.0.0.1:", "trying again in", but="stale")
            server.open()
            await screen.shows("Streams 3", but="trying")


async def test_a_picture_that_does_not_change_says_how_old_it_is(
    screen: TerminalScreen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "STALE_SECONDS", 0.0)
    await screen.shows("unchanged for")


async def test_the_screen_takes_any_size(screen: TerminalScreen) -> None:
    for size in ((40, 10), (200, 60), (20, 5), (80, 24)):
        await screen.pilot.resize_terminal(*size)
        await screen.pilot.pause()
        assert len(screen.text.splitlines()) <= size[1]
    await screen.shows("STALLED", "quarantined", "▶chatcmpl-52a1")


async def test_light_and_dark(screen: TerminalScreen) -> None:
    was = screen.app.current_theme.dark
    await screen.press("t")
    await screen.until(lambda: screen.app.current_theme.dark is not was)


# -- hostile texts -----------------------------------------------------------------------------------------------------


@examples(20)
@given(
    st.text(min_size=1, max_size=30)
    | st.sampled_from(["\x1b]0;owned\x07", "[@click=quit]x[/]", "\u202e\u2066x", "\ufdfd" * 9])
)
async def test_what_clients_write_does_not_paint_the_screen(text: str) -> None:
    stream = msgspec.structs.replace(
        STREAMS[0], model=text, key=text, endpoint=text, client_request_id=text, workers=[text], id=text
    )
    picture = demo_picture(
        streams=[stream], models=[msgspec.structs.replace((demo_picture().models or [])[0], name=text)]
    )
    detail = msgspec.structs.replace(DETAIL, stream=stream, parameters={text: text})
    with inspector_server(picture, detail=detail) as server:
        async with terminal_screen(server, 160, 40) as screen:
            await screen.shows("Streams 1")
            for key, words in (("m", "Models 1"), ("s", "Streams 1"), ("enter", "Timeline")):
                await screen.press(key)
                check_is_safe(screen)
                await screen.shows(words)
            check_is_safe(screen)
            await screen.press("a")
            await screen.shows("abort request")
            check_is_safe(screen)


def check_is_safe(screen: TerminalScreen) -> None:
    lines = screen.text.split("\n")
    assert [line for line in lines if printable(line) != line] == []
    assert len(lines) == 40


# -- what it costs -----------------------------------------------------------------------------------------------------


async def test_a_thousand_streams_draw_no_more_rows_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    form = FORMS["streams"]
    real = type(form.at(80)).row
    monkeypatch.setattr(type(form.at(80)), "row", lambda *args, **options: drawn.append("x") or real(*args, **options))
    with inspector_server(demo_picture(streams=many_streams(1000))) as server:
        async with terminal_screen(server) as screen:
            await screen.press("s")
            await screen.shows("Streams 1,000")
            await screen.pilot.pause()
            drawn.clear()
            screen.app.query_one("#streams", TableView).refresh()
            await screen.until(lambda: bool(drawn))
            assert len(drawn) <= 4 * 30


async def test_a_patch_of_a_thousand_streams_is_read_and_drawn_within_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    real = TableView.render_line
    monkeypatch.setattr(TableView, "render_line", lambda self, y: drawn.append(y) or real(self, y))
    streams = many_streams(1000)
    with inspector_server(demo_picture(streams=streams)) as server:
        async with terminal_screen(server, 200, 60) as screen:
            await screen.shows("Streams 1,000")
            app, picture, taken, yardstick = screen.app, demo_picture(streams=streams), [], []
            for turn in range(20):
                progress = {
                    stream.id: StreamProgress(output_tokens=5000 + turn, tokens_per_second=turn, last_token_ms=NOW_MS)
                    for stream in streams
                }
                data = msgspec.json.encode(Patch(seq=8 + turn, taken_ms=NOW_MS, progress=progress))
                await screen.pilot.pause()
                drawn.clear()
                began = time.thread_time()
                picture = patched(picture, msgspec.json.decode(data, type=Patch))
                assert app._watch is not None
                app.post_message(InspectorApp.Changed(app._watch, WatchState(picture, time.monotonic())))
                while not drawn:
                    await screen.pilot.pause()
                taken.append(1000 * (time.thread_time() - began))
                yardstick.append(1000 * some_work())
            await screen.shows(f"{5000 + turn:,}/2k")
    print(f"1,000 streams, all changed, 200 x 60: {min(taken):.1f} to {max(taken):.1f} ms of CPU a patch,", end=" ")
    print(f"{min(taken) / min(yardstick):.1f} times the yardstick")
    # A machine that does other things as well makes some of them long, and none short. A slower one has longer frames.
    assert min(taken) <= max(16, 2 * YARDSTICKS * min(yardstick))


YARDSTICKS = 7.0  # what a patch takes where it took 8 to 9 ms


def some_work() -> float:
    """The CPU seconds of something that goes with the speed of the machine as drawing does."""
    began = time.thread_time()
    sum([len(f"{number:>12,}".strip()) for number in range(5000)])
    return time.thread_time() - began


@each_case("count", [0, 1, 1000])
def test_a_picture_survives_its_own_encoding(count: int) -> None:
    picture = demo_picture(streams=many_streams(count))
    assert msgspec.json.decode(msgspec.json.encode(picture), type=Picture) == picture
