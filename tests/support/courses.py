"""Every course that a test of a folder drives is validated after each of its steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dynamo.router.dispatch.course import Course, Event, Instruction

__all__ = ["valid_courses"]


@pytest.fixture(autouse=True, scope="session")
def valid_courses() -> Iterator[None]:
    """Validate each course of this process after every step."""
    step = Course.step

    def validated(course: Course, event: Event) -> Instruction:
        instruction = step(course, event)
        course.validate()
        return instruction

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Course, "step", validated)
        yield
