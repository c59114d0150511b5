"""Names and keywords of the native system that code written for it uses."""

from __future__ import annotations

import pytest

from dynamo.errors import InvalidArgument
from dynamo.llm import RouterMode
from dynamo.runtime.client import Annotated


@pytest.mark.parametrize(
    ("native", "ours"),
    [
        ("RoundRobin", "ROUND_ROBIN"),
        ("Random", "RANDOM"),
        ("PowerOfTwoChoices", "POWER_OF_TWO"),
        ("LeastLoaded", "LEAST_LOADED"),
        ("Direct", "DIRECT"),
        ("DeviceAwareWeighted", "DEVICE_AWARE_WEIGHTED"),
    ],
)
def test_a_router_mode_has_two_spellings(native: str, ours: str) -> None:
    assert getattr(RouterMode, native) is getattr(RouterMode, ours)
    assert native not in [mode.name for mode in RouterMode]


def test_the_kv_router_mode_can_be_named_but_not_used() -> None:
    assert RouterMode.Random != RouterMode.KV
    with pytest.raises(InvalidArgument, match="kv"):
        RouterMode.of(RouterMode.KV)


@pytest.mark.parametrize(("event", "is_error"), [(None, False), ("note", False), ("error", True)])
def test_an_annotated_item_reports_whether_it_is_an_error(event: str | None, is_error: bool) -> None:
    item = Annotated({} if event is None else {"event": event, "comment": ["it broke"]})
    assert item.is_error() is is_error
