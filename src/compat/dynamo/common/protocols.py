"""Not part of this system. The import error names what takes its place."""

raise ImportError(
    "dynamo.common.protocols (pydantic models of image, audio and video requests) is not part of dynamo-unified; "
    "a RawEngine receives the OpenAI-shaped body as a dict, see dynamo.common.backend.RawRequest."
)
