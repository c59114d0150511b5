"""The cheapest hardware that is quick enough: workers name their price by a taint, such as `price=2.5`."""


class CheapestInTime:
    def __init__(self, first_token_ms=500.0):
        self.limit = first_token_ms

    def score(self, request, candidate):
        price = next((float(label[6:]) for label in candidate.labels if label.startswith("price=")), 1.0)
        tokens = candidate.pending_tokens + request.prompt_tokens - candidate.cached_tokens
        late_ms = max(0.0, candidate.prefill_ms(tokens) - self.limit)
        return price + 1000.0 * late_ms
