from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dynamo.errors import CannotConnect, InvalidArgument
from dynamo.frontend.models import directory as models
from dynamo.frontend.models import endpoint_clients, loader, served
from dynamo.frontend.models.cards import CardBook, GroupKey, Scope
from dynamo.frontend.models.files import ChecksumMismatch, ModelFiles
from dynamo.frontend.models.served import NameIndex
from dynamo.protocol.model_types import WorkerType
from dynamo.protocol.records import ModelCard, ModelRecord
from dynamo.router.workers.pool import WorkerClient
from dynamo.runtime.discovery.base import INSTANCES, MODEL_CARDS, Change, Delete, Put
from dynamo.text.model import TextModel
from dynamo.worker.registration import build_card, read_model_directory
from support.cases import each_case
from support.frontend_cluster import Cluster, cluster, memory_runtime, say
from support.patience import PATIENCE_SECONDS
from support.tiny_model import tiny_tokenizer, write_tiny_model


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as found:
        yield found


# -- the book ------------------------------------------------------------------------------------------------------------


def put(instance_id: int, card: ModelCard, namespace: str = "ns", component: str = "c") -> Put:
    record = ModelRecord(
        namespace=namespace, component=component, endpoint="e", instance_id=instance_id, card_json=card.to_json()
    )
    return Put(f"{MODEL_CARDS}/{record.key}", record.encode())


def gone(instance_id: int) -> Delete:
    return Delete(f"{MODEL_CARDS}/ns/c/e/{instance_id:x}")


def test_the_first_card_of_a_group_counts_and_another_one_is_left_out() -> None:
    book = CardBook(Scope())
    same, other = build_card("m"), build_card("m", kv_cache_block_size=64)
    (key,) = book.apply([put(1, same), put(2, other), put(3, same)])
    group = book.group(key)
    assert group is not None
    assert [entry.instance_id for entry in group.accepted] == [1, 3]
    assert [entry.instance_id for entry in group.rejected] == [2]


def test_when_the_first_cards_workers_have_left_the_next_card_counts() -> None:
    book = CardBook(Scope())
    (key,) = book.apply([put(1, build_card("m")), put(2, build_card("m", kv_cache_block_size=64))])
    book.apply([gone(1)])
    group = book.group(key)
    assert group is not None
    assert [entry.instance_id for entry in group.accepted] == [2]
    assert group.rejected == ()
    book.apply([gone(2)])
    assert book.group(key) is None


def test_context_length_and_migration_limit_may_differ() -> None:
    book = CardBook(Scope())
    (key,) = book.apply([put(1, ModelCard(display_name="m", context_length=10)), put(2, ModelCard(display_name="m"))])
    group = book.group(key)
    assert group is not None
    assert not group.rejected


def test_roles_and_namespaces_are_groups_of_their_own() -> None:
    book = CardBook(Scope())
    keys = book.apply(
        [
            put(1, build_card("m")),
            put(2, build_card("m", worker_type=WorkerType.Prefill)),
            put(3, build_card("m", kv_cache_block_size=64), namespace="other"),
        ]
    )
    assert {(key.namespace, key.role) for key in keys} == {
        ("ns", "aggregated"),
        ("ns", "prefill"),
        ("other", "aggregated"),
    }


def test_a_rewritten_card_is_ignored_unless_only_taints_changed(caplog: pytest.LogCaptureFixture) -> None:
    book = CardBook(Scope())
    (key,) = book.apply([put(1, build_card("m"))])
    tainted = build_card("m")
    tainted.runtime_config.taints = {"slow"}
    assert book.apply([put(1, tainted)]) == [key]
    group = book.group(key)
    assert group is not None
    assert group.card.runtime_config.taints == {"slow"}
    assert book.apply([put(1, build_card("m", kv_cache_block_size=64))]) == []
    assert "rewritten with another fingerprint" in caplog.text


@each_case("value", [b"", b"{", b"[]", b'{"type":"Model"}', b'{"type":"Endpoint"}'])
def test_a_record_that_cannot_be_read_is_ignored(value: bytes) -> None:
    assert CardBook(Scope()).apply([Put(f"{MODEL_CARDS}/ns/c/e/1", value)]) == []


@each_case(
    ("scope", "served"),
    [
        (Scope(), {"a", "ab", "b"}),
        (Scope(namespace="a"), {"a"}),
        (Scope(prefix="a"), {"a", "ab"}),
        (Scope(namespace="b", prefix="a"), {"a", "ab"}),
    ],
)
def test_a_scope_is_exact_or_a_prefix(scope: Scope, served: set[str]) -> None:
    book = CardBook(scope)
    book.apply([put(number, build_card("m"), namespace) for number, namespace in enumerate(("a", "ab", "b"))])
    assert {key.namespace for key in book.keys} == served


# -- files ---------------------------------------------------------------------------------------------------------------


def card_of(directory: Path) -> ModelCard:
    return build_card("m", assets=read_model_directory(directory))


def moved(card: ModelCard, rename: dict[str, str]) -> ModelCard:
    """The card with the start of every path replaced."""
    text = card.encode().decode()
    for old, new in rename.items():
        text = text.replace(old, new)
    from dynamo.protocol.records import decode_card

    return decode_card(text)


class Hosted:
    def __init__(self, url: str, requests: list[str]) -> None:
        self.url, self.requests = url, requests


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[Hosted]:
    """The directory `tmp_path/model` behind HTTP, as a worker's status server would offer it."""
    requests: list[str] = []

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            requests.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "model"))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Hosted(f"http://127.0.0.1:{server.server_port}", requests)
        finally:
            server.shutdown()
            thread.join()


def test_files_that_lie_together_are_used_where_they_are(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model")
    assert ModelFiles(tmp_path / "cache").collect(card_of(directory)).directory == directory
    assert not (tmp_path / "cache").exists()


def test_files_are_downloaded_once_and_then_found_in_the_cache(tmp_path: Path, hosted: Hosted) -> None:
    directory = write_tiny_model(tmp_path / "model")
    card = moved(card_of(directory), {str(directory): hosted.url})
    files = ModelFiles(tmp_path / "cache")
    found = files.collect(card, {"127.0.0.1"}).directory
    assert found is not None
    assert (found / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()
    count = len(hosted.requests)
    assert files.collect(card, {"127.0.0.1"}).directory == found
    assert len(hosted.requests) == count
    assert not list(found.glob(".tmp_*"))


def test_a_download_that_is_another_file_is_refused(tmp_path: Path, hosted: Hosted) -> None:
    directory = write_tiny_model(tmp_path / "model")
    card = moved(card_of(directory), {str(directory): hosted.url})
    path = directory / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b"Split", b"split").replace(b'"type"', b'"Type"', 1))
    with pytest.raises((ChecksumMismatch, InvalidArgument)):
        ModelFiles(tmp_path / "cache").collect(card, {"127.0.0.1"})


