from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3

from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine_config import EngineConfig
from dynamo.contract.modes import DisaggregationMode
from dynamo.errors import CannotConnect, InvalidArgument
from dynamo.protocol.model_types import ModelInput, ModelType, WorkerType
from dynamo.protocol.records import decode_card
from dynamo.worker import hub
from dynamo.worker.registration import (
    build_card,
    checked_taints,
    plan_role,
    read_model_directory,
    register_model,
    resolve_assets,
    runtime_config_of,
    unregister_model,
    update_model_taints,
)
from support.cases import each_case
from support.patience import PATIENCE_SECONDS


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "My.Model"
    directory.mkdir()
    for name, content in {
        "config.json": {"text_config": {"max_position_embeddings": 4096}},
        "tokenizer.json": {"version": "1.0"},
        "tokenizer_config.json": {"model_max_length": 1e30},
        "generation_config.json": {"eos_token_id": 1},
    }.items():
        (directory / name).write_text(json.dumps(content))
    return directory


class RecordingEndpoint:
    """Keeps what is published, as discovery would."""

    def __init__(self) -> None:
        self.cards: dict[str | None, dict[str, Any]] = {}

    async def publish_model(self, card_json: dict[str, Any], suffix: str | None = None) -> None:
        self.cards[suffix] = json.loads(json.dumps(card_json))

    async def withdraw_model(self, suffix: str | None = None) -> None:
        self.cards.pop(suffix, None)

    async def published_model(self, suffix: str | None = None) -> dict[str, Any] | None:
        return self.cards.get(suffix)


class Host:
    """A status server's file routes, without the server."""

    url = "http://10.0.0.1:9090"

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}

    def add_metadata_files(self, *place: Any) -> dict[str, str]:
        *folder, files = place
        paths = {name: "/v1/metadata/" + "/".join([*folder, name]) for name in files}
        self.files |= {paths[name]: path for name, path in files.items()}
        return paths

    def remove_metadata_files(self, *folder: str) -> None:
        prefix = "/v1/metadata/" + "/".join(folder) + "/"
        self.files = {path: file for path, file in self.files.items() if not path.startswith(prefix)}


class HostedEndpoint(RecordingEndpoint):
    namespace, component, name = "ns", "backend", "generate"

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.runtime = SimpleNamespace(status_server=host)


async def unreachable(name: str, ignore_weights: bool) -> str:
    raise CannotConnect(f"fetch {name!r}: no network")


def test_a_directory_becomes_a_card_with_its_files_and_their_hashes(model_directory: Path) -> None:
    card = build_card("m", source_path=str(model_directory), assets=read_model_directory(model_directory))
    found = dict(card.files())
    assert set(found) == {
        "hf_config_json",
        "hf_tokenizer_json",
        "hf_tokenizer_config_json",
        "hf_generation_config_json",
    }
    for ref in found.values():
        content = Path(ref.path).read_bytes()
        assert ref.checksum == "blake3:" + blake3(content).hexdigest()
        assert ref.size == len(content)
    assert card.architectural_max_context_length == card.context_length == 4096
    assert not card.is_name_only


