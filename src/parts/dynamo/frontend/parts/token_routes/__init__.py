"""Tokens in, tokens out: the routes by which trainers call a model in the shapes of its engine."""

__all__: list[str] = []
