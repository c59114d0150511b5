"""Tenants apart: a worker with the taint `tenant=NAME` serves that tenant alone, and the others serve all other requests."""


class TenantIsolation:
    def filter(self, request, candidates):
        own = f"tenant={request.tenant}"
        mine = [each for each in candidates if own in each.labels]
        return mine or [each for each in candidates if not any(label.startswith("tenant=") for label in each.labels)]
