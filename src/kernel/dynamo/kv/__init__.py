"""KV-cache blocks: how they are named. Pure: no socket, no loop, no clock."""

from dynamo.kv.hashing import block_hashes, sequence_hashes, to_unsigned

__all__ = ["block_hashes", "sequence_hashes", "to_unsigned"]
