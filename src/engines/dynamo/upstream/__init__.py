"""Any OpenAI-compatible server as a worker."""

from dynamo.upstream.arguments import UpstreamArguments
from dynamo.upstream.engine import UpstreamEngine

__all__ = ["UpstreamArguments", "UpstreamEngine"]