@pytest.mark.parametrize(
    ("config", "tokenizer_config", "engine", "effective"),
    [
        ({"max_position_embeddings": 100}, {"model_max_length": 50}, 30, 30),
        ({"max_position_embeddings": 100}, {"model_max_length": 50}, None, 100),
        ({"n_positions": 64}, {}, None, 64),
        ({}, {"model_max_length": 50}, None, 50),
        ({}, {"model_max_length": 1e30}, None, 0),
        ({"max_position_embeddings": True}, {}, None, 0),
    ],
)
def test_the_context_length_is_the_engines_then_the_models_then_the_tokenizers(
    model_directory: Path, config: dict[str, Any], tokenizer_config: dict[str, Any], engine: int | None, effective: int
) -> None:
    (model_directory / "config.json").write_text(json.dumps(config))
    (model_directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    engine_config = EngineConfig("m", context_length=engine)
    card = build_card(
        "m",
        assets=read_model_directory(model_directory),
        runtime_config=runtime_config_of(WorkerConfig("ns"), engine_config),
    )
    assert card.context_length == effective


def test_a_template_file_overrides_and_the_operators_overrides_that(model_directory: Path, tmp_path: Path) -> None:
    (model_directory / "chat_template.jinja").write_text("{{ messages }}")
    custom = tmp_path / "mine.jinja"
    custom.write_text("{{ mine }}")
    assets = read_model_directory(model_directory)
    plain = build_card("m", assets=assets).template_file()
    assert plain is not None
    assert (plain[0], Path(plain[1].path).name) == ("hf_chat_template_jinja", "chat_template.jinja")
    mine = build_card("m", assets=assets, custom_template_path=custom)
    assert mine.chat_template_file is not None
    assert mine.chat_template_file["hf_chat_template_jinja"]["is_custom"] is True
    assert mine.template_file() is not None
    assert mine.template_file()[1].path == str(custom)  # type: ignore[index]
    with pytest.raises(InvalidArgument, match="custom_jinja_template"):
        build_card("m", custom_template_path=tmp_path / "absent.jinja")


def test_an_empty_file_is_hashed_too(model_directory: Path) -> None:
    (model_directory / "chat_template.jinja").touch()
    template = build_card("m", assets=read_model_directory(model_directory)).template_file()
    assert template is not None
    assert template[1].checksum == "blake3:" + blake3().hexdigest()


@pytest.mark.parametrize(
    ("change", "message"),
    [("remove tokenizer.json", "tokenizer.json"), ("break config.json", "config.json"), ("list config.json", "object")],
)
def test_a_directory_that_is_no_model_is_refused_by_name(model_directory: Path, change: str, message: str) -> None:
    verb, name = change.split()
    if verb == "remove":
        (model_directory / name).unlink()
    else:
        (model_directory / name).write_text("{" if verb == "break" else "[]")
    with pytest.raises(InvalidArgument, match=message):
        read_model_directory(model_directory)


def test_a_tiktoken_model_is_a_tokenizer(model_directory: Path) -> None:
    (model_directory / "tokenizer.json").rename(model_directory / "qwen.tiktoken")
    assert set(read_model_directory(model_directory).artefacts["tokenizer"]) == {"tik_token_model"}


async def never(name: str, ignore_weights: bool) -> str:
    raise AssertionError(f"{name} left the machine")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's local cache, empty."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", ["test-model", "org/model"])
async def test_a_name_stays_on_the_machine_and_is_a_name_only_card(
    name: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assets = await resolve_assets(name, fetch=never)
    assert assets is None
    assert "name only" in caplog.text
    assert f"hub:{name}" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    assert build_card(name, assets=assets).is_name_only


async def test_a_name_that_may_be_fetched_and_cannot_is_a_warning_and_a_name_only_card(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assets = await resolve_assets("test-model", allow_download=True, fetch=unreachable)
    assert assets is None
    assert "neither a local directory nor fetchable" in caplog.text


async def test_a_model_of_the_hub_that_cannot_be_fetched_is_an_error() -> None:
    with pytest.raises(CannotConnect, match="no network"):
        await resolve_assets("hub:test-model", fetch=unreachable)


async def test_a_copy_that_is_cached_already_is_used_without_a_question(cache: Path, model_directory: Path) -> None:
    model = cache / "models--org--model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    (model / "snapshots").mkdir()
    (model / "snapshots" / "abc").symlink_to(model_directory)
    assert (await resolve_assets("org/model", fetch=never)).architectural_context_length == 4096  # type: ignore[union-attr]
    assert await hub.fetch_model("org/model") == str(model / "snapshots" / "abc")


async def test_fetch_model_asks_a_hub_only_when_told_to(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYN_ALLOW_DOWNLOAD", raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it fails
    with pytest.raises(CannotConnect, match="write hub:org/model, or set DYN_ALLOW_DOWNLOAD=1"):
        await hub.fetch_model("org/model")
    with pytest.raises(CannotConnect, match="is not installed"):
        await hub.fetch_model("hub:org/model")
    monkeypatch.setenv("DYN_ALLOW_DOWNLOAD", "1")
    with pytest.raises(CannotConnect, match="is not installed"):
        await hub.fetch_model("org/model")


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./nowhere", "~/nowhere-at-all"])
async def test_a_path_that_does_not_exist_is_an_error_and_not_a_name(path: str) -> None:
    with pytest.raises(InvalidArgument, match="does not exist"):
        await resolve_assets(path, fetch=unreachable)


async def test_no_name_is_a_name_only_card_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    assert await resolve_assets("", fetch=unreachable) is None
    assert not caplog.records


@pytest.mark.parametrize(("name", "allowed"), [("hub:org/model", False), ("org/model", True)])
async def test_a_fetched_copy_is_read_like_a_directory(name: str, allowed: bool, model_directory: Path) -> None:
    async def fetch(name: str, ignore_weights: bool) -> str:
        assert (name, ignore_weights) == ("hub:org/model", True)
        return str(model_directory)

    found = await resolve_assets(name, allow_download=allowed, fetch=fetch)
    assert found is not None
    assert found.architectural_context_length == 4096


async def test_fetching_offline_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CannotConnect, match="HF_HUB_OFFLINE"):
        await hub.fetch_model("hub:test-model-that-nobody-cached")
    assert await hub.fetch_model(str(tmp_path)) == str(tmp_path)


async def test_a_hub_that_does_not_answer_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    import huggingface_hub

    release = threading.Event()

    def stuck(*_args: Any, **_kwargs: Any) -> None:
        release.wait(10)

    def uncached(*_args: Any, **_kwargs: Any) -> str:
        raise FileNotFoundError("not cached")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "HUB_ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", uncached)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", stuck)
    try:
        with pytest.raises(CannotConnect, match="did not answer"):
            await hub.fetch_model("hub:some-model")
    finally:
        release.set()


@each_case("route", [False, True])
@each_case("mode", DisaggregationMode)
def test_every_role_registers_as_the_table_says(mode: DisaggregationMode, route: bool) -> None:
    prefill, decode, encode, whole = WorkerType.Prefill, WorkerType.Decode, WorkerType.Encode, WorkerType.Aggregated
    both = ModelType.Chat | ModelType.Completions
    table = {
        (DisaggregationMode.AGGREGATED, False): (both, whole, ()),
        (DisaggregationMode.AGGREGATED, True): (both, whole, ((encode,),)),
        (DisaggregationMode.PREFILL, False): (ModelType.Prefill, prefill, ((decode,),)),
        (DisaggregationMode.PREFILL, True): (ModelType.Prefill, prefill, ((decode, encode),)),
        (DisaggregationMode.DECODE, False): (both, decode, ((prefill,),)),
        (DisaggregationMode.ENCODE, False): (ModelType.Empty, encode, ((prefill, decode), (whole,))),
    }
    expected = table.get((mode, route))
    if expected is None:
        with pytest.raises(InvalidArgument, match="route_to_encoder"):
            plan_role(mode, "chat,completions", route_to_encoder=route)
        return
    plan = plan_role(mode, "chat,completions", route_to_encoder=route)
    assert (plan.model_type, plan.worker_type, plan.needs) == expected


def test_a_prefill_card_has_no_surface_and_no_parsers() -> None:
    config = WorkerConfig("ns", disaggregation_mode=DisaggregationMode.PREFILL, tool_call_parser="hermes")
    plan = plan_role(config.disaggregation_mode, config.endpoint_types)
    card = build_card(
        "m",
        model_type=plan.model_type,
        worker_type=plan.worker_type,
        runtime_config=runtime_config_of(config, EngineConfig("m")),
    )
    assert card.surfaces == ModelType.Empty
    assert decode_card(card.to_json()).role is WorkerType.Prefill
    assert card.runtime_config.tool_call_parser is None


def test_the_engines_figures_reach_the_card() -> None:
    engine = EngineConfig(
        "m",
        context_length=8192,
        kv_cache_block_size=32,
        total_kv_blocks=100,
        data_parallel_size=2,
        data_parallel_start_rank=4,
        bootstrap_host="h",
        bootstrap_port=1234,
        runtime_data={"k": 1},
    )
    config = WorkerConfig("ns", default_thinking_mode="enabled", reasoning_parser="qwen3")
    record = runtime_config_of(config, engine).to_json()
    assert record["disaggregated_endpoint"] == {"bootstrap_host": "h", "bootstrap_port": 1234}
    assert record["runtime_data"] == {"k": 1, "default_thinking_mode": "enabled"}
    assert (record["data_parallel_size"], record["data_parallel_start_rank"]) == (2, 4)
    assert (record["context_length"], record["total_kv_blocks"]) == (8192, 100)
    assert record["reasoning_parser"] == "qwen3"
    assert engine.runtime_data == {"k": 1}  # the engine's own dict is not written to


def test_a_host_without_a_port_is_not_advertised() -> None:
    record = runtime_config_of(WorkerConfig("ns"), EngineConfig("m", bootstrap_host="h")).to_json()
    assert "disaggregated_endpoint" not in record


async def test_register_and_unregister(model_directory: Path) -> None:
    endpoint = RecordingEndpoint()
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat,
        endpoint,
        str(model_directory),
        "served",
        worker_type=WorkerType.Decode,
        needs=[[WorkerType.Prefill]],
        model_aliases=["other", "served"],
        kv_cache_block_size=32,
        user_data={"x": 1},
    )
    card = decode_card(endpoint.cards[None])
    assert (card.display_name, card.slug, card.source_path) == ("served", "served", str(model_directory))
    assert (card.worker_type, card.needs, card.aliases) == ("decode", [["prefill"]], ["other"])
    assert (card.kv_cache_block_size, card.user_data) == (32, {"x": 1})
    await unregister_model(endpoint)
    await unregister_model(endpoint)
    assert endpoint.cards == {}


@pytest.mark.parametrize("kind", [ModelType.TensorBased, ModelType.Images, ModelType.Videos, ModelType.Realtime])
async def test_nothing_of_a_model_is_read_for_an_api_without_a_tokenizer(
    model_directory: Path, kind: ModelType
) -> None:
    (model_directory / "tokenizer.json").unlink()
    endpoint, role = RecordingEndpoint(), WorkerType.Aggregated
    with pytest.raises(InvalidArgument, match="neither tokenizer"):
        await register_model(ModelInput.Tokens, kind | ModelType.Chat, endpoint, str(model_directory), worker_type=role)
    await register_model(ModelInput.Tokens, kind, endpoint, str(model_directory), "m", worker_type=role)
    card = decode_card(endpoint.cards[None])
    assert (list(card.files()), card.context_length) == ([], 4096)


async def test_a_status_server_offers_the_cards_files(model_directory: Path, tmp_path: Path) -> None:
    template = tmp_path / "config.json"  # the name of another artefact, from another directory
    template.write_text("{{ messages }}")
    host = Host()
    endpoint = HostedEndpoint(host)
    common: dict[str, Any] = {"worker_type": WorkerType.Aggregated, "custom_template_path": str(template)}
    await register_model(ModelInput.Tokens, ModelType.Chat, endpoint, str(model_directory), "m", **common)
    card = decode_card(endpoint.cards[None])
    local = build_card(
        "m", assets=read_model_directory(model_directory), model_type=ModelType.Chat, custom_template_path=template
    )
    assert card.checksum() == local.checksum()
    there = dict(local.files())
    for kind, ref in card.files():
        assert ref.path.startswith("http://10.0.0.1:9090/v1/metadata/ns/backend/generate/m/_base/")
        assert host.files[ref.path.removeprefix(host.url)] == Path(there[kind].path)
        assert ref.checksum == there[kind].checksum
    await unregister_model(endpoint)
    assert host.files == {}


async def test_a_status_server_offers_the_named_templates(model_directory: Path) -> None:
    extra = model_directory / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("TOOLS")
    host = Host()
    endpoint = HostedEndpoint(host)
    role = WorkerType.Aggregated
    await register_model(ModelInput.Tokens, ModelType.Chat, endpoint, str(model_directory), "m", worker_type=role)
    (ref,) = decode_card(endpoint.cards[None]).named_templates().values()
    assert host.files[ref.path.removeprefix(host.url)] == extra / "tool_use.jinja"
    for number in range(16):
        (extra / f"{number}.jinja").touch()
    with pytest.raises(InvalidArgument, match="at most 16"):
        await register_model(ModelInput.Tokens, ModelType.Chat, endpoint, str(model_directory), "m", worker_type=role)


@pytest.mark.parametrize("how", ["argument", "environment"])
async def test_self_hosting_can_be_switched_off(
    model_directory: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = HostedEndpoint(Host())
    if how == "environment":
        monkeypatch.setenv("DYN_SELF_HOST_METADATA", "false")
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat,
        endpoint,
        str(model_directory),
        worker_type=WorkerType.Aggregated,
        self_host_metadata=False if how == "argument" else None,
    )
    assert all(Path(ref.path).is_absolute() for _, ref in decode_card(endpoint.cards[None]).files())


async def test_self_hosting_without_a_status_server_is_refused(model_directory: Path) -> None:
    with pytest.raises(InvalidArgument, match="DYN_SYSTEM_PORT"):
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat,
            RecordingEndpoint(),
            str(model_directory),
            worker_type=WorkerType.Aggregated,
            self_host_metadata=True,
        )


