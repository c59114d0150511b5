"""Between a request and its charge: the tokens it may need once its prompt is known, and those it took in the end."""

from __future__ import annotations

from typing import Any, Final

from dynamo.frontend.admission.model import Shed
from dynamo.frontend.admission.process import Admission
from dynamo.frontend.base.access import Caller
from dynamo.frontend.base.shares import HELD_SHORTLY, Shares, fits_share
from dynamo.frontend.models.length_limits import LengthLimits
from dynamo.frontend.parts.keys.identity import Identity
from dynamo.frontend.parts.keys.quotas import Charge, Quotas, TokenDemand, TokenUse
from dynamo.frontend.pipeline.exchange import ANSWER_HEADERS, Exchange, PartSlot
from dynamo.frontend.pipeline.outcome import CLIENT_LEFT, Outcome, RequestListener
from dynamo.frontend.pipeline.plan import Plan
from dynamo.frontend.pipeline.reading import Resolved
from dynamo.frontend.pipeline.result_plan import ResultPlan
from dynamo.frontend.pipeline.text_generation import TextPlan
from dynamo.protocol.openai.errors import RequestRejected

CHARGE: Final[PartSlot[Charge]] = PartSlot("charge of the key")
PLACE_OF: Final[PartSlot[str]] = PartSlot("owner of the place")

_REFUSED: Final = frozenset(range(400, 500)) - {429, CLIENT_LEFT}

_NAMES: Final = ("max_completion_tokens", "max_tokens")  # of OpenAI's bodies; the first one counts


def reserve_tokens(charge: Charge, plan: Plan, limits: LengthLimits) -> None:
    """Reserve what a request may need of its key's limits, and hold its answers to what the key may have.

    Raises RequestRejected: 400 for more than the key may have in one request, 429 where a limit or budget has not enough.
    """
    if isinstance(plan, ResultPlan):
        charge.reserve(TokenDemand(plan.input_tokens, 0))
        return
    prompts = plan.prompts
    if len(prompts) == 1:
        longest = input_tokens = len(prompts[0])
    else:
        longest, input_tokens = max(map(len, prompts), default=0), sum(map(len, prompts))
    most = limits.context if limits.combined is None else limits.combined
    if limits.context is not None and most is not None and limits.context < most:
        most = limits.context
    if isinstance(plan, TextPlan):
        # The words of a prompt are counted by its worker. Bytes are more than its tokens, and are given back at the end.
        input_tokens = plan.tally().prompt_tokens
        asked = next((body[name] for body in plan.bodies[:1] for name in _NAMES if body.get(name) is not None), None)
    else:
        asked = plan.fields.stop_conditions.max_tokens
    room = None if most is None else max(1, most - longest)
    cap = charge.reserve(TokenDemand(input_tokens, asked, len(prompts) * plan.choices, room))
    if cap is None or cap == asked:
        return
    if isinstance(plan, TextPlan):
        for body in plan.bodies:
            _limit_text(body, cap)
    else:
        plan.fields.stop_conditions.max_tokens = cap


def _limit_text(body: dict[str, Any], cap: int) -> None:
    named = [name for name in _NAMES if body.get(name) is not None]
    for name in named or _NAMES[1:]:
        body[name] = cap


class PlaceShares:
    """A share of the places of this frontend for each owner. Places come back within seconds, so most may go to one owner."""

    def __init__(self, admission: Admission, shares: Shares) -> None:
        self._admission, self._has_others = admission, shares.has_others
        self._taken = shares.bound("requests in flight", admission.limit, weight=None)

    def take(self, owner: str) -> None:
        """Take a place of an owner's share. Raises the 429 where that has none."""
        own, admission = self._taken.of(owner), self._admission
        # The other processes of a group are taken to have as many requests of this owner. Without a free place the
        # admission refuses, whatever the owner has.
        is_over = own and not fits_share((own + 1) * admission.processes, (free := admission.free()) - 1, HELD_SHORTLY)
        if is_over and free > 0 and self._has_others():  # in this order, as nearly no request is over
            text = (
                f"Too many requests at once: of the {admission.limit} places of this frontend some are kept free "
                "for other projects. Try again when a request has ended"
            )
            raise RequestRejected(429, text, code="share_exceeded", retry_after_seconds=1)
        self._taken.note(owner)

    def give_back(self, owner: str) -> None:
        """Give a place back."""
        self._taken.give_back(owner)


class KeyCharges(RequestListener):
    """Holds each request with a key to the limits of that key, and charges it for what it took."""

    def __init__(self, quotas: Quotas, places: PlaceShares) -> None:
        self._quotas, self._places = quotas, places

    def arrived(self, exchange: Exchange) -> None:
        """Open the charge of a request, which takes a place of its owner's share. Raises the 429 where that has none."""
        identity = exchange.identity
        if isinstance(identity, Identity):
            charge = self._quotas.open(identity, exchange.arrival.endpoint)
            exchange.keep(CHARGE, charge)
            show_limits(exchange, charge)
            charge.check_requests()
            try:
                self._places.take(identity.owner)
            except RequestRejected:
                self._quotas.on_refused(identity, "share")
                raise
            exchange.keep(PLACE_OF, identity.owner)

    def began(self, exchange: Exchange, resolved: Resolved) -> None:
        """Take a place and a request. Raises the 429 of a limit that has none."""
        charge = exchange.of(CHARGE)
        if charge is not None:
            charge.enter(resolved.model.name)
            if exchange.of(ANSWER_HEADERS) is None:  # the key may have limits for this model alone
                show_limits(exchange, charge)

    def planned(self, exchange: Exchange, resolved: Resolved, plan: Plan) -> None:
        """Reserve the tokens that a request may need. Raises as `reserve_tokens`."""
        charge = exchange.of(CHARGE)
        if charge is not None:
            reserve_tokens(charge, plan, resolved.model.length_limits)

    def ended(self, exchange: Exchange, outcome: Outcome) -> None:
        """End the charge with what the request took: nothing where no worker got it, else its prompt and what was made."""
        charge = exchange.of(CHARGE)
        if (charge is None or not charge.model) and outcome.status in _REFUSED:
            self._count_refused(exchange.identity)
        if charge is None:
            return
        if (owner := exchange.of(PLACE_OF)) is not None:
            self._places.give_back(owner)
        if isinstance(outcome.why, Shed):
            charge.forgive()
        charge.has_succeeded = outcome.is_answered
        seconds, usage = outcome.at - exchange.arrival.at, outcome.usage
        if not (outcome.instances or usage.output_tokens):
            charge.close(TokenUse(), seconds)
        else:
            cached, reasoning = usage.cached_tokens or 0, usage.reasoning_tokens or 0
            used = TokenUse(usage.prompt_tokens, cached, usage.output_tokens, reasoning, usage.images)
            charge.close(used, seconds)

    def _count_refused(self, identity: Caller | None) -> None:
        """Count a request that was refused before its model was known: refusing is work, too."""
        if isinstance(identity, Identity):
            self._quotas.count_refused(identity)


def show_limits(exchange: Exchange, charge: Charge) -> None:
    """Show how far the rates of the key are used in every answer, where there are any."""
    if charge.is_limited:
        exchange.keep(ANSWER_HEADERS, charge.rate_headers)
