"""From the body and the headers of a request to the typed request that keeps every rule, and the model that serves it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

from msgspec import Struct

from dynamo.frontend.admission.model import cap_priority
from dynamo.frontend.base.access import Caller
from dynamo.frontend.base.offload import Offload, takes_long
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.pipeline.api import Api
from dynamo.frontend.pipeline.exchange import Arrival
from dynamo.frontend.pipeline.settings import PipelineSettings
from dynamo.protocol.dialect import Dialect
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.errors import RequestRejected, model_not_ready, served_here
from dynamo.protocol.openai.foreign_members import FOREIGN_MEMBERS
from dynamo.protocol.openai.headers import AGENT_HEADERS, KNOWN_HEADERS, HeaderEffects, apply_headers
from dynamo.protocol.openai.requests import Request
from dynamo.protocol.vectors.requests import ResultRequest

logger = logging.getLogger(__name__)

MAX_IDLE_HEADERS: Final = 256  # names that are remembered: clients may send any
MAX_IDLE_NAME: Final = 64  # bytes
UNSUSPECTED_BODY_BYTES: Final = 16 * 1024 * 1024  # more than the longest embeddings, tools and schemas take


class Resolved(Struct, frozen=True):
    """A request that keeps every rule, and the model that serves it."""

    request: Request | ResultRequest
    model: ServedModel
    effects: HeaderEffects


Loading = Callable[[Request | ResultRequest], Awaitable[str]]


class CallReader:
    """Reads the requests of one API."""

    def __init__(self, api: Api[Any], settings: PipelineSettings, models: ModelDirectory, offload: Offload) -> None:
        self._api, self._settings, self._models, self._offload = api, settings, models, offload
        limits = BodyLimits(
            settings.json_depth_limit, settings.messages_limit, settings.json_members_limit, settings.json_items_limit
        )
        self._decode = partial(api.decode, ignore_unsupported=settings.ignore_unsupported_fields, limits=limits)
        self._prefixes = (*filter(None, [settings.metadata_header_prefix.encode()]), *AGENT_HEADERS)
        self._idle_headers: set[bytes] = set()  # names without an effect: those that nearly every request has
        self._logged: set[str] = set()  # members without an effect that the log has; all of them are in one table
        self._surface_bit = api.model_type.value

    async def read(self, arrival: Arrival, on_demand: Loading | None = None) -> Resolved:
        """Check everything that can be wrong with a request before a worker gets it; in the native order of checks.

        `on_demand`: returns the model of a request once it is loaded. Raises RequestRejected.
        """
        settings, models, api, body = self._settings, self._models, self._api, arrival.body
        # Off the loop where it takes long: other requests wait for the loop, and none for a thread of the executor.
        if is_large := takes_long(body):
            if not api.takes_media:
                _check_plausible(len(body), settings.body_bytes_per_token, models.longest_context)
            request = await self._offload(partial(self._decode, body))
            request.is_large = True
        else:
            request = self._decode(body)
        if not request.model and not api.needs_model:
            request.model = self._only_model(arrival)
        if arrival.identity is not None:
            bind_key(request, arrival.identity, api.dialect, self._served_to(arrival))
            if not settings.share_caches:
                request.cache_owner = request.key_owner
        model = models.lookup(request.model if on_demand is None else await on_demand(request))
        if model is None and models.names.is_expected(request.model):
            raise model_not_ready(request.model)
        known = () if self._idle_headers.issuperset(arrival.headers) else self._known_headers(arrival)
        if known or settings.disable_nvext:
            given, allows = settings.metadata_header_prefix, not settings.disable_nvext
            effects = apply_headers(request, known, metadata_prefix=given, nvext_enabled=allows)
        else:
            effects = HeaderEffects()
        if arrival.identity is not None:
            cap_priority(request, arrival.identity.priority)
        for warning in effects.warnings:
            logger.warning("%s", warning)
        if request.repaired:
            logger.warning("repaired a request body that was not strict JSON (model %r)", request.model[:128])
        if (ignored := getattr(request, "ignored", ())) and not self._logged.issuperset(ignored):
            self._log_ignored(ignored)
        if is_large:
            await self._offload(partial(api.validate, request))
        else:
            api.validate(request)
        if model is None or not model.surface_bits & self._surface_bit:
            raise api.dialect.unknown_model(request.model, self._served_to(arrival)())
        return Resolved(request, model, effects)

    def _only_model(self, arrival: Arrival) -> str:
        """Return the one model that a client may use. Raises RequestRejected (404) where there are none or several."""
        served = self._served_to(arrival)()
        if len(served) != 1:
            text = f"Model not found: none is named{served_here(served)}"
            raise RequestRejected(404, text, param="model", code="model_not_found")
        return served[0]

    def _known_headers(self, arrival: Arrival) -> Sequence[tuple[str, str]]:
        """Return the headers with an effect, and remember the names of those without one."""
        known = {name for name in arrival.headers if name in KNOWN_HEADERS or name.startswith(self._prefixes)}
        if len(self._idle_headers) < MAX_IDLE_HEADERS:
            self._idle_headers |= {name for name in arrival.headers.keys() - known if len(name) <= MAX_IDLE_NAME}
        return [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in arrival.header_pairs if name in known
        ]

    def _served_to(self, arrival: Arrival) -> Callable[[], list[str]]:
        """Return what lists the models of this API that a client may use."""
        caller = arrival.identity
        return lambda: [
            name
            for name in (*self._models.names.unloaded(), *self._names())
            if caller is None or caller.allows_model(name)
        ]

    def _names(self) -> list[str]:
        return [model.name for model in self._models.models() if model.surface_bits & self._surface_bit]

    def _log_ignored(self, names: Sequence[str]) -> None:
        """Log members of other servers' clients that have no effect, each once, with the reason."""
        for name in names:
            if name not in self._logged:
                self._logged.add(name)
                reason = FOREIGN_MEMBERS[name].reason
                logger.info("member %r of %s requests has no effect here: %s", name, self._api.endpoint, reason)


def bind_key(
    request: Request | ResultRequest, caller: Caller, dialect: Dialect, served: Callable[[], Sequence[str]] = tuple
) -> None:
    """Note the owner of a request. Raises the 404 of a model that its key may not use, which is that of an unknown one."""
    if not caller.allows_model(request.model):
        raise dialect.unknown_model(request.model, served())
    request.key_owner = caller.owner


def _check_plausible(body_bytes: int, per_token: int, longest: int | None) -> None:
    """Refuse a body that is too long for a prompt of any model, before it is decoded: that is done in one piece.

    `per_token`: bytes that a token may take; `longest`: the longest context, None: not known.
    """
    if not per_token or longest is None or body_bytes <= UNSUSPECTED_BODY_BYTES + per_token * longest:
        return
    raise RequestRejected(
        400,
        f"A body of {body_bytes} bytes cannot be a prompt for any model here: the longest maximum context length is "
        f"{longest} tokens, and {UNSUSPECTED_BODY_BYTES} bytes and {per_token} for each token are read "
        "(DYN_HTTP_BODY_BYTES_PER_TOKEN)",
        code="context_length_exceeded",
        limit="body_tokens",
    )
