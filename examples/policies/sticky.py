"""A session stays with its worker, without a table: each session has an order of its own of all workers."""

from hashlib import blake2b


class StickySessions:
    def score(self, request, candidate):
        if request.session_id is None:
            return 2**64 * (1 + candidate.requests)
        return int.from_bytes(blake2b(f"{request.session_id} {candidate.worker_id}".encode(), digest_size=8).digest())
