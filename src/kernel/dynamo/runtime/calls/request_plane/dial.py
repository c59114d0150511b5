"""Dialling: all requests for a connection to one address wait for the same attempt."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from dynamo.errors import CannotConnect
from dynamo.runtime.base.tasks import AttemptCancelled, SingleFlight
from dynamo.runtime.base.timers import loop_timeout
from dynamo.runtime.calls.request_plane.security import PlaneSecurity


class Dialled(asyncio.Protocol, ABC):
    """A connection that a dialler makes."""

    usable: bool

    @abstractmethod
    def close(self) -> None:
        """Leave."""


Connection = TypeVar("Connection", bound=Dialled)

Where = tuple[str, int]


class Dialler(Generic[Connection]):
    """All attempts under way of one client. A failure is each waiting request's own `CannotConnect`."""

    def __init__(
        self,
        make: Callable[[str], Connection],
        connected: Callable[[Where, Connection], None],
        *,
        timeout_seconds: float,
        security: PlaneSecurity,
        limit: int | None = None,
        greeted: Callable[[Connection], Awaitable[None] | None] | None = None,
    ) -> None:
        """`make` builds the protocol for "HOST:PORT"; `connected` keeps what is usable. `limit`: attempts at once.

        `greeted` gives what to await before a connection counts as made, within the same time limit.
        """
        self._make, self._connected, self._greeted = make, connected, greeted
        self._timeout, self._security = timeout_seconds, security
        self._slots = None if limit is None else asyncio.Semaphore(limit)
        self._attempts: SingleFlight[Where, Connection] = SingleFlight()
        self._closed = False

    async def connect(self, host: str, port: int) -> Connection:
        """Return a new connection, or that of an attempt under way. Raises `CannotConnect`."""
        if self._closed:
            raise CannotConnect("the runtime is closed")
        try:
            return await self._attempts.run((host, port), lambda: self._dial(host, port), f"dial {host}:{port}")
        except AttemptCancelled:
            raise CannotConnect("the runtime is closed") from None  # only `close` cancels an attempt

    def close(self) -> None:
        """Cancel every attempt and begin no other; idempotent."""
        self._closed = True
        self._attempts.cancel()

    async def _dial(self, host: str, port: int) -> Connection:
        connection = await self._within_limits(host, port)
        if self._closed:
            connection.close()
        elif connection.usable:
            self._connected((host, port), connection)
        return connection

    async def _within_limits(self, host: str, port: int) -> Connection:
        address = f"{host}:{port}"
        try:
            async with loop_timeout(self._timeout):
                if self._slots is None:
                    return await self._reach(address, host, port)
                async with self._slots:
                    return await self._reach(address, host, port)
        except TimeoutError as error:
            raise CannotConnect(f"{address} did not accept within {self._timeout:g} s") from error
        except OSError as error:
            raise self._security.not_connected(address, error) from error

    async def _reach(self, address: str, host: str, port: int) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: self._make(address), host, port, **self._security.connect_options(host)
        )
        greeting = None if self._greeted is None else self._greeted(connection)
        if greeting is not None:
            await greeting
        return connection
