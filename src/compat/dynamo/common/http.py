"""Not part of this system. The import error names what takes its place."""

raise ImportError(
    "dynamo.common.http (an HTTP client for media that checks addresses) is not part of dynamo-unified; "
    "media are fetched by the frontend, see dynamo.llm.MediaFetcher. Use your own client in an engine."
)
