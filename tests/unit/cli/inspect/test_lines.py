"""Tables and summaries: they fit, they say all, and what clients write stays text."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dynamo.cli.inspect.detail import decision_lines, detail_lines, record_lines
from dynamo.cli.inspect.figures import sparkline
from dynamo.cli.inspect.lines import TonedText as Part
from dynamo.cli.inspect.lines import flow, heading, laid_out, plain_text, width_of_line
from dynamo.cli.inspect.overview import summary_lines
from dynamo.cli.inspect.plain import picture_lines, table_lines
from dynamo.cli.inspect.printable import printable
from dynamo.cli.inspect.tables import FORMS
from dynamo.protocol.inspector.views import CountersView, Picture, RequestDetail
from support.cases import each_case
from support.inspector_pictures import (
    DETAIL,
    ERRORS,
    FLEET,
    NOW_MS,
    ROUTING,
    STREAMS,
    WORKERS,
    demo_picture,
    many_streams,
)
from support.properties import examples

HOSTILE = "\x1b[31m\u202e[bold]</b>\n漢字\u0301\u0301\u0301\u0301\u200b\x9b2J\ufdfd\x00" + "W" * 300


def shown(picture: Picture, width: int | None, *views: str) -> str:
    return "\n".join(map(plain_text, picture_lines(picture, views or tuple(FORMS), width)))


def with_texts(plain: Any, text: str) -> Any:
    """The same values with every text replaced but ids of states."""
    if isinstance(plain, str):
        return text
    if isinstance(plain, dict):
        return {
            with_texts(key, text) if key in ("agg", "prefill") else key: with_texts(one, text)
            for key, one in plain.items()
        }
    return [with_texts(one, text) for one in plain] if isinstance(plain, list) else plain


@each_case("width", [40, 60, 80, 100, 120, 132, 160, 200, 300])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for picture in (demo_picture(), msgspec.convert(with_texts(msgspec.to_builtins(demo_picture()), HOSTILE), Picture)):
        too_wide = [
            line for line in picture_lines(picture, tuple(FORMS), width)[5:] if width_of_line(line) > max(width, 80)
        ]
        assert [plain_text(line) for line in too_wide] == []


@examples(80)
@given(st.text(max_size=20) | st.just(HOSTILE), st.sampled_from([80, 200, None]))
def test_what_clients_write_is_shown_as_text(text: str, width: int | None) -> None:
    picture = msgspec.convert(with_texts(msgspec.to_builtins(demo_picture()), text), Picture)
    detail = msgspec.convert(with_texts(msgspec.to_builtins(DETAIL), text), RequestDetail)
    lines = picture_lines(picture, tuple(FORMS), width)
    lines += detail_lines(msgspec.structs.replace(detail, content={text: text}), NOW_MS, width or 120)
    lines += record_lines(text, (picture.errors or [])[0], NOW_MS, width or 120)
    for line in lines:
        for piece in line:
            assert printable(piece.text) == piece.text


def test_in_80_columns_the_worst_can_be_read() -> None:
    text = shown(demo_picture(), 80, "workers", "streams")
    for word in ("quarantined", "connect ref", "STALLED", "12.4s", "97", "3/16", "2 frontends", "p99 412"):
        assert word in text


def test_in_a_pipe_nothing_is_cut() -> None:
    text = shown(demo_picture(), None)
    assert "…" not in text
    for word in ("694d9a3c5d8f7ea1", "connect refused, quarantined for 3s more", "worker <id> lost after <n> tokens",
                 "no decode worker: a model with prefill workers needs one", "61,440/0"):  # fmt: skip
        assert word in text


def test_a_sample_says_of_how_many() -> None:
    picture = demo_picture(streams=many_streams(100), totals={"streams": 3412})
    assert "Streams 100 of 3,412" in shown(picture, 100, "streams")


def test_what_is_not_known_is_a_dash() -> None:
    picture = Picture(seq=1, taken_ms=NOW_MS, fleet=msgspec.structs.replace(FLEET, now=CountersView(), history={}))
    text = shown(picture, 120)
    for words in ("TTFT p50 - p99 - ms", "err -", "kv -", "hit -"):
        assert words in text


def test_a_member_that_did_not_answer_is_named() -> None:
    assert "! without fe-2, fe-3: no answer in time" in shown(demo_picture(partial=["fe-2", "fe-3"]), 100)


@each_case(
    ("change", "mark"),
    [({"read_only": True}, "[RO]"), ({"role": "viewer"}, "[RO]"), ({"role": "operator"}, "role: operator")],
)
def test_read_only_is_marked(change: dict[str, Any], mark: str) -> None:
    assert mark in shown(demo_picture(fleet=msgspec.structs.replace(FLEET, **change)), 100)


def test_an_empty_table_says_so() -> None:
    assert [plain_text(line) for line in table_lines(demo_picture(streams=[]), "streams", 80)] == [
        " no request is in flight"
    ]


def test_columns_go_by_importance_and_come_back() -> None:
    names = {
        width: [column.title for column, _ in laid_out(FORMS["streams"].columns, width)] for width in (60, 80, 160)
    }
    assert set(names[60]) < set(names[80]) < set(names[160])
    assert {"REQUEST", "PHASE", "AGE", "LAST"} <= set(names[60])


def test_details_grow_only_into_what_the_others_leave() -> None:
    form, message = FORMS["errors"], "the engine failed in a way that takes seventy letters to tell, as here"
    row = msgspec.structs.replace(ERRORS[0], message=message, example="chatcmpl-9de67852-c5ed-4026-a8e8-a85000000000")
    placed = form.at(172, form.longest([row], NOW_MS, [0] * len(form.columns)))
    text = plain_text(placed.row(row, NOW_MS))
    assert message in text
    assert "chatcmpl-9de" in text
    assert row.example not in text


def test_details_go_before_a_text_of_more_importance_is_cut() -> None:
    form = FORMS["workers"]

    def titles(note: str) -> list[str]:
        rows = [msgspec.structs.replace(WORKERS[0], note=note, state="draining")]
        placed = form.at(160, form.longest(rows, NOW_MS, [0] * len(form.columns)))
        assert plain_text(placed.row(rows[0], NOW_MS)).rstrip().endswith(note)
        return [column.title for column, _ in placed.columns]

    assert {"WIRE", "ADDRESS"} <= set(titles(""))
    assert {"WIRE", "ADDRESS"}.isdisjoint(titles("drain by ops: new kernel and new disks, 14 running"))


def test_columns_grow_no_further_than_their_texts() -> None:
    form = FORMS["streams"]
    placed = form.at(200, form.longest(STREAMS, NOW_MS, [0] * len(form.columns)))
    widths = {column.title: width for column, width in placed.columns}
    assert widths["REQUEST"] == len("chatcmpl-52a1f00d")


def test_a_request_is_told_in_full() -> None:
    text = "\n".join(plain_text(line) for line in detail_lines(DETAIL, NOW_MS, 120))
    for words in ("chatcmpl-9c03beef  decode  STALLED", "queued 1.20s", "prefill 402ms", "silent 12.4s", "decided by: lowest cost",
                  "◀ chosen", "left out: quarantined (connect refused 12:02:58)", "unavailable (CannotConnect)  then demo", "limit 4", "temperature 0.7", "seed -",
                  sparkline(DETAIL.token_rates, 18), "first token", "text is not shown"):  # fmt: skip
        assert words in text


def test_a_bar_of_phases_is_as_wide_as_the_screen() -> None:
    for width in (40, 80, 200):
        bar = detail_lines(DETAIL, NOW_MS, width)
        line = next(one for one in bar if "▒" in plain_text(one) and "prefill" not in plain_text(one))
        assert width_of_line(line) == width - 1
        assert {piece.text[0] for piece in line[1:]} == set("·-+░▒█")  # each phase has a cell


def test_a_request_that_is_forgotten_says_so() -> None:
    assert "nothing is known" in plain_text(detail_lines(RequestDetail(), NOW_MS, 80)[0])


def test_candidates_beyond_those_that_were_kept_are_counted() -> None:
    decision = msgspec.structs.replace(ROUTING[0], candidates_in_all=400)
    assert "candidates 3 of 400" in "\n".join(map(plain_text, decision_lines(decision, 100)))


@examples(100)
@given(st.lists(st.text("ab ", min_size=1, max_size=30), max_size=12), st.integers(40, 90))
def test_parts_flow_onto_lines_that_fit(texts: list[str], width: int) -> None:
    lines = flow([(Part(text),) for text in texts], width)
    assert all(width_of_line(line) <= width for line in lines)
    assert sum(len(line) for line in lines) >= len(texts)


@each_case("width", [20, 40, 80])
def test_a_heading_is_as_wide_as_the_screen(width: int) -> None:
    assert width_of_line(heading("Streams 62, 3 stalled", width, "/ model:demo age>5")) == width


def test_the_summary_has_the_memory_of_models_only_where_they_are_loaded_on_demand() -> None:
    for used, budget, words in (
        (905 << 20, 1200 << 20, "mem 905 MiB/1.2 GiB"),
        (905 << 20, None, "mem 905 MiB"),
        (None, None, ""),
    ):
        fleet = msgspec.structs.replace(FLEET, resident_bytes=used, budget_bytes=budget)
        shown = "".join(map(plain_text, summary_lines(demo_picture(fleet=fleet), NOW_MS, 200)))
        assert shown.partition("mem ")[2] == words.removeprefix("mem ")
