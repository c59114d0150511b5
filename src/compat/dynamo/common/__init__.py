"""What engines share: the backend contract (`common.backend`), constants and small conversions.

Further layers of the native system may lie beside this one, in a folder of their own: what is not here is found there.
"""

from pkgutil import extend_path

from dynamo.common import absent as absent
from dynamo.contract.modes import DisaggregationMode, EmbeddingTransferMode

__all__ = ["DisaggregationMode", "EmbeddingTransferMode"]
__path__ = extend_path(__path__, __name__)
