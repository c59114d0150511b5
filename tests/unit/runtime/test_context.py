"""One request's identity and its stop/kill tree."""

from __future__ import annotations

import asyncio
import threading
import uuid
from typing import Any

import pytest

from dynamo.runtime.calls.context import Context, ContextMetadata, on_loop
from dynamo.runtime.observe.tracing import NO_SPAN, TraceContext
from support.cases import each_case


def test_an_id_is_given_or_a_random_uuid() -> None:
    assert Context("mine").id() == "mine"
    assert uuid.UUID(Context().id()).version == 4
    assert Context().id() != Context().id()


def test_stop_and_kill_are_final_and_idempotent() -> None:
    context = Context()
    assert (context.is_stopped(), context.is_killed()) == (False, False)
    for _ in range(2):
        context.stop_generating()
        assert (context.is_stopped(), context.is_killed()) == (True, False)
    for _ in range(2):
        context.kill()
        assert (context.is_stopped(), context.is_killed()) == (True, True)
    context.stop_generating()
    assert context.is_killed()


def test_a_kill_alone_is_also_a_stop() -> None:
    context = Context()
    context.kill()
    assert (context.is_stopped(), context.is_killed()) == (True, True)


def test_callbacks_hear_stop_and_then_kill_once_each() -> None:
    context = Context()
    heard: list[bool] = []
    context.on_cancel(heard.append)
    for action in (
        context.stop_generating,
        context.stop_generating,
        context.kill,
        context.kill,
        context.stop_generating,
    ):
        action()
    assert heard == [False, True]


@pytest.mark.parametrize("killed", [False, True])
def test_a_late_callback_hears_at_once(killed: bool) -> None:
    context = Context()
    (context.kill if killed else context.stop_generating)()
    heard: list[bool] = []
    context.on_cancel(heard.append)
    assert heard == [killed]


def test_a_callback_that_was_taken_back_is_silent() -> None:
    context = Context()
    heard: list[bool] = []
    forget = context.on_cancel(heard.append)
    forget()
    forget()
    context.kill()
    assert heard == []


def test_children_stop_before_the_callbacks_registered_after_them() -> None:
    parent, child = Context("p"), Context("c")
    order: list[str] = []
    child.on_cancel(lambda killed: order.append("child"))
    parent.link_child(child)
    parent.on_cancel(lambda killed: order.append("parent"))
    parent.stop_generating()
    assert order == ["child", "parent"]
    assert (child.is_stopped(), child.is_killed()) == (True, False)
    parent.kill()
    assert child.is_killed()


def test_a_stopped_child_leaves_its_parent_alone_and_unlinking_works() -> None:
    parent, child, other = Context(), Context(), Context()
    unlink = parent.link_child(child)
    parent.link_child(other)
    other.kill()
    assert not parent.is_stopped()
    unlink()
    parent.kill()
    assert not child.is_stopped()


async def test_waiting_for_a_cancellation_returns_true_for_both_kinds() -> None:
    for act in ("stop_generating", "kill"):
        context = Context()
        waiting = asyncio.create_task(context.async_killed_or_stopped())
        await asyncio.sleep(0)
        assert not waiting.done()
        getattr(context, act)()
        assert await waiting is True
        assert await context.async_killed_or_stopped() is True  # and at once from then on


async def test_a_cancelled_wait_leaves_no_registration_behind() -> None:
    context = Context()
    waiting = asyncio.create_task(context.async_killed_or_stopped())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not context._callbacks
    context.kill()


async def test_a_stop_from_an_engines_thread_wakes_the_waiter() -> None:
    context = Context()
    waiting = asyncio.create_task(context.async_killed_or_stopped())
    await asyncio.sleep(0)
    thread = threading.Thread(target=context.stop_generating)
    thread.start()
    assert await waiting is True
    thread.join()