async def test_an_adapter_is_registered_beside_its_base_model(model_directory: Path) -> None:
    endpoint = RecordingEndpoint()
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat,
        endpoint,
        "ignored",
        worker_type="aggregated",
        lora_name="My.Adapter",
        base_model_path=str(model_directory),
        max_gpu_lora_count=4,
    )
    assert list(endpoint.cards) == ["my_adapter"]
    card = decode_card(endpoint.cards["my_adapter"])
    assert (card.display_name, card.lora and card.lora.max_gpu_lora_count) == ("My.Adapter", 4)
    await unregister_model(endpoint, lora_name="My.Adapter")
    assert endpoint.cards == {}


PREFILL, DECODE, ENCODE = WorkerType.Prefill, WorkerType.Decode, WorkerType.Encode
OPEN = ModelType.Chat | ModelType.Prefill


@each_case(
    ("role", "takes", "surface", "needs", "sentence"),
    [
        (None, ModelInput.Tokens, ModelType.Chat, None, "worker_type is required"),
        (PREFILL, ModelInput.Text, ModelType.Prefill, [[DECODE]], "worker_type=Prefill requires model_input"),
        (PREFILL, ModelInput.Tensor, ModelType.Empty, [[DECODE]], "worker_type=Prefill requires model_input"),
        (ENCODE, ModelInput.Text, ModelType.Chat, [[DECODE]], "worker_type=Encode requires model_input"),
        (PREFILL, ModelInput.Tokens, ModelType.Chat, [[DECODE]], "must not have an OpenAI surface .*Chat"),
        (PREFILL, ModelInput.Tokens, ModelType.Embedding, [[DECODE]], "must not have an OpenAI surface"),
        (PREFILL, ModelInput.Tokens, OPEN, [[DECODE]], "must not have an OpenAI surface"),
        (PREFILL, ModelInput.Tokens, ModelType.Prefill, None, "worker_type=Prefill requires a non-empty `needs`"),
        (DECODE, ModelInput.Tokens, ModelType.Chat, [], "worker_type=Decode requires a non-empty `needs`"),
        (ENCODE, ModelInput.Tokens, ModelType.Empty, None, "worker_type=Encode requires a non-empty `needs`"),
    ],
)
async def test_a_role_that_could_not_serve_is_refused_as_a_value_error(
    role: WorkerType | None, takes: ModelInput, surface: ModelType, needs: Any, sentence: str
) -> None:
    endpoint = RecordingEndpoint()
    for error in (InvalidArgument, ValueError):
        with pytest.raises(error, match=sentence):
            await register_model(takes, surface, endpoint, "m", worker_type=role, needs=needs)
    assert endpoint.cards == {}


