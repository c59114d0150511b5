from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo.text.output import (
    CallArguments,
    CallBegan,
    CallDropped,
    CallEnded,
    Content,
    JoinedCall,
    OutputEvent,
    Reasoning,
    joined,
)

WHOLE_CALL = (CallBegan("f", "1"), CallArguments("{"), CallArguments("}"), CallEnded())
RUNS = st.lists(
    st.one_of(
        st.builds(lambda text: (Content(text),), st.text(min_size=1, max_size=3)),
        st.builds(lambda text: (Reasoning(text),), st.text(min_size=1, max_size=3)),
        st.just(WHOLE_CALL),
        st.builds(lambda text: (CallBegan("g", "2"), CallArguments("{"), CallDropped(text)), st.text(max_size=3)),
    ),
    max_size=8,
)


def test_the_parts_of_an_answer_stand_in_the_order_in_which_they_came() -> None:
    events = [Reasoning("why"), Content("a"), Content("b"), *WHOLE_CALL, Content("c"), Reasoning("again")]
    found = joined(events)
    call = JoinedCall("f", "{}", True, "1")
    assert found.parts == [Reasoning("why"), Content("ab"), call, Content("c"), Reasoning("again")]
    assert (found.content, found.reasoning, found.calls) == ("abc", "whyagain", [call])


def test_a_dropped_call_is_text_where_it_stood() -> None:
    events = [Content("a"), CallBegan("g", "2"), CallArguments("{"), CallDropped("<g>{"), Content("b")]
    assert joined(events).parts == [Content("a<g>{b")]


@given(RUNS)
def test_the_parts_say_the_same_as_the_kinds_apart(runs: list[tuple[OutputEvent, ...]]) -> None:
    found = joined(event for run in runs for event in run)
    assert "".join(part.text for part in found.parts if isinstance(part, Content)) == found.content
    assert "".join(part.text for part in found.parts if isinstance(part, Reasoning)) == found.reasoning
    assert [part for part in found.parts if isinstance(part, JoinedCall)] == found.calls
    for before, after in zip(found.parts, found.parts[1:], strict=False):
        assert type(before) is not type(after) or isinstance(before, JoinedCall)
