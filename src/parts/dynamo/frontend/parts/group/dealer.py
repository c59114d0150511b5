"""Accepts the connections of a group, and hands each to the member that has the fewest."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Sequence
from typing import Final

from dynamo.frontend.http.server import close_listeners, port_of
from dynamo.frontend.parts.group.member_process import MemberProcess
from dynamo.frontend.parts.group.places import Field, Places

logger = logging.getLogger(__name__)

LISTEN_BACKLOG: Final = 2048
ACCEPTED_AT_ONCE: Final = 64
PAUSE_SECONDS: Final = 0.05  # when no member can take a connection, or no descriptor is left


class ConnectionDealer:
    """Accepts while a member takes connections. Otherwise new ones wait in the kernel's queue."""

    def __init__(self, listeners: Sequence[socket.socket], members: Sequence[MemberProcess], places: Places) -> None:
        """`listeners` are bound and not listening yet; `close` closes them."""
        self._listeners, self._members, self._places = listeners, members, places
        self.port: int = port_of(listeners)
        """The port of the API; 0: it has none."""
        self._is_accepting = self._is_paused = False
        self._held: deque[socket.socket] = deque()  # accepted, and no member could take them

    def add(self, member: MemberProcess) -> None:
        """Deal connections to a member that is ready now."""
        assert member.deliveries is not None
        asyncio.get_running_loop().add_reader(member.deliveries, self._taken, member)
        self._start_accepting()

    def remove(self, member: MemberProcess) -> None:
        """Send no more connections to the process of `member`, and deal those on their way to it again. Idempotent."""
        if member.deliveries is not None:
            asyncio.get_running_loop().remove_reader(member.deliveries)
            member.deliveries.close()
            member.deliveries = None
            orphans = [*member.on_their_way]
            member.on_their_way.clear()
            for connection in orphans:
                if not self._deal(connection):
                    self._held.append(connection)
            if self._held:
                self._pause()
        if not any(each.takes for each in self._members):
            self._stop_accepting()

    def close(self) -> None:
        """Stop accepting, and close the listener and what no member could take."""
        self._stop_accepting()
        for connection in self._held:
            connection.close()
        close_listeners(self._listeners)

    # -- accepting -----------------------------------------------------------------------------------------------

    def _start_accepting(self) -> None:
        if not self._is_accepting:
            self._is_accepting = True
            for listener in self._listeners:
                listener.setblocking(False)
                listener.listen(LISTEN_BACKLOG)
                asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _stop_accepting(self) -> None:
        if self._is_accepting:
            self._is_accepting = False
            for listener in self._listeners:
                asyncio.get_running_loop().remove_reader(listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                logger.warning("cannot accept a connection: %s", error)
                self._pause()
                return
            if not self._deal(connection):
                self._held.append(connection)
                self._pause()
                return

    def _pause(self) -> None:
        self._stop_accepting()
        if self._is_paused:
            return
        self._is_paused = True
        asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        self._is_paused = False
        if any(each.fileno() < 0 for each in self._listeners):  # it is all over
            return
        while self._held and self._deal(self._held[0]):
            self._held.popleft()
        if self._held:
            self._pause()
        elif any(each.takes for each in self._members):
            self._start_accepting()

    # -- dealing -------------------------------------------------------------------------------------------------

    def _deal(self, connection: socket.socket) -> bool:
        """Hand a connection to the member with the fewest; False when none can take it now."""
        for member in sorted((each for each in self._members if each.takes), key=self._load):
            assert member.deliveries is not None
            try:
                socket.send_fds(member.deliveries, [b"c"], [connection.fileno()])
            except OSError:  # its queue is full, or it has just ended: its control connection will report that
                continue
            member.on_their_way.append(connection)
            return True
        return False

    def _taken(self, member: MemberProcess) -> None:
        """Close our copy of a connection that a member has taken: the copy would keep the connection open."""
        assert member.deliveries is not None
        try:
            count = len(member.deliveries.recv(4096))
        except OSError:
            count = 0
        if not count:  # it has ended, and its control connection reports that, too
            asyncio.get_running_loop().remove_reader(member.deliveries)
        for _ in range(count):
            member.on_their_way.popleft().close()

    def _load(self, member: MemberProcess) -> int:
        """Return how many connections a member has, and has on their way to it."""
        return self._places.get(member.row, Field.OPEN) + len(member.on_their_way)
