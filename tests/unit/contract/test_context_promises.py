import asyncio
import threading

import pytest

from dynamo._core import Context
from support.patience import PATIENCE_SECONDS


def test_a_stop_is_not_a_kill_and_a_kill_is_a_stop() -> None:
    context = Context()
    assert (context.is_stopped(), context.is_killed()) == (False, False)
    context.stop_generating()
    context.stop_generating()
    assert (context.is_stopped(), context.is_killed()) == (True, False)
    context.kill()
    assert (context.is_stopped(), context.is_killed()) == (True, True)
    killed = Context()
    killed.kill()
    assert (killed.is_stopped(), killed.is_killed()) == (True, True)


@pytest.mark.parametrize("end", ["stop_generating", "kill"])
async def test_waiting_for_a_cancellation_returns_at_once_when_it_already_happened(end: str) -> None:
    context = Context()
    getattr(context, end)()
    assert await asyncio.wait_for(context.async_killed_or_stopped(), 1) is True


@pytest.mark.parametrize("end", ["stop_generating", "kill"])
async def test_a_cancellation_from_another_thread_wakes_every_waiter(end: str) -> None:
    context = Context()
    waiters = [asyncio.create_task(context.async_killed_or_stopped()) for _ in range(3)]
    await asyncio.sleep(0)
    thread = threading.Thread(target=getattr(context, end))
    thread.start()
    assert await asyncio.wait_for(asyncio.gather(*waiters), PATIENCE_SECONDS) == [True] * 3
    thread.join()


def test_metadata_is_a_live_sorted_mapping_of_text() -> None:
    context = Context("id", {"b": "2"})
    context.metadata["a"] = "1"
    view = context.metadata
    view["c"] = "3"
    assert list(context.metadata) == ["a", "b", "c"]
    assert context.metadata.pop("missing", None) is None
    assert context.metadata.pop("missing", "d") == "d"
    with pytest.raises(KeyError):
        context.metadata.pop("missing")
    with pytest.raises(TypeError):
        context.metadata["n"] = 1  # type: ignore[assignment]
    context.metadata = {"only": "this"}
    assert context.metadata.copy() == {"only": "this"}
    with pytest.raises(TypeError):
        context.metadata = {"n": 1}  # type: ignore[dict-item]


def test_a_detached_context_is_a_snapshot_that_was_never_stopped() -> None:
    parent = Context("parent", {"k": "v"})
    parent.stop_generating()
    child = parent.detached("child")
    assert (child.id(), child.is_stopped()) == ("child", False)
    child.metadata["k"] = "changed"
    parent.metadata["new"] = "x"
    assert (parent.metadata["k"], "new" in child.metadata) == ("v", False)
    parent.kill()
    assert not child.is_stopped()


def test_ids_are_random_unless_given() -> None:
    assert Context("x").id() == "x"
    assert Context().id() != Context().id()
