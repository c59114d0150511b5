"""The blocks of a simulated KV cache: counted, shared by identity, and evicted in the order of their last use.

A block is free, private (unfinished, or without an identity), active (at least one running request uses it) or inactive
(cached, and evicted when room is needed). Nothing is stored, so private blocks are a number and the others are names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from dynamo.errors import InvalidArgument


class PrefixPool:
    """The blocks of one rank. The sum of free, private, active and inactive blocks never changes."""

    def __init__(self, blocks: int) -> None:
        if blocks < 1:
            raise InvalidArgument(f"num_gpu_blocks must be at least 1, got {blocks}")
        self.blocks = blocks
        self._free = blocks
        self._users: dict[int, int] = {}  # identity -> running requests that use the block; 0: inactive
        self._inactive: OrderedDict[int, None] = OrderedDict()  # the next one to evict is in front
        self._copies: dict[int, int] = {}  # identity -> private blocks with the same content
        self._evicted: list[int] = []

    @property
    def available(self) -> int:
        """Blocks that a request can get: free and inactive ones."""
        return self._free + len(self._inactive)

    @property
    def used(self) -> int:
        """Blocks of running requests: private and active ones."""
        return self.blocks - self._free - len(self._inactive)

    @property
    def cached(self) -> int:
        """Blocks that have an identity: active and inactive ones."""
        return len(self._users)

    def match(self, identities: Sequence[int], limit: int) -> tuple[int, int]:
        """Return how many of the first `limit` identities are resident without a gap, and how many of these are active."""
        users = self._users
        found = active = 0
        for identity in islice(identities, limit):
            count = users.get(identity)
            if count is None:
                break
            found += 1
            if count:
                active += 1
        return found, active

    def pin(self, identities: Sequence[int], count: int) -> None:
        """Make a running request a user of the first `count` blocks, which are resident."""
        users, inactive = self._users, self._inactive
        for identity in islice(identities, count):
            before = users[identity]
            if not before:
                del inactive[identity]
            users[identity] = before + 1

    def take(self, count: int) -> bool:
        """Make `count` blocks private, evicting inactive ones; return False, and change nothing, when there are too few."""
        free = self._free
        if count <= free:
            self._free = free - count
            return True
        missing = count - free
        inactive = self._inactive
        if missing > len(inactive):
            return False
        users, copies, evicted = self._users, self._copies, self._evicted
        for _ in range(missing):
            identity, _ = inactive.popitem(last=False)
            del users[identity]
            if identity not in copies:  # else it lives on in a private block
                evicted.append(identity)
        self._free = 0
        return True

    def name(self, identities: Sequence[int], first: int, last: int, duplicates: set[int]) -> list[tuple[int, int]]:
        """Give private blocks their identities; return the runs [begin, end) of blocks that are new.

        A block whose identity is resident already stays private, and its number is added to `duplicates`.
        """
        users, copies = self._users, self._copies
        runs: list[tuple[int, int]] = []
        begin = -1
        for number in range(first, last):
            identity = identities[number]
            if identity in users:
                duplicates.add(number)
                copies[identity] = copies.get(identity, 0) + 1
                is_new = False
            else:
                users[identity] = 1
                is_new = identity not in copies
            if is_new:
                if begin < 0:
                    begin = number
            elif begin >= 0:
                runs.append((begin, number))
                begin = -1
        if begin >= 0:
            runs.append((begin, last))
        return runs

    def release(self, identities: Sequence[int], named: int, held: int, duplicates: set[int]) -> None:
        """Give the `held` blocks of a request back, the first `named` of which have identities.

        The last block goes first, so that a suffix is evicted before its prefix. A duplicate is freed, unless the block
        that it duplicates was evicted meanwhile.
        """
        self._free += held - named
        users, inactive = self._users, self._inactive
        for number in range(named - 1, -1, -1):
            identity = identities[number]
            if duplicates and number in duplicates:
                self._release_duplicate(identity)
                continue
            left = users[identity] - 1
            users[identity] = left
            if not left:
                inactive[identity] = None

    def _release_duplicate(self, identity: int) -> None:
        copies = self._copies
        if copies[identity] == 1:
            del copies[identity]
        else:
            copies[identity] -= 1
        if identity in self._users:
            self._free += 1
        else:
            self._users[identity] = 0
            self._inactive[identity] = None

    def take_evicted(self) -> list[int]:
        """Return the identities whose last block was evicted since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted
