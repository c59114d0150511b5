"""The page of fields is that of the contract's types, and the types have every field that travels."""

from __future__ import annotations

import typing
from pathlib import Path

import fields_page
import pytest

from dynamo.contract import chunks
from dynamo.protocol.worker_request import (
    OutputFields,
    PlannedRequest,
    RoutingHints,
    SamplingFields,
    StopFields,
    WorkerRequest,
)
from dynamo.worker.chunk_checks import CHUNK_KEYS


def test_the_tables_of_fields_are_those_of_the_types() -> None:
    page = fields_page.PAGE.read_text()
    assert fields_page.written(page) == page, "docs/fields.md is not current: make docs"


def test_a_field_without_words_and_a_table_without_a_place_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="the page has tables"):
        fields_page.written("no tables\n")
    source = tmp_path / "chunks.py"
    source.write_text("class StopConditions:\n    max_tokens: int\n")
    monkeypatch.setattr(fields_page, "SOURCE", source)
    with pytest.raises(ValueError, match=r"chunks.py:2: StopConditions.max_tokens has no comment"):
        fields_page.table("StopConditions")


def test_every_type_of_the_contract_that_travels_has_a_table() -> None:
    types = {name for name, found in vars(chunks).items() if typing.is_typeddict(found)}
    assert types == {*fields_page.REQUEST, *fields_page.CHUNK}


def test_a_request_has_no_field_that_its_type_does_not_name() -> None:
    planned = PlannedRequest(
        media_io_kwargs={}, agent_context={}, image_cache_scope="one", requires_reasoning=True
    ).for_prompt([1])
    named = set(chunks.GenerateRequest.__annotations__)
    assert planned.keys() - named == set()
    assert set(WorkerRequest.__annotations__) - named == set()
    assert set(StopFields.__struct_fields__) == set(chunks.StopConditions.__annotations__)
    assert set(SamplingFields.__struct_fields__) == set(chunks.SamplingOptions.__annotations__)
    assert set(OutputFields.__struct_fields__) == set(chunks.OutputOptions.__annotations__)
    assert set(RoutingHints.__annotations__) - set(chunks.Routing.__annotations__) == set()


def test_a_chunk_s_type_names_exactly_what_travels() -> None:
    assert set(chunks.GenerateChunk.__annotations__) == CHUNK_KEYS | {"token_ids", "index", "finish_reason"}
