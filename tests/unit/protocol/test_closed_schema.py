from __future__ import annotations

import copy
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.protocol.openai.closed_schema import TIGHT_WHITE_SPACE, bounded_guidance, closed_schema
from support.cases import each_case
from support.properties import examples
from support.random_schemas import random_schema

A = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
B = {"properties": {"b": {"type": "boolean"}}}


def valid(schema: Any, instance: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(instance))


def opened(schema: Any) -> Any:
    """The schema as most clients would have written it: without `additionalProperties`."""
    if isinstance(schema, list):
        return [opened(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: opened(value) for key, value in schema.items() if key != "additionalProperties"}


@each_case("seed", range(150))
def test_closing_gives_back_what_clients_leave_out(seed: int) -> None:
    schema = random_schema(random.Random(seed))
    left_out = opened(schema)
    before = copy.deepcopy(left_out)
    assert closed_schema(left_out) == schema
    assert left_out == before
    assert closed_schema(schema) == schema


NAMES = ["a", "b", "c"]
SCHEMAS = st.recursive(
    st.sampled_from([{"type": "boolean"}, {"type": "integer"}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {}, True]),
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)},
            optional={
                "required": st.lists(st.sampled_from(NAMES), unique=True, max_size=2),
                "additionalProperties": st.just(True) | inner,
                "anyOf": st.lists(inner, min_size=1, max_size=2),
                "allOf": st.lists(inner, min_size=1, max_size=2),
            },
        ),
        *(
            st.fixed_dictionaries({keyword: st.lists(inner, min_size=1, max_size=2)})
            for keyword in ("anyOf", "oneOf", "allOf")
        ),
        st.fixed_dictionaries({"not": inner}),
        st.fixed_dictionaries({"if": inner, "then": inner}),
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
    ),
    max_leaves=6,
)
INSTANCES = st.recursive(
    st.booleans() | st.integers(0, 2),
    lambda inner: st.dictionaries(st.sampled_from([*NAMES, "other"]), inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=5,
)
OBJECT_SCHEMAS = st.fixed_dictionaries({"properties": st.dictionaries(st.sampled_from(NAMES), SCHEMAS, max_size=2)})


def without_others(schema: Any, instance: Any) -> bool:
    """Whether no member of any object is called `other`, which no schema here lists."""
    if isinstance(instance, dict):
        return "other" not in instance and all(without_others(schema, value) for value in instance.values())
    return not isinstance(instance, list) or all(without_others(schema, value) for value in instance)


@examples(300)
@given(
    schema=SCHEMAS.filter(lambda one: isinstance(one, dict)),
    defs=st.tuples(OBJECT_SCHEMAS, OBJECT_SCHEMAS),
    instance=INSTANCES,
)
@pytest.mark.process  # computes for seconds
def test_what_a_closed_schema_admits_the_clients_schema_admits(schema: Any, defs: Any, instance: Any) -> None:
    # References in a circle make a schema that no validator reads.
    definitions = {"a": opened_refs(defs[0]), "b": opened_refs(defs[1])}
    whole = {**schema, "$defs": definitions}
    closed = closed_schema(whole)
    if "not" not in str(whole) and "oneOf" not in str(whole) and "'if'" not in str(whole) and valid(closed, instance):
        assert valid(whole, instance)
    assert closed_schema(closed) == closed


def opened_refs(schema: Any) -> Any:
    if isinstance(schema, list):
        return [opened_refs(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {} if "$ref" in schema else {key: opened_refs(value) for key, value in schema.items()}


@each_case(
    ("schema", "admitted", "refused"),
    [
        (A, {"a": True}, {"a": True, "x": 1}),
        ({**A, "additionalProperties": True}, {"a": True, "x": 1}, {}),
        ({"type": "object"}, {"x": 1}, []),  # a free object stays free
        ({"anyOf": [A, {**B, "required": ["b"]}]}, {"b": True}, {"a": True, "b": True}),
        ({"type": "array", "items": A}, [{"a": True}], [{"a": True, "x": 1}]),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, {"a": True}, {"a": True, "x": 1}),
        ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}}, {"a": True}, {"a": True, "x": 1}),
        # Parts that describe one object together stay open: closed they would exclude each other.
        ({"allOf": [A, B]}, {"a": True, "b": True}, {"b": True}),
        ({**A, "allOf": [B]}, {"a": True, "b": True}, {"b": True}),
        ({**A, "anyOf": [B, {"properties": {"c": {}}}]}, {"a": True, "b": True}, {"b": True}),
        ({**A, "anyOf": [{"required": ["a"]}]}, {"a": True}, {"a": True, "x": 1}),
        (
            {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": A, "B": B}},
            {"a": True, "b": True},
            {"b": True},
        ),
        ({**A, "if": A, "then": B}, {"a": True, "b": True}, {"b": True}),
        ({**A, "$ref": "#/$defs/B", "$defs": {"B": B}}, {"a": True, "b": True}, {"b": True}),
        # A property may be called as a keyword is, and a value may look like a schema.
        ({"properties": {"properties": {"type": "object"}}}, {"properties": {"x": 1}}, {"x": 1}),
        ({"enum": [{"properties": {}}]}, {"properties": {}}, {"properties": {}, "additionalProperties": False}),
    ],
)
def test_objects_are_closed_where_closing_keeps_the_meaning(schema: Any, admitted: Any, refused: Any) -> None:
    closed = closed_schema(schema)
    assert valid(schema, admitted)
    assert valid(closed, admitted)
    assert not valid(closed, refused)


def test_white_space_is_tight_unless_the_client_set_a_pattern() -> None:
    tight = {"whitespace_pattern": TIGHT_WHITE_SPACE}
    closed = {**A, "additionalProperties": False}
    assert bounded_guidance({"json": A}, closes_objects=True) == {"json": closed, **tight}
    assert bounded_guidance({"json": A}, closes_objects=False) == {"json": A, **tight}
    own = {"json": A, "whitespace_pattern": " *"}
    assert bounded_guidance(own, closes_objects=False) == own
    assert bounded_guidance({"json": '{"properties": {}}'}, closes_objects=True) == {
        "json": {"properties": {}, "additionalProperties": False},
        **tight,
    }
    assert bounded_guidance({"json": "{"}, closes_objects=True) == {"json": "{", **tight}
    for other in ({"regex": "a"}, {"choice": ["a"]}, {"whitespace_pattern": " "}):
        assert bounded_guidance(other, closes_objects=True) == other
