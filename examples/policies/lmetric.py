"""New prefill tokens times the batch: two figures whose product needs no weight between them (LMetric)."""


class LMetric:
    def score(self, request, candidate):
        new_tokens = candidate.pending_tokens + request.prompt_tokens - candidate.cached_tokens
        return new_tokens * (candidate.requests + 1)
