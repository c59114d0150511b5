"""Small conversions that engines share; the module names are the guide's."""

from dynamo.contract.requests.engine_response import normalize_finish_reason
from dynamo.contract.requests.structural_tag import serialize_structural_tag
from dynamo.contract.requests.token_ids import normalize_request_token_ids, token_ids_len, token_ids_to_list

__all__ = [
    "normalize_finish_reason",
    "normalize_request_token_ids",
    "serialize_structural_tag",
    "token_ids_len",
    "token_ids_to_list",
]
