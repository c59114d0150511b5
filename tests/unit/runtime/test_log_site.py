"""A record of a `LogSite` is what `Logger.log` makes, but for the search of its place."""

from __future__ import annotations

import io
import logging
import re
import threading
from collections.abc import Iterator

import pytest

from dynamo.runtime.observe.log_records import LogSite
from dynamo.runtime.observe.logging import LogFilter, LoggingSettings, LogHandler, log_span

LOGGER = logging.getLogger("test.log_site")


class Kept(logging.Handler):
    """Keeps the records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    yield handler
    LOGGER.removeHandler(handler)
    LOGGER.setLevel(logging.NOTSET)


def test_a_record_has_every_member_of_one_that_the_logger_makes(kept: Kept) -> None:
    site = LogSite(LOGGER, "done", "test_a_record_has_every_member_of_one_that_the_logger_makes")
    site.log(logging.INFO, {"request_id": "r"})
    LOGGER.info("done", extra={"request_id": "r"})
    made, usual = (vars(record) for record in kept.records)
    assert set(made) == set(usual)
    times = {"created", "msecs", "relativeCreated", "lineno"}
    assert {key: made[key] for key in made if key not in times} == {
        key: usual[key] for key in usual if key not in times
    }
    assert 0 <= usual["created"] - made["created"] < 60
    assert made["msecs"] == int((made["created"] % 1) * 1000)
    assert (
        abs((made["relativeCreated"] - usual["relativeCreated"]) / 1000 - (made["created"] - usual["created"])) < 0.01
    )


def test_records_do_not_share_fields(kept: Kept) -> None:
    site = LogSite(LOGGER, "done", "f")
    site.log(logging.INFO, {"first": 1})
    site.log(logging.WARNING, {"second": 2})
    first, second = kept.records
    assert (first.levelname, second.levelname) == ("INFO", "WARNING")
    assert not hasattr(first, "second")
    assert not hasattr(second, "first")
    assert first.created <= second.created


def test_a_record_names_the_thread_that_logged_it(kept: Kept) -> None:
    site = LogSite(LOGGER, "done", "f")
    site.log(logging.INFO, {})
    other = threading.Thread(target=site.log, args=(logging.INFO, {}), name="another")
    other.start()
    other.join()
    assert [record.threadName for record in kept.records] == [threading.current_thread().name, "another"]


def test_a_factory_of_somebody_else_makes_the_records(kept: Kept) -> None:
    class Own(logging.LogRecord):
        """Somebody's own record."""

    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(Own)
    try:
        LogSite(LOGGER, "done", "f").log(logging.INFO, {"request_id": "r"})
    finally:
        logging.setLogRecordFactory(before)
    (record,) = kept.records
    assert isinstance(record, Own)
    assert vars(record)["request_id"] == "r"


@pytest.mark.parametrize(
    "log", ["info", "debug", "warn", "test.log_site=error", "off,test.log_site=trace", "test[s]=info"]
)
@pytest.mark.parametrize("jsonl", [False, True])
@pytest.mark.parametrize("ansi", [False, True])
def test_a_line_of_our_own_handler_is_the_one_that_the_record_would_be(log: str, jsonl: bool, ansi: bool) -> None:
    fields = {"route": "/v1", "elapsed_ms": 1.25, "odd": 'a "b"\n', "none": None}
    lines = []
    for through_site in (True, False):
        stream = io.StringIO()
        settings = LoggingSettings(filter=LogFilter.parse(log), jsonl=jsonl, ansi=ansi)
        handler = LogHandler(settings, prefix="[f] ", stream=stream)
        LOGGER.addHandler(handler)
        LOGGER.propagate = False
        LOGGER.setLevel(logging.DEBUG)
        try:
            with log_span("s", request_id="r-1"):
                if through_site:
                    LogSite(LOGGER, "done", "f").log(logging.INFO, fields)
                else:
                    LOGGER.info("done", extra=fields)
        finally:
            LOGGER.removeHandler(handler)
            LOGGER.propagate = True
            LOGGER.setLevel(logging.NOTSET)
        lines.append(re.sub(r"\d{4}-\d\d-\d\dT[0-9:.]+Z|\"line\":\d+", "", stream.getvalue()))
    assert lines[0] == lines[1]
    assert bool(lines[0]) == (log in ("info", "debug", "off,test.log_site=trace", "test[s]=info"))


def test_a_record_is_made_where_something_else_sees_it(kept: Kept) -> None:
    """A second handler further up, a filter of the handler, and one of the logger."""
    stream = io.StringIO()
    handler, site, seen = LogHandler(stream=stream), LogSite(LOGGER, "done", "f"), list[logging.LogRecord]()
    LOGGER.addHandler(handler)
    try:
        site.log(logging.INFO, {"n": 1})
        assert len(kept.records) == 1
        LOGGER.removeHandler(kept)
        LOGGER.propagate = False
        handler.addFilter(lambda record: bool(seen.append(record)) or True)
        site.log(logging.INFO, {"n": 2})
        assert len(seen) == 1
        handler.filters.clear()
        LOGGER.addFilter(lambda record: False)
        site.log(logging.INFO, {"n": 3})
    finally:
        LOGGER.filters.clear()
        LOGGER.propagate = True
        LOGGER.removeHandler(handler)
    assert [line.rsplit("=")[-1] for line in stream.getvalue().splitlines()] == ["1", "2"]


def test_a_stream_that_fails_is_reported_as_for_any_record(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    stream.close()
    handler = LogHandler(stream=stream)
    LOGGER.addHandler(handler)
    LOGGER.propagate = False
    LOGGER.setLevel(logging.INFO)
    try:
        LogSite(LOGGER, "done", "f").log(logging.INFO, {})
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.propagate = True
        LOGGER.setLevel(logging.NOTSET)
    assert "Logging error" in capsys.readouterr().err
