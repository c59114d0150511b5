"""The command line that the sample engines without tokens share."""

from __future__ import annotations

import binascii

from dynamo.contract.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import RawRequest
from dynamo.contract.requests.invalid import InvalidRequest
from dynamo.engines.native_flags import refuse_media_output
from dynamo.protocol.model_types import ModelInput


def read_arguments(
    argv: list[str] | None, *, program: str, what: str, model_name: str, endpoint_types: str
) -> tuple[str, float, WorkerConfig]:
    """Return the name to serve, the seconds that each request takes, and the worker's configuration."""
    parser = BackendArgumentParser(program, description=what)
    parser.add_argument("--model-name", default=model_name, help="name to serve")
    parser.add_argument("--delay", type=float, default=0.05, help="seconds per request (default: 0.05)")
    add_backend_arguments(parser, component="sample", endpoint_types=endpoint_types)
    refuse_media_output(argv)
    args = parser.parse_args(argv)
    config = worker_config_from(
        args, served_model_name=args.model_name, model_input=ModelInput.Text, enable_kv_routing=False
    )
    return args.model_name, args.delay, config


def data_of(request: RawRequest, field: str) -> bytes:
    """Return the content of a data URL in a request. Raises InvalidRequest where there is none."""
    head, _, content = str(request.get(field) or "").partition(",")
    if not (head.startswith("data:") and head.endswith(";base64")):
        raise InvalidRequest(f"{field} must be a data URL: this engine fetches nothing")
    try:
        return binascii.a2b_base64(content)
    except ValueError as error:
        raise InvalidRequest(f"{field} is not base64: {error}") from error
