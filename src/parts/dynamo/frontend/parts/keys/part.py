"""API keys as a part: a door in front of the routes, limits and budgets, and what was used."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, NamedTuple
from urllib.parse import parse_qs

from starlette.types import ASGIApp

from dynamo.errors import InvalidArgument
from dynamo.frontend.admission.model import Reason, Shed
from dynamo.frontend.admission.process import Admission
from dynamo.frontend.base.access import Access, Caller
from dynamo.frontend.base.asgi import Receive, Scope, Send, reply, reply_rejected
from dynamo.frontend.base.settings.keys import KeySettings
from dynamo.frontend.base.shares import HELD_SHORTLY, Shares, fits_share, share_exceeded
from dynamo.frontend.http.routes import GuardedRoute, Site
from dynamo.frontend.http.settings import HttpSettings
from dynamo.frontend.models.model_limits import LengthLimits
from dynamo.frontend.models.settings import ModelSettings
from dynamo.frontend.parts.keys.cluster_limits import EVERY_NAMESPACE, ClusterLimits, SharedStore
from dynamo.frontend.parts.keys.door import KeyDoor
from dynamo.frontend.parts.keys.identity import Identity
from dynamo.frontend.parts.keys.key_store import KeyStore
from dynamo.frontend.parts.keys.limit_table import LimitTable
from dynamo.frontend.parts.keys.metrics import FAMILIES, KeyMetrics
from dynamo.frontend.parts.keys.quotas import Charge, Quotas, TokenDemand, TokenUse
from dynamo.frontend.parts.keys.usage_store import UsageMeter, UsageQuery, UsageStore, UsageUnavailable
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.frontend.pipeline.exchange import ANSWER_HEADERS, Exchange, PartSlot
from dynamo.frontend.pipeline.outcome import CLIENT_LEFT, Outcome, RequestListener
from dynamo.frontend.pipeline.plan import Plan
from dynamo.frontend.pipeline.reading import Resolved
from dynamo.frontend.pipeline.result_plan import ResultPlan
from dynamo.frontend.pipeline.text_generation import TextPlan
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.escaping import json_line
from dynamo.runtime.discovery.base import Discovery
from dynamo.runtime.discovery.keys import encode_name
from dynamo.runtime.discovery.memory import MemoryDiscovery

logger = logging.getLogger(__name__)

CHARGE: Final[PartSlot[Charge]] = PartSlot("charge of the key")
PLACE_OF: Final[PartSlot[str]] = PartSlot("owner of the place")

_REFUSED: Final = frozenset(range(400, 500)) - {429, CLIENT_LEFT}

_NAMES: Final = ("max_completion_tokens", "max_tokens")  # of OpenAI's bodies; the first one counts

DEFAULT_SECONDS: Final = 7 * 86_400
_KNOWN: Final = frozenset({"group_by", "since", "until"})


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
        named = (body.get(name) for body in plan.bodies[:1] for name in _NAMES)
        asked = next((most for most in named if isinstance(most, int)), None)
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


def _limit_text(body: dict[str, object], cap: int) -> None:
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
            raise share_exceeded("this frontend")
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
            charge.enter(exchange.model or resolved.model.name)
            if exchange.of(ANSWER_HEADERS) is None:  # the key may have limits for this model alone
                show_limits(exchange, charge)

    def planned(self, exchange: Exchange, resolved: Resolved, plan: Plan) -> None:
        """Reserve the tokens that a request may need, at the price of the model that serves it. Raises as `reserve_tokens`."""
        charge = exchange.of(CHARGE)
        if charge is not None:
            if exchange.work is not None:
                charge.release()
            charge.model = resolved.model.name
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
            if outcome.why.reason is Reason.SHARE:
                self._quotas.on_refused(charge.identity, "share")
        charge.has_succeeded = outcome.is_answered
        seconds, usage = outcome.at - exchange.arrival.at, outcome.usage
        if not (outcome.instances or usage.output_tokens):
            charge.close(TokenUse(), seconds)
        else:
            cached, reasoning = usage.cached_tokens or 0, usage.reasoning_tokens or 0
            output, tally = usage.output_tokens, exchange.tally
            if tally is not None and not tally.is_usage_known:
                output = charge.at_most(output)  # bytes of text, of which there are more than tokens
            used = TokenUse(usage.prompt_tokens, cached, output, reasoning, usage.images)
            charge.close(used, seconds)

    def _count_refused(self, identity: Caller | None) -> None:
        """Count a request that was refused before its model was known: refusing is work, too."""
        if isinstance(identity, Identity):
            self._quotas.count_refused(identity)


def show_limits(exchange: Exchange, charge: Charge) -> None:
    """Show how far the rates of the key are used in every answer, where there are any."""
    if charge.is_limited:
        exchange.keep(ANSWER_HEADERS, charge.rate_headers)


class Keys(KeyCharges, Part):
    """The keys in service, their limits, and what they use."""

    name: ClassVar[str] = "keys"
    families = FAMILIES
    outlives_models: ClassVar[bool] = True

    def __init__(self, settings: KeySettings, kernel: Kernel, table: LimitTable | None) -> None:
        """`table`: of the group, None: this process is alone. Raises InvalidArgument for a file that cannot be used."""
        self._settings, self._kernel = settings, kernel
        self._metrics = KeyMetrics(kernel.pipeline.metrics.families)
        self.store, self.quotas, self.meter = open_keys(settings, self._metrics, table)
        super().__init__(self.quotas, PlaceShares(kernel.pipeline.admission, kernel.shares))
        self._cluster_limits = open_cluster_limits(kernel.settings, self.store, self.quotas, kernel.runtime.discovery)
        self.store.on_look.append(self._cut_revoked)
        kernel.shares.know_owners(lambda: self.store.owners)

    def routes(self) -> Sequence[GuardedRoute]:
        usage = self._kernel.same_site(UsageRoute(self.meter))
        return (GuardedRoute("/admin/usage", usage, "GET", access=Access.ADMIN),)

    def in_front_of(self, app: ASGIApp, site: Site) -> ASGIApp:
        """Return `app` behind a door. For clients it is open where there are keys of admins alone, but for the admin routes."""
        sources, open_paths = self.store.sources, site.paths(Access.OPEN)
        if site.is_for_operators:
            is_open = (lambda path: path in open_paths) if self.store.protects_admin else (lambda _: True)
        elif sources.protect_clients:
            is_open = open_paths.__contains__
        else:
            is_open = partial(_is_no_admins, site.is_admins())
        return KeyDoor(
            app,
            self.store,
            is_open=is_open,
            dialect_of=site.dialects.of,
            trusted=self._settings.trusted_proxies,
            refused=self._refused,
        )

    def open_paths(self) -> Collection[str] | None:
        if not self.store.sources.protect_clients:
            return None
        probes = ("/health", "/live", "/ready", "/ping", "/version")
        return (*probes, "/metrics") if self._settings.open_metrics else probes

    async def start(self) -> None:
        self.store.start()
        self.meter.start()
        if self._cluster_limits is not None:
            await self._cluster_limits.start()

    async def aclose(self) -> None:
        await self.meter.aclose()  # after the requests have ended, and before their limits go
        if self._cluster_limits is not None:
            await self._cluster_limits.aclose()
        self.quotas.table.close()
        await self.store.aclose()

    def _refused(self, caller: Caller | None, rejected: RequestRejected) -> None:
        self._metrics.refused(None if caller is None else caller.id, rejected.code or "")

    def _cut_revoked(self) -> None:
        """End the requests of keys that were taken away, where their record has that."""
        if self.store.cuts_requests:
            cut = self._kernel.pipeline.register.end_revoked(self.store.is_gone)
            if cut:
                logger.warning("%d request(s) were cut, because their key was revoked", cut)


def _is_no_admins(is_admins: Callable[[str], bool], path: str) -> bool:
    return not is_admins(path)


class OpenedKeys(NamedTuple):
    """What the part works with."""

    keys: KeyStore
    quotas: Quotas
    meter: UsageMeter


def open_keys(settings: KeySettings, metrics: KeyMetrics, table: LimitTable | None) -> OpenedKeys:
    """Read the keys, and open the file of what they use. `table`: of the group, None: this process is alone.

    Raises InvalidArgument for a file that cannot be used.
    """
    keys = KeyStore(settings.key_sources)
    store = None if settings.usage_db is None else UsageStore(Path(settings.usage_db).expanduser())
    spent, pledges = ({}, None) if store is None else (store.spent(), store.pledges())
    quotas = Quotas(lambda: keys.ring, table or LimitTable(), spent=spent, pledges=pledges)
    budgets = [*[key.budget for key in keys.ring.keys], *[project.budget for project in keys.ring.projects.values()]]
    if store is None and any(budget is not None for budget in budgets):
        logger.warning("budgets of API keys begin anew with this process: DYN_USAGE_DB=FILE keeps what they have given")
    meter = UsageMeter(quotas, metrics, store, keep_days=settings.usage_keep_days, identities=lambda: keys.identities)
    return OpenedKeys(keys, quotas, meter)


def open_cluster_limits(
    settings: HttpSettings, keys: KeyStore, quotas: Quotas, store: Discovery
) -> ClusterLimits | None:
    """Divide the limits of the keys with the other frontends; None where there is no store for it."""
    if not settings.divide_limits:
        return None
    if not isinstance(store, SharedStore) or isinstance(store, MemoryDiscovery):  # which no other process sees
        return None
    return ClusterLimits(quotas, lambda: keys.identities, store, scope=_scope_of(settings))


def _scope_of(settings: ModelSettings) -> str:
    """Return the segment of a record's key that names the namespaces of a frontend."""
    if settings.namespace_prefix is not None:
        return encode_name(settings.namespace_prefix) + EVERY_NAMESPACE
    return EVERY_NAMESPACE if settings.namespace is None else encode_name(settings.namespace)


