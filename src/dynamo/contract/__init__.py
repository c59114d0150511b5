"""What an engine author implements and may call: the engine classes, chunks, configuration, arguments, and the conformance kit."""

__all__: list[str] = []
