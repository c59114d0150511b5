"""A real inference engine in NumPy, small enough to read in one sitting.

    python -m dynamo.reference --model DIRECTORY

Read in this order: `config`, `weights` and `model` (the arithmetic), `blocks`, `scheduler` and `sampler` (the
decisions), `core` (one step), `request`, `loading` and `engine` (the contract, and the thread the steps run in).
"""

from dynamo.reference.engine import ReferenceEngine
from dynamo.reference.loading import Options

__all__ = ["Options", "ReferenceEngine"]