class UsageRoute:
    """Sums of a span of time (`since`, `until`: seconds since the epoch), grouped by `group_by`, separated by commas."""

    def __init__(self, meter: UsageMeter) -> None:
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            query = _query_of(scope["query_string"].decode("latin-1"))
            try:
                data = await self._meter.rows(query)
            except InvalidArgument as error:
                raise RequestRejected(400, str(error), param="group_by") from None
            except UsageUnavailable as error:
                raise RequestRejected(503, str(error)) from None
        except RequestRejected as rejected:
            await reply_rejected(send, rejected)
            return
        body = {"object": "list", "since": query.since * 60, "until": query.until * 60, "data": data}
        await reply(send, 200, json_line(body))


def _query_of(text: str) -> UsageQuery:
    given = {name: values[-1] for name, values in parse_qs(text, keep_blank_values=True).items()}
    for name in given:
        if name not in _KNOWN:
            raise RequestRejected(
                400, f"{name[:64]} is not a parameter; there are {', '.join(sorted(_KNOWN))}", param=name[:64]
            )
    now = int(time.time())
    until = _seconds(given, "until", now + 60)
    since = _seconds(given, "since", until - DEFAULT_SECONDS)
    groups = tuple([group.strip() for group in given.get("group_by", "key").split(",")])
    if len(set(groups)) != len(groups):
        raise RequestRejected(400, "group_by names a group twice", param="group_by")
    return UsageQuery(groups, since // 60, -(-until // 60))


def _seconds(given: dict[str, str], name: str, default: int) -> int:
    value = given.get(name)
    if value is None:
        return max(0, default)
    if not (value.isascii() and value.isdecimal() and len(value) <= 12):
        raise RequestRejected(400, f"{name} must be seconds since the epoch, got {value[:64]!r}", param=name)
    return int(value)
