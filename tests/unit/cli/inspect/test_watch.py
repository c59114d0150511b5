"""A watch against a server on a real socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from dynamo.cli.api_client import ServerError
from dynamo.cli.inspect import client as module
from dynamo.cli.inspect.client import InspectorClient, PictureWatch, ViewQuery, WatchState, retry_delay
from dynamo.protocol.inspector.views import Patch, StreamView
from support.cases import each_case
from support.inspector_pictures import DETAIL, NOW_MS, ROUTING, demo_picture, many_streams
from support.inspector_server import InspectorServer, inspector_server
from support.patience import PATIENCE_SECONDS, PROMPT_SECONDS

QUERY = ViewQuery(("fleet", "streams"))


class Watched:
    """The states that a watch reported."""

    def __init__(self) -> None:
        self.states: list[WatchState] = []
        self._changed = threading.Condition()

    def take(self, state: WatchState) -> None:
        with self._changed:
            self.states.append(state)
            self._changed.notify_all()

    def wait(self, is_wanted: Callable[[WatchState], bool]) -> WatchState:
        with self._changed:
            assert self._changed.wait_for(lambda: any(map(is_wanted, self.states)), PATIENCE_SECONDS), self.states
            return next(state for state in reversed(self.states) if is_wanted(state))


@contextmanager
def watching(server: InspectorServer, query: ViewQuery = QUERY, key: str | None = None) -> Iterator[Watched]:
    watched = Watched()
    watch = PictureWatch(InspectorClient(server.url, key), query, watched.take)
    thread = threading.Thread(target=watch.run)
    thread.start()
    try:
        yield watched
    finally:
        watch.stop()
        thread.join(PROMPT_SECONDS)
        assert not thread.is_alive(), "a stopped watch goes on"


def streams(state: WatchState) -> list[StreamView]:
    return (state.picture.streams or []) if state.picture else []


def test_patches_keep_the_picture_current() -> None:
    with inspector_server(demo_picture()) as server, watching(server) as watched:
        first = watched.wait(lambda state: bool(streams(state)))
        assert first.picture is not None
        assert first.picture.workers is None  # it was not asked for
        one = msgspec.to_builtins(msgspec.structs.replace(streams(first)[0], output_tokens=2000))
        server.push(
            Patch(
                seq=8,
                taken_ms=NOW_MS + 1000,
                set={f"streams/{one['id']}": one},
                gone=[f"streams/{streams(first)[1].id}"],
            )
        )
        second = watched.wait(lambda state: state.picture is not None and state.picture.seq == 8)
        assert [stream.output_tokens for stream in streams(second)] == [2000, 0]
        assert second.problem is None


def test_a_server_that_is_killed_and_comes_back_is_watched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY_SECONDS", 0.02)
    with inspector_server(demo_picture()) as server, watching(server) as watched:
        watched.wait(lambda state: bool(streams(state)))
        server.close()
        lost = watched.wait(lambda state: state.problem is not None)
        assert streams(lost), "the last picture is kept"
        assert lost.retry_at > 0
        server.picture = demo_picture(seq=3, streams=[])  # another life of the server counts anew
        server.open()
        back = watched.wait(
            lambda state: state.problem is None and state.picture is not None and state.picture.seq == 3
        )
        assert streams(back) == []
        assert server.last_ids[:1] == [None]
        assert server.last_ids[-1] == "7"


def test_a_server_that_is_not_there_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY_SECONDS", 0.02)
    with inspector_server(demo_picture()) as server:
        server.close()
        with watching(server) as watched:
            lost = watched.wait(lambda state: state.problem is not None)
            assert lost.picture is None
            assert "is it running?" in (lost.problem or "")
            server.open()
            watched.wait(lambda state: bool(streams(state)))


def test_a_patch_that_cannot_be_read_is_answered_with_a_new_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY_SECONDS", 0.02)
    with inspector_server(demo_picture()) as server, watching(server) as watched:
        watched.wait(lambda state: bool(streams(state)))
        server.push(Patch(seq=8, taken_ms=NOW_MS, set={"streams/x": {"id": "x"}}))
        assert "cannot read" in (watched.wait(lambda state: state.problem is not None).problem or "")
        watched.wait(lambda state: state.problem is None and len(server.last_ids) == 2)
        assert server.last_ids == [None, None], "it must not go on from what it could not take"


def test_a_picture_of_thousands_of_streams_is_one_line_that_is_read_whole() -> None:
    with inspector_server(demo_picture(streams=many_streams(5000))) as server, watching(server) as watched:
        assert len(streams(watched.wait(lambda state: state.picture is not None))) == 5000


def test_a_watch_that_waits_for_its_server_stops_at_once() -> None:
    with inspector_server(demo_picture()) as server:
        server.close()
        began = time.monotonic()
        with watching(server) as watched:
            watched.wait(lambda state: state.problem is not None)
        assert time.monotonic() - began < PROMPT_SECONDS
        server.open()


def test_views_limit_and_filter_are_sent() -> None:
    with inspector_server(demo_picture(streams=many_streams(9))) as server:
        found = InspectorClient(server.url, None).picture(ViewQuery(("fleet", "streams"), 4, "model:demo"))
        assert len(found.streams or []) == 4
        assert found.totals == {"streams": 9}
        assert server.queries("/admin/v1/snapshot") == [
            {"views": ["fleet,streams"], "limit": ["4"], "filter": ["model:demo"]}
        ]


def test_a_key_is_sent_and_a_missing_one_is_asked_for() -> None:
    with inspector_server(demo_picture(), key="s3cret") as server:
        assert InspectorClient(server.url, "s3cret").picture(QUERY).seq == 7
        with pytest.raises(ServerError, match=r"no valid key was given; give an admin key with --key or DYN_API_KEY"):
            InspectorClient(server.url, None).picture(QUERY)
        began = time.monotonic()
        with watching(server) as watched:
            lost = watched.wait(lambda state: state.problem is not None)
            assert "--key" in (lost.problem or "")
            assert lost.retry_at >= began + module.REFUSED_DELAY_SECONDS  # a person has to do something


def test_an_answer_of_something_else_is_an_error_that_says_so() -> None:
    with inspector_server(demo_picture()) as server:
        server.detail = None
        with pytest.raises(ServerError, match="404"):
            InspectorClient(server.url, None).detail("chatcmpl-1")
        with pytest.raises(ServerError, match="not one of an inspector"):
            InspectorClient(server.url, None).explain("demo", "hello")  # the answer to an action is no decision


def test_requests_are_asked_for_by_ids_with_any_characters() -> None:
    with inspector_server(demo_picture(), detail=DETAIL, explained=ROUTING[0]) as server:
        client = InspectorClient(server.url, None)
        assert client.detail("a/b ?").attempts == DETAIL.attempts
        client.abort("a/b ?", "too slow")
        client.change_worker("7ea1", "drain", "new kernel")
        assert client.explain("demo", "hello") == [ROUTING[0]]
        assert server.actions == [
            ("/admin/v1/requests/a/b ?/abort", {"reason": "too slow"}),
            ("/admin/v1/workers/7ea1/drain", {"reason": "new kernel"}),
            ("/admin/v1/routing/explain", {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}),
        ]


@each_case(
    ("failures", "status", "least", "most"),
    [(1, None, 0.25, 0.5), (3, None, 1.0, 2.0), (50, None, 4.0, 8.0), (1, 401, 15.0, 15.0), (1, 503, 0.25, 0.5)],
)
def test_tries_come_further_and_further_apart(failures: int, status: int | None, least: float, most: float) -> None:
    assert [retry_delay(failures, status, chance) for chance in (0.0, 1.0)] == [least, most]


def test_the_time_of_the_server_goes_on_between_pictures() -> None:
    state = WatchState(demo_picture(), received_at=100.0)
    assert state.now_ms(101.5) == NOW_MS + 1500
