"""What the sample engines without tokens share: the command line, and reading data URLs."""

from __future__ import annotations

import binascii
from typing import ClassVar, Self

from dynamo.contract.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import EngineConfig, RawEngine, RawRequest
from dynamo.contract.requests.invalid import InvalidRequest
from dynamo.engines.native_flags import refuse_media_output
from dynamo.protocol.model_types import ModelInput


class SampleRawEngine(RawEngine):
    """What the sample engines without tokens share: each request takes `delay` seconds."""

    program: ClassVar[str]
    what: ClassVar[str]
    name: ClassVar[str]
    """The default of `--model-name`."""
    endpoint_types: ClassVar[str]

    def __init__(self, model_name: str | None = None, delay: float = 0.05) -> None:
        self.model_name = self.name if model_name is None else model_name
        self.delay = delay

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        parser = BackendArgumentParser(cls.program, description=cls.what)
        parser.add_argument("--model-name", default=cls.name, help="name to serve")
        parser.add_argument("--delay", type=float, default=0.05, help="seconds per request (default: 0.05)")
        add_backend_arguments(parser, component="sample", endpoint_types=cls.endpoint_types)
        refuse_media_output(argv)
        args = parser.parse_args(argv)
        name, kind = args.model_name, ModelInput.Text
        config = worker_config_from(args, served_model_name=name, model_input=kind, enable_kv_routing=False)
        return cls(name, args.delay), config

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model=self.model_name, served_model_name=self.model_name)


def data_of(request: RawRequest, field: str) -> bytes:
    """Return the content of a data URL in a request. Raises InvalidRequest where there is none."""
    head, _, content = str(request.get(field) or "").partition(",")
    if not (head.startswith("data:") and head.endswith(";base64")):
        raise InvalidRequest(f"{field} must be a data URL: this engine fetches nothing")
    try:
        return binascii.a2b_base64(content)
    except ValueError as error:
        raise InvalidRequest(f"{field} is not base64: {error}") from error
