"""What engines share: the backend contract (`common.backend`), constants and small conversions.

Further layers of the native system may lie beside this one, in a folder of their own: what is not here is found there.
"""

import sys
from importlib.machinery import ModuleSpec
from pkgutil import extend_path
from typing import Final

from dynamo.contract.modes import DisaggregationMode, EmbeddingTransferMode

__all__ = ["DisaggregationMode", "EmbeddingTransferMode"]
__path__ = extend_path(__path__, __name__)

_INSTEAD: Final = {
    "dynamo.common.http": "(an HTTP client for media that checks addresses) is not part of dynamo-unified; media are fetched by "
    "the frontend, see dynamo.llm.MediaFetcher. Use your own client in an engine.",
    "dynamo.common.protocols": "(pydantic models of image, audio and video requests) is not part of dynamo-unified; a RawEngine "
    "receives the OpenAI-shaped body as a dict, see dynamo.common.backend.RawRequest.",
    "dynamo.common.storage": "(media files in a file system or bucket) is not part of dynamo-unified; use fsspec in your engine. "
    "--media-output-fs-url and --media-output-http-url are parsed into its arguments.",
    "dynamo.common.utils.topology": "(topology domains from files of a pod) is not part of dynamo-unified; set "
    "ModelRuntimeConfig.topology_domains and the kv_transfer_* fields yourself, see dynamo.llm.ModelRuntimeConfig.",
    "dynamo.common.configuration.groups": "(the flags of the native programs) is not part of dynamo-unified; "
    "dynamo.common.backend.args has those of a worker.",
}


class _Absent:
    """The last finder: it is used for a module that no folder has, and its error names what takes the place."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Raise the ImportError of a module that is not part of this system; None for any other."""
        if (instead := _INSTEAD.get(name)) is not None:
            raise ModuleNotFoundError(f"{name} {instead}", name=name)
        return None


sys.meta_path.append(_Absent)
