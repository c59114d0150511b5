"""Discovery through files of one directory."""

from dynamo.runtime.discovery.file.discovery import FileDiscovery

__all__ = ["FileDiscovery"]
