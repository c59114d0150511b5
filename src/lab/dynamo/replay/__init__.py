"""Replays of traces in virtual time: worker cores without engines, routers as in production, no waiting.

`trace`, `generated` and `mooncake` are the requests. `cluster` runs it: an event loop over workers (`worker`) and frontends
(`frontend`, with `event_feed` between them). `figures` is what came of it, `pooled_cache` the yardstick, `presets` the
scenarios that the command knows.

A room of its own, and not a part of `cli`: nothing here reads a clock, a file or a terminal, and the command, the tests and
the tuning of a policy start from the same `run_replay`.
"""

__all__: list[str] = []
