"""What a pod of plain vLLM answers over HTTP: whether it is well, which models it serves, and how busy it is."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from dynamo.errors import CannotConnect, InvalidArgument, ResponseTimeout
from dynamo.settings.extras import install_command

if TYPE_CHECKING:
    import aiohttp

MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024  # of /metrics: thousands of series take a part of that
MAX_MODELS: Final = 64
_SERIES: Final = re.compile(rb"^(vllm:[a-z_]+|process_start_time_seconds)(?:\{(.*)\})? ([^ \n]+)", re.MULTILINE)
_LABEL: Final = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


class PodRefused(CannotConnect):
    """Nothing listens at the address of a pod."""


class PodModel(Struct, frozen=True):
    """A model that a pod serves."""

    name: str
    root: str  # its path or its name on a hub
    context_length: int | None = None
    aliases: tuple[str, ...] = ()


class PodLoad(Struct, frozen=True):
    """How busy a pod is, and how its cache is made. None: not known."""

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0  # of its KV blocks, 0 to 1
    block_size: int | None = None
    total_blocks: int | None = None
    started_at: float | None = None  # its process


def read_load(content: bytes) -> PodLoad:
    """Read the figures of `/metrics`; several engines of one pod are added up. What is malformed is left out."""
    sums = {"vllm:num_requests_running": 0.0, "vllm:num_requests_waiting": 0.0}
    usage, block_size, blocks, started = list[float](), None, None, None
    for name, labels, text in _series(content):
        if name == "vllm:cache_config_info":
            block_size = block_size or _whole(labels.get("block_size"))
            blocks = blocks or _whole(labels.get("num_gpu_blocks"))
        elif (value := _number(text)) is None:
            continue
        elif name in sums:
            sums[name] += value
        elif name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):  # the second one until vLLM 0.10
            usage.append(value)
        elif name == "process_start_time_seconds":
            started = value
    return PodLoad(
        int(sums["vllm:num_requests_running"]), int(sums["vllm:num_requests_waiting"]),
        min(max(usage, default=0.0), 1.0), block_size, blocks, started,
    )  # fmt: skip


def _series(content: bytes) -> Iterator[tuple[str, Mapping[str, str], str]]:
    for name, labels, value in _SERIES.findall(content):
        yield name.decode(), dict(_LABEL.findall(labels.decode("utf-8", "replace"))), value.decode("latin-1")


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def _whole(text: str | None) -> int | None:
    return (
        int(text)
        if text is not None and text.isascii() and text.isdigit() and 0 < len(text) < 16 and int(text)
        else None
    )


def read_models(content: bytes) -> PodModel:
    """Read `/v1/models`: the model, with its further names. Adapters are left out. Raises InvalidArgument."""
    try:
        listed = json.loads(content)["data"]
        found = [each for each in listed[:MAX_MODELS] if not each.get("parent")]
        names = [str(each["id"]) for each in found]
        root, longest = str(found[0].get("root") or names[0]), found[0].get("max_model_len")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InvalidArgument(f"/v1/models is not a list of models ({type(error).__name__}: {error})") from error
    context_length = longest if isinstance(longest, int) and not isinstance(longest, bool) and longest > 0 else None
    return PodModel(names[0], root, context_length, tuple(names[1:]))


class PodClient:
    """Reads what pods show over HTTP, all over one pool of connections. Close it."""

    def __init__(self, timeout_seconds: float) -> None:
        """Raises InvalidArgument where the HTTP client is not installed."""
        try:
            import aiohttp
        except ImportError as error:  # an extra
            raise InvalidArgument(
                f"pods of plain vLLM need aiohttp, which is not installed: {install_command('gateway')}"
            ) from error
        self._http = aiohttp
        self._session: aiohttp.ClientSession | None = None
        self._timeout = timeout_seconds

    async def get(self, address: str, path: str) -> bytes:
        """Return the body of a 200. Raises PodRefused, CannotConnect, ResponseTimeout."""
        if self._session is None:
            connector = self._http.TCPConnector(limit=0, limit_per_host=2, keepalive_timeout=30)
            self._session = self._http.ClientSession(connector=connector, auto_decompress=False)
        try:
            async with asyncio.timeout(self._timeout):
                async with self._session.get(f"http://{address}{path}", allow_redirects=False) as response:
                    if response.status != 200:
                        raise CannotConnect(f"{path} of the pod {address} answers {response.status}")
                    return await self._body(response, address, path)
        except TimeoutError as error:
            raise ResponseTimeout(f"{path} of the pod {address} did not come within {self._timeout:g} s") from error
        except self._http.ClientConnectorError as error:
            raise PodRefused(f"the pod {address} cannot be reached: {error.strerror or error}") from error
        except (self._http.ClientError, OSError) as error:
            raise CannotConnect(f"{path} of the pod {address} cannot be read: {error}") from error

    async def _body(self, response: Any, address: str, path: str) -> bytes:
        found = bytearray()
        async for part in response.content.iter_any():
            found += part
            if len(found) > MAX_ANSWER_BYTES:
                raise CannotConnect(f"{path} of the pod {address} is longer than {MAX_ANSWER_BYTES} bytes")
        return bytes(found)

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
