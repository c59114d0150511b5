from __future__ import annotations

import uuid

import pytest

from dynamo.protocol.request_ids import part_uuid, uuid_in
from support.cases import each_case

ID = "52a1f00d-0b1c-4d2e-8f30-0123456789ab"


@each_case(
    "spelling", [ID, f"chatcmpl-{ID}", f"cmpl-{ID}", f"msg_{ID.replace('-', '')}", f"resp_{ID.replace('-', '')}"]
)
def test_every_spelling_of_an_id_is_one_uuid(spelling: str) -> None:
    assert uuid_in(spelling) == uuid_in(spelling.upper().replace("RESP", "resp")) == ID


@each_case("other", ["", "mine", f"x{ID}", f"{ID}-0", f"{ID}0", "chatcmpl-1", f"chatcmpl--{ID}"])
def test_another_text_is_left_as_it_is(other: str) -> None:
    assert uuid_in(other) == other


@pytest.mark.parametrize("id", [ID, ID[:-4] + "ffff", ID[:-4] + "0000"])
def test_the_parts_of_a_request_have_uuids_of_their_own_that_one_search_finds(id: str) -> None:
    parts = [part_uuid(id, number) for number in range(2048)]
    assert len({id, *parts}) == 2049
    assert {part[:-4] for part in parts} == {id[:-4]}
    assert [str(uuid.UUID(part)) for part in parts] == parts


def test_the_parts_of_a_request_with_an_id_of_its_callers_are_numbered() -> None:
    assert part_uuid("mine", 3) == "mine-3"
