"""Key files as text: what is read, what is refused and where, and that a change touches one key only."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.frontend.base.access import KeyRole, RouteGroup
from dynamo.frontend.parts.keys.rules.key_file import (
    KeyFileError,
    add_key,
    key_toml,
    read_key_ring,
    remove_key,
    replace_key,
)
from dynamo.frontend.parts.keys.rules.key_text import check_imported, hash_of, key_text, new_id
from dynamo.frontend.parts.keys.rules.records import Budget, KeyRecord, LimitSet, Period

HASHES = [hash_of(str(number).encode()) for number in range(8)]

FILE = f"""\
# keys of the team
[[keys]]
id = "one"
hash = "{HASHES[0]}"   # alice's
models = ["llama-*", "tiny"]

  [keys.limits]
  requests_per_minute = 10

# the second one
[[keys]]
id = "two"
hash = "{HASHES[1]}"
expires = 2030-01-01T00:00:00Z

[projects.research]
limits = {{ tokens_per_minute = 1000 }}

[prices."llama-*"]
input = 0.5
"""


def test_a_file_holds_keys_projects_and_prices() -> None:
    ring = read_key_ring(FILE, is_json=False)
    assert [record.id for record in ring.keys] == ["one", "two"]
    assert ring.keys[0].limits == LimitSet(requests_per_minute=10)
    assert ring.keys[1].expires == datetime(2030, 1, 1, tzinfo=UTC)
    assert ring.projects["research"].limits == LimitSet(tokens_per_minute=1000)
    price = ring.price_of("llama-7b")
    assert price is not None
    assert price.input == 0.5
    assert ring.price_of("tiny") is None


def test_json_says_the_same() -> None:
    text = json.dumps({"keys": [{"id": "one", "hash": HASHES[0], "models": ["m"]}]})
    assert read_key_ring(text, is_json=True).keys == (KeyRecord(id="one", hash=HASHES[0], models=("m",)),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        (" \n\t\n", "empty"),
        ("[[keys]]\nid = \n", "line 2"),
        (FILE.replace('id = "two"', 'id = "two"\nmodles = []'), "line 11: Object contains unknown field `modles`"),
        (FILE.replace('id = "two"', 'id = "one"'), "two keys have the id 'one'"),
        (FILE.replace(HASHES[1], HASHES[0]), "same hash"),
        (FILE.replace("00:00:00Z", "00:00:00"), "line 11: Expected `datetime` with a timezone"),
        (FILE.replace("= 10\n", "= 0\n"), "line 2: Expected `int` >= 1"),
        (FILE.replace(HASHES[0], "sha256:beef"), "line 2: Expected `str` matching regex"),
        (FILE.replace('models = ["llama-*", "tiny"]', 'cidrs = ["10.0.0.300/8"]'), "10.0.0.300/8"),
        (FILE.replace('models = ["llama-*", "tiny"]', 'routes = ["infrence"]'), "infrence"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, words: str) -> None:
    with pytest.raises(KeyFileError) as refused:
        read_key_ring(text, is_json=False)
    assert words in str(refused.value)


def test_a_budget_is_of_tokens_or_of_money() -> None:
    for members in ({}, {"tokens": 1, "money": 1.0}):
        with pytest.raises(ValueError, match="either `tokens` or `money`"):
            Budget(period=Period.DAY, **members)  # type: ignore[arg-type]


def test_a_change_leaves_the_rest_of_the_file_as_it_is() -> None:
    ring = read_key_ring(FILE, is_json=False)
    three = KeyRecord(id="three", hash=HASHES[2])
    added = add_key(FILE, three, is_json=False)
    assert added.startswith(FILE)
    removed = remove_key(added, "one", is_json=False)
    assert [record.id for record in read_key_ring(removed, is_json=False).keys] == ["two", "three"]
    assert "# the second one\n[[keys]]" in removed
    assert "# keys of the team" in removed
    changed = replace_key(FILE, KeyRecord(id="one", hash=HASHES[3], enabled=False), is_json=False)
    found = read_key_ring(changed, is_json=False)
    assert (found.keys[0].enabled, found.keys[1], found.prices) == (False, ring.keys[1], ring.prices)
    assert "# the second one\n[[keys]]" in changed


def test_the_last_key_of_a_file_can_be_removed() -> None:
    one = add_key("", KeyRecord(id="one", hash=HASHES[0]), is_json=False)
    none = remove_key(one, "one", is_json=False)
    assert read_key_ring(none, is_json=False).keys == ()
    again = add_key(none, KeyRecord(id="two", hash=HASHES[1]), is_json=False)
    assert [record.id for record in read_key_ring(again, is_json=False).keys] == ["two"]


def test_a_file_that_a_command_cannot_change_is_refused_and_not_damaged() -> None:
    inline = f'keys = [{{ id = "one", hash = "{HASHES[0]}" }}]\n'
    changes: list[Callable[[], object]] = [
        lambda: add_key(inline, KeyRecord(id="two", hash=HASHES[1]), is_json=False),
        lambda: remove_key(inline, "one", is_json=False),
    ]
    for change in changes:
        with pytest.raises(KeyFileError, match="by hand"):
            change()
    tricky = FILE.replace('id = "two"', 'id = "two"\nname = """x"""\nmetadata = { note = """\n[[keys]]\n""" }')
    with pytest.raises(KeyFileError, match=r"by hand|no key|Expected"):
        remove_key(tricky, "two", is_json=False)


def test_a_key_that_is_not_there_cannot_be_changed() -> None:
    with pytest.raises(KeyFileError, match="'nine'"):
        remove_key(FILE, "nine", is_json=False)


names = st.text(
    st.characters(min_codepoint=32, blacklist_characters="\x7f", blacklist_categories=["Cs", "Cc"]), min_size=1
)
records = st.builds(
    KeyRecord,
    id=st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True),
    hash=st.sampled_from(HASHES),
    name=st.none() | names.filter(lambda name: len(name) <= 128),
    role=st.sampled_from(KeyRole),
    enabled=st.booleans(),
    expires=st.none() | st.datetimes(timezones=st.just(UTC), min_value=datetime(1970, 1, 2)),
    models=st.none() | st.lists(names.filter(lambda name: len(name) <= 128)).map(tuple),
    routes=st.none() | st.lists(st.sampled_from(RouteGroup)).map(tuple),
    limits=st.none() | st.builds(LimitSet, requests_per_minute=st.integers(1, 10**6), burst=st.floats(0.01, 1)),
    model_limits=st.dictionaries(
        names.filter(lambda name: len(name) <= 128), st.just(LimitSet(concurrent=3)), max_size=2
    ),
    metadata=st.dictionaries(names.filter(lambda name: len(name) <= 128), st.text(max_size=20), max_size=3),
)


@given(records)
def test_every_record_is_read_as_it_was_written(record: KeyRecord) -> None:
    assert read_key_ring(key_toml(record), is_json=False).keys == (record,)
    assert read_key_ring(add_key("", record, is_json=True), is_json=True).keys == (record,)


def test_a_key_is_its_prefix_its_id_and_43_characters() -> None:
    id = new_id(bytes(range(40, 72)))
    key = key_text(id, bytes(32))
    assert len(id) == 10
    assert key == f"dyn-{id}.{'A' * 43}"
    with pytest.raises(ValueError, match="32 random bytes"):
        key_text(id, b"short")


@pytest.mark.parametrize("key", ["", "15-bytes-of-key", "x" * 513, "sixteen bytes at", "sixteen-bytes-ü-x"])
def test_what_can_be_guessed_or_not_be_sent_is_not_imported(key: str) -> None:
    with pytest.raises(ValueError, match="an imported key"):
        check_imported(key)
    check_imported("sk-0123456789abc")
