"""`dynamo conformance worker ADDRESS`: hold a worker in any language to the wires of docs/wire.md and of ai-dynamo 1.6."""

__all__: list[str] = []
