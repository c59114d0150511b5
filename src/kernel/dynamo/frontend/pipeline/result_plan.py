"""A request for one result, as it is to be served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynamo.frontend.pipeline.plan import Plan, Tally


class ResultPlan(Plan, frozen=True):
    """The requests to workers that it becomes. Each is answered with one object."""

    parts: Sequence[Mapping[str, object]] = ()
    input_tokens: int = 0  # of all parts; 0 where nothing counts them here

    def tally(self) -> Tally:
        return Tally(self.input_tokens)
