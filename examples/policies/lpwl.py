"""The least prefill work left: prompt tokens that wait at the worker, and those of this prompt that it does not hold."""


class LeastPrefillWork:
    def score(self, request, candidate):
        return candidate.pending_tokens + request.prompt_tokens - candidate.cached_tokens
