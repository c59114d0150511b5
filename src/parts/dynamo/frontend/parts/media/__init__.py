"""Images, audio and video of a request: where they may come from, how they are fetched, and what the worker gets of them."""

__all__: list[str] = []
