"""The inspector in a terminal: `dynamo top`, and what `dynamo status` shares with it."""

__all__: list[str] = []
