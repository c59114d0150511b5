"""The light modules of `dynamo.common`: what each does, as observed in the native system."""

from __future__ import annotations

import statistics
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy
import pytest

import dynamo._core
from dynamo.common import _version, forward_pass_metrics, lora, rl
from dynamo.common.engine_monitor import EngineHealthMonitorConfig
from dynamo.common.forward_pass_metrics import ForwardPassMetrics, QueuedRequestMetrics, WelfordAccumulator
from dynamo.common.metadata_upload import MetadataUploader
from dynamo.common.native_offloading import get_native_offloading_capacity_tokens, native_offloading_capacity
from dynamo.common.utils.runtime import create_runtime
from dynamo.errors import InvalidArgument
from dynamo.runtime.calls.context import Context
from support.cases import each_case


def test_the_version_is_that_of_the_native_module() -> None:
    assert _version.__version__ is dynamo._core.__version__


# -- the times of a monitor ---------------------------------------------------------------------------------------------


@each_case(
    ("env", "given", "config", "warnings"),
    [
        ({}, {}, (2.0, 30.0, 60.0), 0),
        ({"INTERVAL": "0.5", "TIMEOUT": "7"}, {}, (0.5, 7.0, 60.0), 0),
        ({"INTERVAL": "fast", "TIMEOUT": "inf"}, {}, (2.0, 30.0, 60.0), 2),
        ({"INTERVAL": "-1"}, {}, (0.0, 30.0, 60.0), 1),
        ({"INTERVAL": "fast"}, {"interval": -3.0, "shutdown_timeout": 0}, (-3.0, 30.0, 0), 0),
    ],
)
def test_a_monitor_takes_its_times_from_arguments_and_environment(
    env: dict[str, str], given: dict[str, Any], config: tuple[float, ...], warnings: int,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    for name, value in env.items():
        monkeypatch.setenv(f"DYN_ENGINE_HEALTH_CHECK_{name}", value)
    assert EngineHealthMonitorConfig.from_env(**given) == EngineHealthMonitorConfig(*config)
    assert len(caplog.records) == warnings


# -- forward passes -----------------------------------------------------------------------------------------------------


def test_a_pass_is_a_map_and_comes_back_whole() -> None:
    metrics = ForwardPassMetrics(worker_id="w", dp_rank=1, queued_requests=QueuedRequestMetrics(num_decode_requests=3))
    content = msgspec.msgpack.decode(forward_pass_metrics.encode(metrics))
    assert (content["version"], content["worker_id"], content["wall_time"]) == (1, "w", 0.0)
    assert (
        content["queued_requests"]["num_decode_requests"],
        "sum_prefill_kv_tokens" in content["queued_requests"],
    ) == (3, False)
    assert content["scheduled_requests"]["sum_prefill_kv_tokens"] == 0
    assert forward_pass_metrics.decode(forward_pass_metrics.encode(metrics)) == metrics
    with pytest.raises(AttributeError):
        setattr(metrics, "dp_rank", 2)  # noqa: B010


@each_case("data", [b"", b"\xc1", b"\x80\x80", forward_pass_metrics.encode(ForwardPassMetrics(version=2))])
def test_what_is_no_pass_of_this_version_is_none(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert forward_pass_metrics.decode(data) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_the_variance_of_values_that_come_one_by_one() -> None:
    held = WelfordAccumulator()
    assert (held.n, held.s, held.variance()) == (0, 0, 0.0)
    values = [3, 10**6, 17, 4]
    for value in values:
        held.add(value)
    assert (held.n, held.s) == (4, sum(values))
    assert held.variance() == pytest.approx(statistics.pvariance(values))


@each_case(
    ("tokens", "entry"),
    [(5, {"total_tokens": 5}), (5.9, {"total_tokens": 5}), (0, None), (-1, None), (True, None), ("5", None), (float("inf"), None)],
)  # fmt: skip
def test_the_capacity_of_an_offload(tokens: Any, entry: Any) -> None:
    assert native_offloading_capacity(tokens) == entry
    read = get_native_offloading_capacity_tokens({"native_offloading_capacity": {"total_tokens": tokens}})
    assert read == (entry and entry["total_tokens"])
    assert get_native_offloading_capacity_tokens(tokens) is None


# -- metadata -----------------------------------------------------------------------------------------------------------


@each_case(
    ("settings", "wrong"),
    [
        ({"url": "x", "format": "json"}, "metadata_upload.format is not supported"),
        ({}, "metadata_upload.url is required"),
        ({"url": 3}, "metadata_upload.url must be a string"),
        ({"url": " "}, "metadata_upload.url must not be empty"),
        ("x", "metadata_upload must be an object"),
    ],
)
def test_the_settings_of_an_upload_are_checked(settings: Any, wrong: str) -> None:
    for request in ({"nvext": {"metadata_upload": settings}}, {"extra_args": {"nvext": {"metadata_upload": settings}}}):
        with pytest.raises(ValueError, match=f"^{wrong}$"):
            MetadataUploader.from_backend_request(request)


def test_the_first_place_of_an_upload_counts() -> None:
    read = MetadataUploader.from_backend_request
    extra = {"nvext": {"metadata_upload": {"url": "b"}}}
    assert read({"nvext": {"metadata_upload": {"url": " a "}}, "extra_args": extra}) == MetadataUploader("a")
    assert read({"nvext": {}, "extra_args": extra}) == MetadataUploader("b")
    assert read({"nvext": None, "extra_args": None}) is MetadataUploader.from_settings(None) is None


def stored(frame: bytes) -> bytes:
    """Read a Zstandard frame of blocks that are stored (RFC 8878, 3.1.1): no window, eight bytes of size."""
    assert frame[:5] == b"\x28\xb5\x2f\xfd\xe0"
    data, place, is_last = b"", 13, False
    while not is_last:
        header = int.from_bytes(frame[place : place + 3], "little")
        is_last, size = bool(header & 1), header >> 3
        assert (header >> 1 & 3, size <= 128 * 1024) == (0, True)
        data, place = data + frame[place + 3 : place + 3 + size], place + 3 + size
    assert (place, int.from_bytes(frame[5:13], "little")) == (len(frame), len(data))
    return data


@pytest.mark.parametrize("kind", ["path", "file", "memory"])
async def test_metadata_are_written_for_each_choice(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    array = numpy.arange(100_000, dtype=numpy.int32).reshape(2, -1)
    url = {"path": str(tmp_path / "a"), "file": f"file://{tmp_path}/a", "memory": f"memory://{tmp_path}/a"}[kind]
    await MetadataUploader(url).upload_choice(1, {"experts": array, "note": "x"})
    await MetadataUploader(url).upload_choice(2, {})
    if kind == "memory":
        import fsspec

        files = {Path(name).name: data.getvalue() for name, data in fsspec.filesystem("memory").store.items()}
    else:
        files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    content = msgspec.msgpack.decode(stored(files.pop("choice_1.msgpack.zst")))
    assert (content["schema_version"], content["metadata"]["note"], files) == (1, "x", {})
    assert content["metadata"]["experts"] == {
        "type": "ndarray",
        "dtype": "int32",
        "shape": [2, 50_000],
        "data": array.tobytes(),
    }
    for strange in (object(), numpy.array([object()])):
        with pytest.raises(TypeError, match=f"no file of metadata can hold a {type(strange).__name__}"):
            await MetadataUploader(url).upload_choice(0, {"x": strange})


# -- adapters -----------------------------------------------------------------------------------------------------------


def adapter(directory: Path, weights: str = "adapter_model.safetensors") -> Path:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").touch()
    (directory / weights).touch()
    return directory


async def test_an_adapter_of_a_directory_is_used_in_place(tmp_path: Path) -> None:
    found = adapter(tmp_path / "a.b")
    manager, uri = lora.LoRAManager(tmp_path / "cache"), (tmp_path / "a.b").as_uri()
    assert await manager.download_lora(uri) == {"status": "success", "local_path": str(found)}
    assert manager.is_cached(uri)
    (found / "adapter_config.json").unlink()
    assert not manager.is_cached(uri)
    answer = await manager.download_lora(uri)
    assert (answer["status"], "adapter_config.json" in answer["message"]) == ("error", True)
    with pytest.raises(InvalidArgument, match="s3://b/c"):
        await lora.LoRADownloader(tmp_path).download_if_needed("s3://b/c")


async def test_an_adapter_of_a_source_of_its_own_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Source:
        async def exists(self, lora_uri: str) -> bool:
            return lora_uri != "mine://no"

        async def download(self, lora_uri: str, dest_path: Path) -> Path:
            if lora_uri == "mine://half":
                return tmp_path
            return adapter(dest_path, "model.lora_weights.npy")  # which must not be there before

    monkeypatch.setenv("DYN_LORA_PATH", str(tmp_path))
    manager = lora.LoRAManager()
    manager.register_custom_source("mine", Source())
    assert not manager.is_cached("mine://x/y.z")
    assert (await manager.download_lora("mine://x/y.z"))["local_path"] == str(tmp_path / "mine__x_y_z")
    assert manager.is_cached("mine://x/y.z")
    assert (await manager.download_lora("mine://x/y.z"))["status"] == "success"  # and is not downloaded again
    half = await manager.download_lora("mine://half")
    assert (half["status"], "no adapter in" in half["message"]) == ("error", True)
    assert await manager.download_lora("mine://no") == {
        "status": "error",
        "message": "its source has no adapter mine://no",
    }


def test_there_is_one_manager_where_adapters_are_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYN_LORA_ENABLED", raising=False)
    assert lora.get_lora_manager() is None
    monkeypatch.setenv("DYN_LORA_ENABLED", "1")
    assert lora.get_lora_manager() is lora.get_lora_manager() is not None


def test_a_value_that_could_not_be_made_is_tried_again() -> None:
    held: lora.OnceLock[int] = lora.OnceLock()
    with pytest.raises(ZeroDivisionError):
        held.get_or_init(lambda: 1 // 0)
    assert held.get() is None
    assert (held.get_or_init(lambda: 1), held.get_or_init(lambda: 2), held.get()) == (1, 1, 1)


# -- the routes of a trainer --------------------------------------------------------------------------------------------


@each_case(
    ("request_body", "message"),
    [
        (None, "rl_dispatch: request required"),
        ({}, "rl_dispatch: request required"),
        ([1], "rl_dispatch: request required"),
        ({"method": 1}, "rl_dispatch: missing 'method' (str)"),
        ({"method": "routes", "kwargs": [1]}, "rl_dispatch: 'kwargs' must be an object"),
        ({"method": "pause"}, "rl request-plane endpoint only supports method='routes'"),
    ],
)
async def test_a_request_that_is_not_for_the_routes_is_an_answer_with_an_error(request_body: Any, message: str) -> None:
    runtime, _ = create_runtime("mem", "mem")
    assert await rl.RLRouteRegistry(runtime).dispatch(request_body) == {"status": "error", "message": message}
    await runtime.aclose()


async def test_a_frontend_reads_the_routes_that_a_worker_serves() -> None:
    async def flush(body: Any) -> dict[str, Any]:
        return {"status": "ok", "got": body}

    runtime, _ = create_runtime("mem", "mem")
    registry = rl.RLRouteRegistry(runtime, world_size=2)
    rl.register_rl_routes(runtime, registry, {"hidden": flush}, enable_dispatch=False)
    rl.register_rl_routes(runtime, registry, {"pause": flush, "flush_cache": flush}, enable_dispatch=True)
    assert registry.describe() == {"status": "ok", "routes": ["flush_cache", "pause"], "world_size": 2}
    reply = await runtime.status_server.answer("POST", "/engine/hidden", b'{"a": 1}')
    assert (reply.status, reply.body) == (200, b'{"status":"ok","got":{"a":1}}')
    endpoint = runtime.endpoint("ns.backend.rl")
    from dynamo.runtime.calls.handler import serve_python

    served = await endpoint.start_serving(serve_python(registry.dispatch_stream, cancel_grace_seconds=1))
    answer = await (await endpoint.client()).generate({"method": "routes"}, annotated=False, context=Context())
    assert [item async for item in answer] == [registry.describe()]
    await served.close()
    await runtime.aclose()


@each_case("size", [0, -1, True, 1.0, "1"])
def test_the_processes_of_an_engine_are_counted(size: Any) -> None:
    with pytest.raises(ValueError, match="world_size must be a positive integer"):
        rl.RLRouteRegistry(cast(Any, None), world_size=size)


async def test_only_the_first_item_of_an_endpoint_is_read() -> None:
    ended = []

    async def handler(body: Any) -> AsyncIterator[Any]:
        try:
            for item in body:
                yield item
        finally:
            ended.append(True)

    first: Any = rl.first_endpoint_response
    assert [await first(handler, body) for body in ([{"a": 1}, {"b": 2}], [], [None])] == [
        {"a": 1}, {"status": "ok"}, {"status": "ok"},
    ]  # fmt: skip
    assert ended == [True] * 3


@each_case(
    ("body", "answer"),
    [
        ({"lora_name": "a", "source": {"uri": "file:///x"}}, ("a", "file:///x")),
        (None, "the body must be an object with 'lora_name'"),
        ({"source": {}}, "lora_name must be a text that is not empty, got None"),
        ({"lora_name": "a"}, "source must be an object with 'uri'"),
        ({"lora_name": "a", "source": {"uri": 3}}, "source.uri must be a text that is not empty, got 3"),
    ],
)
def test_what_names_an_adapter(body: Any, answer: Any) -> None:
    if isinstance(answer, tuple):
        assert (rl.require_lora_load_request(body), rl.require_lora_unload_request(body)) == (answer, answer[0])
        return
    with pytest.raises(rl.RLAdminValidationError, match=f"^{answer}$"):
        rl.require_lora_load_request(body)


def test_an_adapter_to_unload_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(rl.RLAdminValidationError, match=r"^the body must be an object with 'lora_name'$"):
        rl.require_lora_unload_request(None)
    monkeypatch.setenv("SOME_FLAG", "yes")
    assert (rl.env_bool("SOME_FLAG"), rl.env_bool("NO_SUCH_FLAG", True)) == (True, True)
