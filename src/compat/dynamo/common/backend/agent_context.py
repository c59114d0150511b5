"""Facade: names of `dynamo.contract.request_fields` under the path of the guide."""

from dynamo.contract.request_fields import agent_context_from_request, session_id_from_request

__all__ = ["agent_context_from_request", "session_id_from_request"]