@each_case(
    ("role", "surface", "needs"),
    [
        (PREFILL, ModelType.Empty, [[DECODE]]),
        (PREFILL, ModelType.Prefill, ((DECODE,),)),
        (DECODE, ModelType.Chat, [[PREFILL, ENCODE], [WorkerType.Aggregated]]),
        (ENCODE, ModelType.Chat, [[WorkerType.Aggregated]]),
        (WorkerType.Aggregated, ModelType.Empty, None),
    ],
)
async def test_a_role_with_what_it_needs_is_registered_by_position(
    model_directory: Path, role: WorkerType, surface: ModelType, needs: Any
) -> None:
    endpoint = RecordingEndpoint()
    rest = (None,) * 8  # from router_config to base_model_path
    await register_model(ModelInput.Tokens, surface, endpoint, str(model_directory), "m", 16, *rest, role, needs, False)
    card = decode_card(endpoint.cards[None])
    assert (WorkerType.from_card(card.worker_type or ""), card.kv_cache_block_size) == (role, 16)


@pytest.mark.parametrize("given", [{"lora_name": "a"}, {"base_model_path": "b"}])
async def test_an_adapter_needs_its_name_and_its_base(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="belong together"):
        await register_model(
            ModelInput.Tokens, ModelType.Chat, RecordingEndpoint(), "m", worker_type=WorkerType.Aggregated, **given
        )


