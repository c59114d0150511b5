"""KV-cache blocks: how they are named. Pure: no socket, no loop, no clock."""

from pkgutil import extend_path

from dynamo.kv.hashing import block_hashes, sequence_hashes, to_unsigned

__path__ = extend_path(__path__, __name__)  # the names of the native bindings are in `src/compat`

__all__ = ["block_hashes", "sequence_hashes", "to_unsigned"]
