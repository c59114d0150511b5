"""The `dynamo` command. Nothing here is a library: start at `main`."""

__all__: list[str] = []