async def test_a_raw_model_is_a_name_and_asks_nobody() -> None:
    endpoint = RecordingEndpoint()
    await register_model(
        ModelInput.Text, ModelType.Images, endpoint, "some/diffusion", worker_type=WorkerType.Aggregated
    )
    card = decode_card(endpoint.cards[None])
    assert (card.is_name_only, card.model_input, card.model_type) == (True, "Text", "Images")


async def test_a_model_that_takes_text_registers_how_long_a_request_may_be(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    for directory, length in ((str(tmp_path), 4096), (str(tmp_path / "missing"), 0)):
        endpoint = RecordingEndpoint()
        await register_model(ModelInput.Text, ModelType.Chat, endpoint, directory, worker_type=WorkerType.Aggregated)
        card = decode_card(endpoint.cards[None])
        assert (card.is_name_only, card.context_length) == (True, length)


async def test_taints_change_nothing_else_on_the_card() -> None:
    endpoint = RecordingEndpoint()
    await register_model(ModelInput.Text, ModelType.Chat, endpoint, "m", worker_type=WorkerType.Aggregated)
    endpoint.cards[None]["a_member_of_the_future"] = 1
    before = json.loads(json.dumps(endpoint.cards[None]))
    assert await update_model_taints(endpoint, ["b", "a", "b"]) == ["a", "b"]
    after = endpoint.cards[None]
    assert after["runtime_config"].pop("taints") == ["a", "b"]
    assert after == before
    await update_model_taints(endpoint, ["x"])
    assert await update_model_taints(endpoint, []) == []
    assert endpoint.cards[None] == before


@each_case("taints", ["text", None, [1], [""], [" "], ["dynamo.topology/zone"], [str(i) for i in range(300)]])
def test_malformed_taints_are_refused(taints: Any) -> None:
    with pytest.raises(InvalidArgument, match="taint"):
        checked_taints(taints)


async def test_a_model_must_be_there_to_be_tainted() -> None:
    with pytest.raises(InvalidArgument, match="register"):
        await update_model_taints(RecordingEndpoint(), ["a"])


async def test_hub_threads_hand_their_errors_over() -> None:
    def boom() -> None:
        raise OSError("boom")

    with pytest.raises(OSError, match="boom"):
        await asyncio.wait_for(hub._in_thread(boom), PATIENCE_SECONDS)


@pytest.mark.parametrize(("name", "package"), [("tekken.json", "mistral-common"), ("tokenizer.model", "sentencepiece")])
def test_a_folder_with_another_form_of_tokenizer_alone_is_refused_with_what_writes_ours(
    tmp_path: Path, name: str, package: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(InvalidArgument) as refused:
        read_model_directory(tmp_path)
    text = str(refused.value)
    assert f"has its tokenizer in {name} alone" in text
    assert f"pip install transformers {package}" in text
    assert "\n" not in text
    code = text.partition('python -c "')[2].removesuffix('"')
    compile(code, name, "exec")
    assert repr(str(tmp_path / "tokenizer.json")) in code
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "tokenizer" in read_model_directory(tmp_path).artefacts
