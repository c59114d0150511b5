"""What every folder of the runtime needs: settings, tasks, addresses, TLS, limits, timers. It imports none of them."""

__all__: list[str] = []
