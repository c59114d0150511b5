"""Policies that users write in Python: which worker serves a request, decided by a class in a file of theirs.

class ShortestQueue:
    def score(self, request, candidate):
        return candidate.pending_tokens + request.prompt_tokens - candidate.cached_tokens

dynamo serve ... --router-mode kv --router-policy shortest.py:ShortestQueue
"""

from dynamo.policies.records import Classified, PolicyCandidate, PolicyRequest, WorkerPolicy

__all__ = ["Classified", "PolicyCandidate", "PolicyRequest", "WorkerPolicy"]
