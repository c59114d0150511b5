"""A record of a `LogSite` is what `Logger.log` makes, but for the search of its place."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from dynamo.runtime.log_site import LogSite

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
