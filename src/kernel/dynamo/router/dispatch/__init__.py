"""From a request to the items of its answer: its course, the stages before its workers, the attempts at them, and moves."""

__all__: list[str] = []
