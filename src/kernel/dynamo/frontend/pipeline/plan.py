"""A request as it is to be served, what came of it so far, and the two together while it is served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from dynamo.errors import DynamoException
from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.pipeline.parsing import OutputPlan
from dynamo.protocol.openai.chat_options import ChatOptions
from dynamo.protocol.worker_request import PlannedRequest
from dynamo.router.dispatch.failover import DispatchLimits, DispatchRequest
from dynamo.router.dispatch.record import DispatchRecord
from dynamo.router.dispatch.stall_detector import StallDetector
from dynamo.router.dispatch.stream import Dispatcher
from dynamo.text.model import TextModel

if TYPE_CHECKING:
    from dynamo.frontend.pipeline.tap import RequestTap

_DEFAULT_LIMITS: Final = DispatchLimits()


class GenerationModel(Protocol):
    """What is needed of a `ServedModel`."""

    text: TextModel
    dispatcher: Dispatcher


class MovableStream(Protocol):
    """What is needed of the `RoutedStream` of one choice."""

    is_reading: bool
    """Whether it waits for the worker, and not for the reader."""

    @property
    def request(self) -> DispatchRequest: ...

    @property
    def tokens(self) -> int: ...

    @property
    def attempts(self) -> int: ...

    @property
    def instance_id(self) -> int | None:
        """The worker that has it now; None: none has."""

    def fail_over(self, error: DynamoException) -> bool: ...


MAX_REPORTED_TOKENS: Final = 2**31 - 1


def reported_count(value: object) -> int | None:
    """Return a count of tokens that a worker reports, or None for what cannot be one.

    Places, budgets and metrics are reckoned with it: a negative or an endless count would be believed by all of them.
    """
    return value if type(value) is int and 0 <= value <= MAX_REPORTED_TOKENS else None


class Tally(DispatchRecord, eq=False):
    """What came of a request so far: its usage, and the workers that served it."""

    prompt_tokens: int
    image_tokens: int = 0  # of `prompt_tokens`, those of images; 0 where they are not known
    images_made: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int | None = None  # of `completion_tokens`; None: nothing counts them
    finish_reason: str | None = None  # of the choice that ended last
    cached_tokens: int | None = None  # of `prompt_tokens`, what the workers had cached; None: none of them reported it
    _cached: dict[int, int] = field(default_factory=dict)  # prompt -> the most that was reported of it

    @property
    def is_usage_known(self) -> bool:
        """Whether the counts are tokens of the model, and may be shown as usage."""
        return True

    def note_images(self, tokens: int, placeholders: int) -> None:
        """Take over how many tokens the images of the prompt become in place of their placeholders."""
        self.image_tokens = tokens
        self.prompt_tokens += tokens - placeholders

    def note_cached(self, prompt_index: int, tokens: int) -> None:
        """Take over what a worker reports. Choices share their prompt and some engines repeat themselves: the most counts."""
        self._cached[prompt_index] = max(tokens, self._cached.get(prompt_index, 0))
        self.cached_tokens = sum(self._cached.values())


class Plan(Struct, frozen=True):
    """A request as it is to be served. Made once, before a worker is chosen.

    `fields` is the worker's request without its prompt; it is written and sent once for each choice. Choice i of prompt p has
    index `p * choices + i`.
    """

    fields: PlannedRequest
    prompts: Sequence[list[int]]
    choices: int = 1  # per prompt
    pinned_instance_id: int | None = None
    limits: DispatchLimits = _DEFAULT_LIMITS
    options: ChatOptions | None = None  # of a chat request
    parsing: OutputPlan | None = None  # how the text is read; None: it is shown as it comes
    is_query: bool = False  # only reports where the request would go

    def reading(self, parsing: OutputPlan) -> Plan:
        """Return this plan with how the text of its answer is read."""
        return replace(self, parsing=parsing)

    @property
    def streams_per_prompt(self) -> int:
        """How many requests to workers each prompt becomes."""
        return self.choices

    @property
    def is_single(self) -> bool:
        """Whether one request to a worker serves all of it."""
        return len(self.prompts) * self.streams_per_prompt == 1

    def tally(self) -> Tally:
        """Return an empty tally of it."""
        return Tally(sum(map(len, self.prompts)))


class WorkRequest:
    """One request while it is served: its plan, what came of it so far, and the streams that run."""

    __slots__ = ("plan", "running", "stall_detector", "tally", "tap", "timer")

    def __init__(self, plan: Plan, timer: StageTimer, stall_detector: StallDetector | None = None) -> None:
        """`stall_detector` moves the request when it makes no progress; None: nothing does."""
        self.plan = plan
        self.tally = plan.tally()
        self.timer = timer
        self.stall_detector = stall_detector
        self.tap: RequestTap | None = None  # what notes the answer; None: it is not recorded
        self.running: tuple[MovableStream, ...] = ()  # one for each choice that runs

    def fail_over_idle_streams(self, error: DynamoException) -> bool:
        """Move every choice to another worker, as none has sent anything for too long; False when no choice can move."""
        moved = [stream.fail_over(error) for stream in self.running]  # all of them, not only the first that can
        return any(moved)
