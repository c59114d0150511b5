from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.cli.inspect.store import LISTS, PatchMismatch, patched
from dynamo.protocol.inspector.views import VIEWS, ModelView, Patch, Picture, StreamView
from support.inspector_pictures import FLEET, demo_picture
from support.properties import examples

ids = st.sampled_from([f"id-{letter}" for letter in "abcdefgh"] + ["dynamo/demo", "a/b/c"])
streams = st.dictionaries(
    ids,
    st.builds(
        StreamView, id=st.just(""), frontend=st.just("fe"), endpoint=st.just("chat"), phase=st.just("decode"),
        started_ms=st.integers(0, 9), phase_ms=st.integers(0, 9), output_tokens=st.integers(0, 99),
    ),
)  # fmt: skip
models = st.dictionaries(
    ids,
    st.builds(ModelView, id=st.just(""), name=st.text(max_size=3), namespace=st.just("n"), types=st.just([]), is_ready=st.booleans()),
)  # fmt: skip


def picture(seq: int, **views: dict[str, Any]) -> Picture:
    lists: dict[str, Any] = {
        name: [msgspec.structs.replace(one, id=id) for id, one in entries.items()] for name, entries in views.items()
    }
    return Picture(seq=seq, taken_ms=1000 * seq, **lists)


def difference(before: Picture, after: Picture) -> Patch:
    """What a server sends, found the slow way."""
    changed: dict[str, Any] = {}
    gone = []
    for view in ("streams", "models"):
        old = {one.id: one for one in getattr(before, view)}
        new = {one.id: one for one in getattr(after, view)}
        changed |= {f"{view}/{id}": msgspec.to_builtins(one) for id, one in new.items() if old.get(id) != one}
        gone += [f"{view}/{id}" for id in old if id not in new]
    return Patch(seq=after.seq, taken_ms=after.taken_ms, set=changed, gone=gone, partial=["m2"], totals={"streams": 9})


def by_id(one: Picture) -> Any:
    return {view: {entry.id: entry for entry in getattr(one, view)} for view in ("streams", "models")}


@examples(300)
@given(streams, models, streams, models)
def test_a_patch_makes_the_old_picture_the_new_one(
    old_streams: Any, old_models: Any, new_streams: Any, new_models: Any
) -> None:
    before = picture(1, streams=old_streams, models=old_models)
    after = picture(2, streams=new_streams, models=new_models)
    patch = msgspec.json.decode(msgspec.json.encode(difference(before, after)), type=Patch)
    found = patched(before, patch)
    assert by_id(found) == by_id(after)
    assert (found.seq, found.taken_ms, found.partial, found.totals) == (2, 2000, ["m2"], {"streams": 9})
    kept = [one.id for one in before.streams or [] if one.id in new_streams]
    assert [one.id for one in found.streams or []][: len(kept)] == kept  # what stays keeps its place


def test_an_old_patch_changes_nothing() -> None:
    before = demo_picture(seq=7)
    assert patched(before, Patch(seq=7, taken_ms=0, gone=["streams/chatcmpl-52a1f00d"])) is before


def test_the_whole_system_is_one_entry() -> None:
    fleet = msgspec.to_builtins(FLEET) | {"workers": 99}
    found = patched(demo_picture(), Patch(seq=8, taken_ms=1, set={"fleet": fleet}))
    assert found.fleet is not None
    assert found.fleet.workers == 99


def test_an_entry_that_is_set_and_gone_in_one_patch_is_there() -> None:
    one = msgspec.to_builtins((demo_picture().streams or [])[0])
    found = patched(
        demo_picture(), Patch(seq=8, taken_ms=1, set={f"streams/{one['id']}": one}, gone=[f"streams/{one['id']}"])
    )
    assert one["id"] in [stream.id for stream in found.streams or []]


def test_a_view_of_a_newer_version_is_left_out() -> None:
    before = demo_picture()
    found = patched(
        before, Patch(seq=8, taken_ms=before.taken_ms, set={"planets/1": {}, "odd": 3}, gone=["planets/2", "x"])
    )
    assert msgspec.structs.replace(found, seq=7) == before


def test_an_entry_that_is_none_is_refused_by_its_key() -> None:
    with pytest.raises(PatchMismatch, match=r"streams/x: .*frontend"):
        patched(demo_picture(), Patch(seq=8, taken_ms=1, set={"streams/x": {"id": "x"}}))


def test_every_view_but_the_first_is_a_list_with_a_type() -> None:
    assert set(LISTS) == set(VIEWS) - {"fleet"}
