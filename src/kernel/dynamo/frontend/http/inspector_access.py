"""Where the inspector of this process lets its token in, and the file by which its owner's tools find it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from dynamo.frontend.http.admin import serves_admin_with_api
from dynamo.frontend.http.settings import HttpSettings
from dynamo.runtime.base.addresses import WILDCARDS, http_url
from dynamo.runtime.http.inspector_token import InspectorAccess, publish_access, remove_access

logger = logging.getLogger(__name__)


def uses_token(settings: HttpSettings) -> bool:
    """Return whether the inspector is served where no key protects it, so that its token does."""
    if not settings.inspector.is_on or settings.disable_admin_api or settings.admin_keys_file is not None:
        return False
    if settings.admin_port is not None:
        return True
    return serves_admin_with_api(settings) and not settings.key_sources.exist


class AdminKeys(Protocol):
    """The keys of a frontend, as far as they decide whether the token is let in."""

    protects_admin: bool  # an admin key exists, or existed: the token is refused
    on_look: list[Callable[[], None]]


@contextmanager
def published_access(
    settings: HttpSettings, api_port: int, admin_port: int | None, token: str, keys: AdminKeys | None = None
) -> Iterator[None]:
    """Keep the file of the token for as long as the block runs; does nothing where no token is used.

    `api_port`: 0: the API has no port. `keys`: None where there are none. With an admin key among them the token is refused, so that a file of it would send tools
    to a closed door; the file goes when such a key comes later.

    Without the file `dynamo top` has to be given the token, and everything else works: a folder that cannot be written is a
    warning.
    """
    if not uses_token(settings) or (keys is not None and keys.protects_admin):
        yield
        return
    if not api_port and admin_port is None:  # tools find it by its port
        yield
        return
    host = settings.http_host if admin_port is None else settings.admin_host
    port = api_port if admin_port is None else admin_port
    url = http_url("127.0.0.1" if host in WILDCARDS else host, port)
    if admin_port is None and settings.tls_cert_path is not None:
        url = url.replace("http://", "https://", 1)
    try:
        path = publish_access(port, InspectorAccess(url, token, os.getpid()))
    except OSError as error:
        logger.warning("the token of the inspector at %s cannot be written, so tools do not find it: %s", url, error)
        yield
        return
    logger.info("inspector at %s/admin/v1/snapshot, its token in %s", url, path)
    withdraw = _withdrawal(port, token, keys)
    try:
        yield
    finally:
        if keys is not None:
            keys.on_look.remove(withdraw)
        remove_access(port, token)


def _withdrawal(port: int, token: str, keys: AdminKeys | None) -> Callable[[], None]:
    """Return what removes the file once an admin key has come, and have it called with each check of the keys."""
    is_there = True

    def withdraw() -> None:
        nonlocal is_there
        if is_there and keys is not None and keys.protects_admin:
            is_there = False
            remove_access(port, token)
            logger.info("the inspector at port %d needs a key from now on: an admin key was added", port)

    if keys is not None:
        keys.on_look.append(withdraw)
    return withdraw
