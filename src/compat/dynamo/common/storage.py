"""Not part of this system. The import error names what takes its place."""

raise ImportError(
    "dynamo.common.storage (media files in a file system or bucket) is not part of dynamo-unified; "
    "use fsspec in your engine. --media-output-fs-url and --media-output-http-url are parsed into its arguments."
)
