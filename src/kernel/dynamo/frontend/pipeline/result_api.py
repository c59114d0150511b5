"""What an inference API with one result is: how a body is read, what work it means, and the body that goes back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

from msgspec import Struct

from dynamo.frontend.base.offload import Offload
from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.pipeline.api import Api
from dynamo.frontend.pipeline.plan import Tally
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.frontend.pipeline.result_plan import ResultPlan
from dynamo.frontend.pipeline.sink import HeaderPairs

R = TypeVar("R", bound=Any)


class ResultAnswer(Struct, frozen=True):
    """What the workers answered, and what else an answer may show."""

    id: str
    model: ServedModel
    plan: ResultPlan
    tally: Tally  # `prompt_tokens` may be corrected by what workers report
    results: Sequence[Any]  # of each part of the plan, in their order, unchecked


class ResultReply(Struct, frozen=True):
    """A whole answer with status 200."""

    body: bytes
    headers: HeaderPairs = ()
    content_type: bytes = b"application/json"


class ResultApi(Api[R]):
    """One whose answers are one result: nothing is shown before all of it is there."""

    @abstractmethod
    async def plan(self, preprocessor: Preprocessor, request: R, model: ServedModel, timer: StageTimer) -> ResultPlan:
        """Return the work. Raises `RequestRejected` for what this model cannot do."""

    @abstractmethod
    async def render(self, offload: Offload, request: R, answer: ResultAnswer) -> ResultReply:
        """Return the answer; long work goes to `offload`. Raises `Unknown` for results that break the contract."""