async def test_many_threads_may_stop_and_register_at_once() -> None:
    for _ in range(50):
        context = Context()
        heard: list[bool] = []
        barrier = threading.Barrier(3)

        def stop(context: Context = context, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            context.stop_generating()

        def register(
            context: Context = context, barrier: threading.Barrier = barrier, heard: list[bool] = heard
        ) -> None:
            barrier.wait()
            context.on_cancel(heard.append)

        threads = [threading.Thread(target=target) for target in (stop, register, register)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(heard) >= 2  # nobody is forgotten
        assert context.is_stopped()


async def test_a_callback_for_a_loop_runs_there_and_at_once_when_already_there() -> None:
    loop = asyncio.get_running_loop()
    heard: list[tuple[bool, bool]] = []
    main = threading.get_ident()
    callback = on_loop(loop, lambda killed: heard.append((killed, threading.get_ident() == main)))
    callback(True)
    assert heard == [(True, True)]
    thread = threading.Thread(target=callback, args=(False,))
    thread.start()
    thread.join()
    while len(heard) < 2:
        await asyncio.sleep(0)
    assert heard[1] == (False, True)


def test_metadata_is_a_live_sorted_mapping_of_strings() -> None:
    context = Context(metadata={"b": "2", "a": "1"})
    metadata = context.metadata
    assert list(metadata) == ["a", "b"] == list(metadata.keys())
    assert list(metadata.values()) == ["1", "2"]
    assert list(metadata.items()) == [("a", "1"), ("b", "2")]
    metadata["c"] = "3"
    assert context.metadata is metadata
    assert (len(metadata), "c" in metadata, metadata.get("x"), metadata["c"]) == (3, True, None, "3")
    assert metadata.pop("c") == "3"
    assert metadata.pop("c", None) is None
    with pytest.raises(KeyError):
        metadata.pop("c")
    copy = metadata.copy()
    assert type(copy) is dict
    copy["z"] = "9"
    assert "z" not in metadata
    metadata.clear()
    assert len(context.metadata) == 0


@each_case(("key", "value"), [("k", 1), (1, "v"), ("k", None), ("k", b"v")])
def test_anything_but_strings_is_a_type_error(key: Any, value: Any) -> None:
    context = Context()
    with pytest.raises(TypeError, match="str to str"):
        context.metadata[key] = value
    with pytest.raises(TypeError):
        context.metadata = {key: value}
    assert len(context.metadata) == 0


def test_setting_metadata_replaces_it() -> None:
    context = Context(metadata={"a": "1"})
    context.metadata = {"b": "2"}
    assert context.metadata.copy() == {"b": "2"}
    context.metadata = ContextMetadata({"c": "3"})
    assert context.metadata == {"c": "3"}
    assert context.has_metadata
    assert not Context().has_metadata


def test_a_detached_context_is_fresh_with_a_snapshot_and_the_same_trace() -> None:
    trace = TraceContext("a" * 32, "b" * 16)
    parent = Context("p", {"k": "v"}, trace=trace, deadline=5.0)
    fired: list[int] = []
    parent.on_first_token(lambda: fired.append(1))
    parent.stop_generating()
    twin = parent.detached("d")
    assert (twin.id(), twin.is_stopped(), twin.trace_id, twin.deadline) == ("d", False, "a" * 32, 5.0)
    twin.metadata["k"] = "changed"
    parent.metadata["new"] = "x"
    assert parent.metadata.copy() == {"k": "v", "new": "x"}
    assert twin.metadata.copy() == {"k": "changed"}
    twin.notify_first_token()
    assert fired == []
    parent.kill()
    assert not twin.is_stopped()


def test_the_first_token_is_told_once_and_is_no_matter_elsewhere() -> None:
    context = Context()
    context.notify_first_token()
    fired: list[int] = []
    context.on_first_token(lambda: fired.append(1))
    context.notify_first_token()
    context.notify_first_token()
    assert fired == [1]


def test_without_a_trace_there_are_no_ids_and_a_silent_span() -> None:
    context = Context()
    assert (context.trace_id, context.span_id, context.parent_span_id, context.trace_headers()) == (None,) * 4
    assert context.current_span() is NO_SPAN
    with context.start_span("work", {"a": 1}) as span:
        span.set_attribute("k", object())
        span.add_event("e")
        span.set_status("ok")
        with pytest.raises(ValueError, match="ok"):
            span.set_status("fine")


def test_an_inbound_trace_is_passed_on() -> None:
    trace = TraceContext("a" * 32, "b" * 16, tracestate="k=v", x_request_id="x", request_id="r")
    context = Context(trace=trace)
    assert (context.trace_id, context.span_id) == ("a" * 32, "b" * 16)
    assert context.trace_headers() == {
        "traceparent": f"00-{'a' * 32}-{'b' * 16}-01",
        "tracestate": "k=v",
        "x-request-id": "x",
        "request-id": "r",
    }


def test_a_context_shows_its_state() -> None:
    context = Context("r1")
    assert repr(context) == "Context('r1', live)"
    context.stop_generating()
    assert repr(context) == "Context('r1', stopped)"
    context.kill()
    assert repr(context) == "Context('r1', killed)"
