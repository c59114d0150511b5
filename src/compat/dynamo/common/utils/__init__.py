"""Small conversions that engines share; the module names are the guide's."""

from pkgutil import extend_path

from dynamo.contract.request_fields import normalize_finish_reason
from dynamo.contract.requests.structural_tag import serialize_structural_tag
from dynamo.contract.requests.token_ids import normalize_request_token_ids, token_ids_len, token_ids_to_list

__path__ = extend_path(__path__, __name__)  # a native layer beside this one may have more

__all__ = [
    "normalize_finish_reason", "normalize_request_token_ids", "serialize_structural_tag", "token_ids_len",
    "token_ids_to_list",
]  # fmt: skip