def test_a_local_file_that_changed_is_refused(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model")
    card = card_of(directory)
    (directory / "config.json").write_text("{}")
    with pytest.raises(ChecksumMismatch, match=r"config\.json hashes to"):
        ModelFiles(tmp_path / "cache").collect(card)


def test_a_file_that_is_on_another_machine_says_what_to_do(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model")
    card = moved(card_of(directory), {str(directory): "/not/here"})
    with pytest.raises(CannotConnect, match="DYN_SELF_HOST_METADATA"):
        ModelFiles(tmp_path / "cache").collect(card)


def test_a_place_this_version_cannot_read_is_named(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model")
    card = moved(card_of(directory), {str(directory): "hf://org/model"})
    with pytest.raises(InvalidArgument, match="reads local paths, file: and http: URIs"):
        ModelFiles(tmp_path / "cache").collect(card)


@pytest.mark.parametrize("kind", ["jinja", "json"])
def test_a_template_of_the_operator_overrides_the_models_own(tmp_path: Path, kind: str) -> None:
    directory = write_tiny_model(tmp_path / "model")
    custom = tmp_path / f"custom.{kind}"
    custom.write_text("MINE" if kind == "jinja" else json.dumps({"chat_template": "MINE"}))
    card = build_card("m", assets=read_model_directory(directory), custom_template_path=custom)
    if kind == "json":
        card.chat_template_file = {
            f"hf_chat_template_{kind}": value for value in (card.chat_template_file or {}).values()
        }
    assert ModelFiles(tmp_path / "cache").collect(card).custom_template == "MINE"


@pytest.mark.parametrize("place", ["local", "hosted", "scattered"])
def test_the_named_templates_of_a_model_come_with_its_card(tmp_path: Path, hosted: Hosted, place: str) -> None:
    directory = write_tiny_model(tmp_path / "model")
    extra = directory / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("TOOLS")
    (extra / "rag.jinja").write_text("RAG")
    card = card_of(directory)
    if place == "hosted":
        card = moved(card, {str(directory): hosted.url})
    elif place == "scattered":
        (directory / "tokenizer.json").rename(tmp_path / "tokenizer.json")
        card = moved(card, {str(directory / "tokenizer.json"): str(tmp_path / "tokenizer.json")})
    found = ModelFiles(tmp_path / "cache").collect(card, {"127.0.0.1"})
    assert found.named_templates == {"rag": "RAG", "tool_use": "TOOLS"}
    (extra / "rag.jinja").write_text("another")
    if place != "scattered":
        assert card_of(directory).checksum() != card.checksum()
    if place == "local":
        with pytest.raises(ChecksumMismatch):
            ModelFiles(tmp_path / "cache").collect(card)


def test_a_file_of_templates_by_name_is_read_whole(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model")
    named = [{"name": "default", "template": "PLAIN"}, {"name": "tool_use", "template": "TOOLS"}]
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": named}))
    found = ModelFiles(tmp_path / "cache").collect(card_of(directory))
    assert (found.custom_template, found.named_templates) == ("PLAIN", {"tool_use": "TOOLS"})
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": named[1:]}))
    with pytest.raises(InvalidArgument, match="named `default`"):
        ModelFiles(tmp_path / "cache").collect(card_of(directory))


@pytest.mark.parametrize("operators", ["none", "worker", "frontend"])
async def test_requests_with_tools_get_the_template_for_tools(tmp_path: Path, operators: str) -> None:
    directory = write_tiny_model(tmp_path / "model")
    (directory / "chat_template.jinja").write_text("plain")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    custom = tmp_path / "custom.jinja"
    custom.write_text("mine")
    settings: dict[str, Any] = {"custom_jinja_template": str(custom)} if operators == "frontend" else {}
    members: dict[str, Any] = {"custom_template_path": custom} if operators == "worker" else {}
    async with cluster(tmp_path, **settings) as house:
        worker = await house.worker(say([1]), directory=directory, **members)
        tool = {"type": "function", "function": {"name": "f"}}
        each: list[dict[str, Any]] = [{}, {"tools": [tool]}]
        for fields in each:
            assert (await house.client.chat("hi", **fields)).status == 200
        prompts = [tiny_tokenizer().decode(request["token_ids"]) for request in worker.requests]
        assert prompts == (["plain", "tools"] if operators == "none" else ["mine", "mine"])


# -- live ----------------------------------------------------------------------------------------------------------------


async def test_a_card_without_an_instance_is_not_listed_and_not_ready(house: Cluster) -> None:
    runtime = memory_runtime()
    directory = house.frontend.models
    try:
        await runtime.endpoint("ns.backend.generate").publish_model(build_card("m").to_json())
        # Everything is loaded; only a worker is missing.
        async with asyncio.timeout(PATIENCE_SECONDS):
            await directory.wait_for(lambda: bool(directory._cluster.clients.by_endpoint))
        assert (await house.client.get("/v1/models")).json["data"] == []
        assert (await house.client.get("/v1/models/m/ready")).status == 503
        answer = await house.client.chat("hi")
        assert answer.status == 503
        assert answer.json["message"].startswith("Model `m` is not ready to serve requests yet.")
        await house.worker()
        assert (await house.client.chat("hi")).status == 200
    finally:
        await runtime.aclose()


async def test_a_model_comes_and_goes_with_its_workers(house: Cluster) -> None:
    assert (await house.client.get("/v1/models")).json == {"object": "list", "data": []}
    assert (await house.client.chat("hi")).status == 404
    first = await house.worker()
    second = await house.worker()
    (model,) = (await house.client.get("/v1/models")).json["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("m", "model", "dynamo")
    assert house.metric("dynamo_frontend_model_ready", model="m") == 1
    await first.stop()
    assert (await house.client.chat("hi")).status == 200
    await second.stop()
    await house.gone("m")
    assert (await house.client.get("/v1/models")).json["data"] == []
    assert house.metric("dynamo_frontend_model_ready", model="m") == 0


async def test_a_model_whose_only_worker_restarts_is_not_ready_and_not_unknown(
    house: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await house.client.chat("hi")).status == 404
    worker = await house.worker()
    await worker.stop()
    await house.gone("m")
    answer = await house.client.chat("hi")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert answer.json["message"].startswith("Model `m` is not ready to serve requests yet.")
    assert (await house.client.get("/v1/models/m/ready")).status == 503
    assert (await house.client.get("/ready")).status == 503
    assert (await house.client.chat("hi", model="another")).status == 404
    monkeypatch.setattr(served, "GONE_SECONDS", 0.0)  # as if it had left five minutes ago
    assert (await house.client.chat("hi")).status == 404
    assert (await house.client.get("/v1/models/m/ready")).status == 404


async def test_a_model_that_starts_for_the_first_time_is_not_ready_until_a_worker_has_registered(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, starting_model="m") as house:
        answer = await house.client.chat("hi")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.json["message"].startswith("Model `m` is not ready to serve requests yet.")
        assert (await house.client.get("/v1/models/m/ready")).status == 503
        assert (await house.client.chat("hi", model="another")).status == 404
        await house.worker(model="by another name")
        assert (await house.client.chat("hi")).status == 404


def test_names_that_left_are_bounded_and_one_that_comes_back_is_not_gone() -> None:
    now = [0.0]
    names = NameIndex(lambda: now[0])
    for number in range(served.MAX_GONE + 1):
        names.set({}, [str(number)])
    names.set({}, [])
    assert not names.is_expected("0")
    assert names.is_expected("1")
    names.set({}, ["1"])
    now[0] = served.GONE_SECONDS
    assert names.is_registered("1")
    names.set({}, [])
    assert (names.is_expected("1"), names.is_expected("2")) == (True, False)
    names.set({}, ["1", "2"])
    names.unload("1")
    names.unload("2")  # in one of its namespaces; another one serves it on
    assert names.is_registered("1")
    names.set({}, ["2"])
    assert (names.is_expected("1"), names.is_registered("2")) == (False, True)
    names.set({}, [])
    assert names.is_expected("2")


async def test_a_model_can_be_looked_at_by_its_id_slashes_included(house: Cluster) -> None:
    await house.worker(model="org/model")
    assert (await house.client.get("/v1/models/org/model")).json["id"] == "org/model"
    assert (await house.client.get("/v1/models/org%2Fmodel")).json["id"] == "org/model"
    assert (await house.client.get("/v1/models/nope")).status == 404
    shape = (await house.client.get("/v1/models", anthropic_version="2023-06-01")).json["data"]
    assert shape[0]["type"] == "model"


async def test_a_model_may_be_named_by_an_absolute_path(house: Cluster) -> None:
    await house.worker(model="/models/m")
    assert (await house.client.get("/v1/models//models/m")).json["id"] == "/models/m"
    assert (await house.client.get("/v1/models/%2Fmodels%2Fm/")).json["id"] == "/models/m"
    assert (await house.client.get("/v1/models//models/m/ready")).status == 200
    assert (await house.client.get("/v1/models/")).json["data"][0]["id"] == "/models/m"


async def test_ready_says_who_is_there_and_who_is_missing(house: Cluster) -> None:
    worker_id = (await house.worker(model="org/m")).endpoint.connection_id()
    answer = await house.client.get("/v1/models/org/m/ready")
    assert (answer.status, answer.json) == (
        200,
        {
            "model": "org/m",
            "ready": True,
            "namespaces": {
                "ns": {
                    "ready": True,
                    "worker_types": {"aggregated": {"workers": 1, "needs": [], "instance_ids": [worker_id]}},
                    "present": ["aggregated"],
                    "missing_worker_types": [],
                }
            },
        },
    )
    assert (await house.client.get("/v1/models/nope/ready")).status == 404


async def test_a_worker_of_a_role_that_is_not_built_is_listed_and_not_served(house: Cluster) -> None:
    await house.worker(worker_type=WorkerType.Decode, needs=[["prefill"]], wait=False)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.frontend.models.wait_for(lambda: house.frontend.models.is_registered("m"))
    answer = await house.client.chat("hi")
    assert answer.status == 503
    assert answer.json["message"].startswith("Model `m` is not ready to serve requests yet.")
    ready = await house.client.get("/v1/models/m/ready")
    assert ready.status == 503
    assert ready.json["namespaces"]["ns"]["missing_worker_types"] == ["prefill"]


async def test_a_conflicting_worker_gets_no_request_and_everybody_hears_of_it(
    house: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    first = await house.worker(say("one"))
    other = await house.worker(say("two"), kv_cache_block_size=64, wait=False)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.frontend.models.wait_for(
            lambda: house.metric("dynamo_frontend_model_card_conflicts_total", model="m") == 1
        )
    for _ in range(4):
        assert (await house.client.chat("hi")).json["choices"][0]["message"]["content"] == "one"
    assert not other.requests
    assert "registered model m with a card that differs" in caplog.text
    (rejected,) = (await house.client.get("/v1/models/m/ready")).json["namespaces"]["ns"]["rejected_workers"]
    assert rejected["instance_id"] == other.endpoint.connection_id()
    await first.stop()  # the first card's last worker leaves: the other one takes over
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.frontend.models.wait_for(lambda: house.sees(other, "m"))
    assert (await house.client.chat("hi")).json["choices"][0]["message"]["content"] == "two"


async def test_two_models_may_share_an_endpoint_name(house: Cluster) -> None:
    await house.worker(say("one"), model="m1")
    await house.worker(say("two"), model="m2")
    for _ in range(3):
        for model, text in (("m1", "one"), ("m2", "two")):
            answer = await house.client.chat("hi", model=model)
            assert answer.json["choices"][0]["message"]["content"] == text


async def test_requests_are_shared_by_namespaces_and_by_components(house: Cluster) -> None:
    workers = [
        await house.worker(namespace="a"),
        await house.worker(namespace="b", kv_cache_block_size=64),  # another namespace may serve another card
        await house.worker(namespace="a", component="second"),
    ]
    for _ in range(12):
        assert (await house.client.chat("hi")).status == 200
    assert all(len(worker.requests) >= 2 for worker in workers)


async def test_a_name_has_aliases(house: Cluster) -> None:
    await house.worker(aliases=["other"])
    answer = await house.client.chat("hi", model="other")
    assert (answer.status, answer.json["model"]) == (200, "other")
    assert (await house.client.get("/v1/models/other/ready")).json["ready"] is True
    assert [model["id"] for model in (await house.client.get("/v1/models")).json["data"]] == ["m"]


async def test_a_model_whose_files_come_late_is_served_when_they_are_there(
    house: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loader, "RETRY_SECONDS", (0.005,))
    directory = write_tiny_model(tmp_path / "model")
    card = card_of(directory)
    directory.rename(tmp_path / "elsewhere")
    worker = await house.worker(card=card, wait=False)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while house.metric("dynamo_frontend_model_load_failures_total", model="m") < 2:
            await asyncio.sleep(0.005)
    assert (await house.client.chat("hi")).status == 503
    assert "cannot be loaded, next attempt" in caplog.text
    ready = (await house.client.get("/v1/models/m/ready")).json
    assert "is not on this machine" in ready["namespaces"]["ns"]["error"]
    (tmp_path / "elsewhere").rename(directory)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.frontend.models.wait_for(lambda: house.sees(worker, "m"))
    assert (await house.client.chat("hi")).status == 200


@pytest.mark.parametrize(
    ("settings", "served"), [({"namespace": "prod"}, {"prod"}), ({"namespace_prefix": "prod"}, {"prod", "prod-2"})]
)
async def test_a_frontend_serves_only_its_scope(tmp_path: Path, settings: dict[str, Any], served: set[str]) -> None:
    async with cluster(tmp_path, **settings) as house:
        for namespace in ("prod", "prod-2", "test"):
            await house.worker(model=namespace, namespace=namespace, wait=namespace in served)
        listed = (await house.client.get("/v1/models")).json["data"]
        assert {model["id"] for model in listed} == served
        assert {record["namespace"] for record in (await house.client.get("/health")).json["instances"]} == served


# -- operators -----------------------------------------------------------------------------------------------------------


async def test_health_lists_every_instance_and_is_healthy_without_models(house: Cluster) -> None:
    answer = await house.client.get("/health")
    assert (answer.status, answer.json) == (200, {"status": "healthy", "endpoints": [], "instances": []})
    worker = await house.worker()
    await house.worker()
    body = (await house.client.get("/health")).json
    assert body["endpoints"] == ["dyn://ns.backend.generate"]
    assert len(body["instances"]) == 2
    mine = next(one for one in body["instances"] if one["instance_id"] == worker.endpoint.connection_id())
    assert (mine["namespace"], mine["component"], mine["endpoint"]) == ("ns", "backend", "generate")
    assert "type" not in mine
    assert (await house.client.get("/live")).json == {"status": "live", "message": "Service is live"}


async def test_an_unknown_route_and_a_wrong_method_answer_as_natively(house: Cluster) -> None:
    missing = await house.client.get("/nope")
    assert missing.status == 404
    assert {key: missing.json[key] for key in ("message", "type", "code")} == {
        "message": "Route not found: GET /nope",
        "type": "Not Found",
        "code": 404,
    }
    wrong = await house.client.get("/v1/chat/completions")
    assert (wrong.status, wrong.body, wrong.headers["allow"]) == (405, b"", "POST")


async def test_what_operators_read_is_what_the_document_says(house: Cluster) -> None:
    document = (await house.client.get("/openapi.json")).json
    await house.worker(kv_cache_block_size=16)
    await house.worker(kv_cache_block_size=64, wait=False)  # a conflict, which `ready` shows
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.frontend.models.wait_for(
            lambda: house.metric("dynamo_frontend_model_card_conflicts_total", model="m") == 1
        )
    for path, route, name in (
        ("/v1/models", "/v1/models", "ModelList"),
        ("/v1/models/m", "/v1/models/{id}", "Model"),
        ("/v1/models/m/ready", "/v1/models/{id}/ready", "ModelReadiness"),
        ("/health", "/health", "Health"),
        ("/live", "/live", "Live"),
    ):
        answer = await house.client.get(path)
        told = document["paths"][route]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert told == {"$ref": f"#/components/schemas/{name}"}
        schema = {**told, "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(answer.json)
        assert set(answer.json) <= set(document["components"]["schemas"][name]["properties"]), path


async def test_metrics_and_the_openapi_document_are_served(house: Cluster) -> None:
    await house.worker()
    await house.client.chat("hi")
    await house.client.chat("hi", model="nope")
    metrics = await house.client.get("/metrics")
    text = metrics.body.decode()
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    for name in (
        "requests_started_total",
        "requests_total",
        "request_duration_seconds_bucket",
        "time_to_first_token_seconds_bucket",
        "input_sequence_tokens_bucket",
        "output_tokens_total",
        "template_seconds_bucket",
        "tokenize_seconds_bucket",
        "event_loop_delay_seconds_bucket",
        "model_kv_cache_block_size",
    ):
        assert f"dynamo_frontend_{name}" in text, name
    assert house.metric(
        "dynamo_frontend_requests_total",
        model="unknown_model",
        endpoint="chat_completions",
        request_type="unary",
        status="error",
        error_type="not_found",
    )
    assert house.metric("dynamo_frontend_failures_total", **{"class": "NotFound", "reason": "request.not_found"}) == 1
    document = (await house.client.get("/openapi.json")).json
    assert "/v1/chat/completions" in document["paths"]


async def test_a_record_that_is_no_unicode_does_not_stop_the_watch(
    house: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = memory_runtime()
    try:
        await runtime.start()
        for bucket in (MODEL_CARDS, INSTANCES):
            await runtime.discovery.put(f"{bucket}/ns/c/e/1", b'{"type":"Model","namespace":"\xff"}')
        await house.worker()
        assert (await house.client.chat("hi")).status == 200
        assert "is not readable and ignored" in caplog.text
    finally:
        await runtime.aclose()


async def test_files_that_break_a_parser_are_tried_again_and_say_so(
    house: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loader, "RETRY_SECONDS", (0.005,))
    load, failures = house.frontend.models._loader._load, [KeyError("pattern"), RecursionError("too deep")]

    async def fragile(card: ModelCard, worker_hosts: frozenset[str]) -> TextModel:
        if failures:
            raise failures.pop()
        return await load(card, worker_hosts)

    monkeypatch.setattr(house.frontend.models._loader, "_load", fragile)
    await house.worker()
    assert (await house.client.chat("hi")).status == 200
    assert house.metric("dynamo_frontend_model_load_failures_total", model="m") == 2
    assert "KeyError" in caplog.text


async def test_a_watch_that_broke_learns_what_it_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(models, "WATCH_RETRY_SECONDS", 0.005)
    async with cluster(tmp_path) as house:
        staying = await house.worker(model="stays")
        leaving = await house.worker(model="leaves")
        directory = house.frontend.models
        apply, broken = directory._cluster.cards.apply, asyncio.Event()

        def breaks(changes: Iterable[Change]) -> list[GroupKey]:
            if not broken.is_set():
                broken.set()
                raise RuntimeError("a fault of ours")
            return apply(changes)

        monkeypatch.setattr(directory._cluster.cards, "apply", breaks)
        await leaving.stop()  # the batch that says so is the one that is lost
        await house.gone("leaves")
        assert house.sees(staying, "stays")
        assert "a fault of ours" in caplog.text


async def test_a_model_that_is_replaced_is_not_ready_meanwhile(
    house: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "RETRY_SECONDS", (0.005,))
    directory = write_tiny_model(tmp_path / "model")
    card = card_of(directory)
    directory.rename(tmp_path / "elsewhere")
    first = await house.worker()
    await house.worker(card=card, wait=False)
    assert house.metric("dynamo_frontend_model_ready", model="m") == 1
    await first.stop()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.frontend.models.wait_for(lambda: house.frontend.models.lookup("m") is None)
    assert house.metric("dynamo_frontend_model_ready", model="m") == 0


async def test_a_models_own_name_wins_over_anothers_alias(house: Cluster) -> None:
    await house.worker(say("other"), model="a", aliases=["b"])
    await house.worker(say("own"), model="b")
    for _ in range(4):
        assert (await house.client.chat("hi", model="b")).json["choices"][0]["message"]["content"] == "own"
    assert [model["id"] for model in (await house.client.get("/v1/models")).json["data"]] == ["a", "b"]


async def test_an_endpoint_that_cannot_be_reached_at_once_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_clients, "RETRY_SECONDS", 0.005)
    async with cluster(tmp_path) as house:
        await house.worker()
        connect, failures = (
            house.frontend.models._cluster.clients._connect,
            [CannotConnect("not yet"), CannotConnect("nor now")],
        )

        async def fragile(endpoint: str) -> WorkerClient:
            if failures:
                raise failures.pop()
            return await connect(endpoint)

        monkeypatch.setattr(house.frontend.models._cluster.clients, "_connect", fragile)
        second = await house.worker(component="second")
        for _ in range(2):
            await house.client.chat("hi")
        assert second.requests


async def test_a_model_waits_for_the_first_workers_that_are_asked_for_and_for_no_others(tmp_path: Path) -> None:
    async with cluster(tmp_path, router_min_initial_workers=2) as house:
        first = await house.worker(wait=False)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await house.frontend.models.wait_for(lambda: bool(house.frontend.models.served()))
        assert (await house.client.chat("hi")).status in (404, 503)
        second = await house.worker()
        assert (await house.client.chat("hi")).status == 200
        await first.stop()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await house.frontend.models.wait_for(lambda: not house.sees(first, "m"))
        assert (await house.client.chat("hi")).status == 200
        assert second.requests
