"""From a model's files and an engine's figures to a card, and the card to discovery.

A card is built in three steps: find the files (a local directory, or the hub's copy), read what a frontend needs from
them, and add the figures of the engine and the operator. A name that leads to no files gives a name-only card: the frontend then uses
the built-in byte tokenizer and a plain template.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from blake3 import blake3
from msgspec import Struct

from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine_config import EngineConfig
from dynamo.contract.modes import DisaggregationMode
from dynamo.errors import CannotConnect, InvalidArgument
from dynamo.protocol.model_types import ModelInput, ModelType, WorkerType, parse_endpoint_types
from dynamo.protocol.records import (
    CHAT_TEMPLATES,
    DEFAULT_BLOCK_SIZE,
    ENCODER_HANDOFF,
    IMAGE_PROCESSOR,
    IMAGE_PROCESSOR_MEMBERS,
    FileRef,
    LoraRecord,
    ModelCard,
    ModelRuntimeConfig,
    decode_card,
    slugify,
)
from dynamo.worker.hub import (
    HUB_PREFIX,
    cached_copy,
    check_tokenizer_form,
    fetch_model,
    local_path,
    readable_tokenizer,
)
from dynamo.worker.settings import ALLOW_DOWNLOAD, SELF_HOST_METADATA

__all__ = [
    "RESERVED_TAINT_PREFIX",
    "ModelAssets",
    "ModelEndpoint",
    "RolePlan",
    "build_card",
    "checked_taints",
    "fetch_model",
    "plan_role",
    "publish_card",
    "read_context_lengths",
    "read_model_directory",
    "register_model",
    "resolve_assets",
    "runtime_config_of",
    "unregister_model",
    "update_model_taints",
]

logger = logging.getLogger(__name__)

RESERVED_TAINT_PREFIX: Final = "dynamo.topology/"  # written by the system itself
MAX_TAINTS: Final = 256
WITHOUT_TOKENIZER: Final = ModelType.TensorBased | ModelType.Images | ModelType.Videos | ModelType.Realtime
BASE_SUFFIX: Final = "_base"  # where an adapter's slug would stand in the URL of a card's file

Fetch = Callable[[str, bool], Awaitable[str]]


class ModelEndpoint(Protocol):
    """What registration needs of a runtime's endpoint."""

    async def publish_model(self, card_json: dict[str, object], suffix: str | None = None) -> None: ...

    async def withdraw_model(self, suffix: str | None = None) -> None: ...

    async def published_model(self, suffix: str | None = None) -> dict[str, Any] | None: ...


class FileHost(Protocol):
    """What self-hosting needs of a runtime's status server."""

    @property
    def url(self) -> str | None: ...

    def add_metadata_files(
        self, namespace: str, component: str, endpoint: str, slug: str, suffix: str, files: Mapping[str, Path]
    ) -> dict[str, str]: ...

    def remove_metadata_files(self, namespace: str, component: str, endpoint: str, slug: str, suffix: str) -> None: ...


# -- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelAssets:
    """What is read from a model directory, as the card carries it."""

    artefacts: Mapping[str, dict[str, object]] = field(default_factory=dict)  # card member -> {kind: FILE}
    architectural_context_length: int | None = None
    legacy_context_length: int | None = None  # the tokenizer's figure; used when nothing better is known
    image_processor: Mapping[str, object] = field(default_factory=dict)  # what gives how many tokens an image becomes
    named_templates: Mapping[str, Mapping[str, object]] = field(
        default_factory=dict
    )  # further chat templates, as FILEs


def read_model_directory(directory: Path) -> ModelAssets:
    """Read and hash the files of a HuggingFace-style directory; blocking.

    Raises InvalidArgument for something that is no such directory: no tokenizer, or a file that is not JSON.
    """
    if not directory.is_dir():
        raise InvalidArgument(
            f"model path {str(directory)!r} is no directory; give a directory in the HuggingFace layout "
            "(config.json, tokenizer.json, ...), a hub name, or no model name for a name-only card"
        )
    tokenizer = _tokenizer_of(directory)
    config = _read_json(directory / "config.json")
    tokenizer_config = _read_json(directory / "tokenizer_config.json")
    artefacts: dict[str, dict[str, object]] = {"tokenizer": tokenizer}
    for member, kind, name in (
        ("model_info", "hf_config_json", "config.json"),
        ("prompt_formatter", "hf_tokenizer_config_json", "tokenizer_config.json"),
        ("gen_config", "hf_generation_config_json", "generation_config.json"),
    ):
        if (directory / name).is_file():
            artefacts[member] = {kind: file_record(directory / name)}
    for kind, name in (
        ("hf_chat_template_jinja", "chat_template.jinja"),
        ("hf_chat_template_json", "chat_template.json"),
    ):
        if (directory / name).is_file():
            artefacts["chat_template_file"] = _template(kind, directory / name, is_custom=False)
            break
    processor = _read_json(directory / "preprocessor_config.json")
    sizes = {name: processor[name] for name in IMAGE_PROCESSOR_MEMBERS if name in processor}
    named = {path.stem: file_record(path) for path in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    return ModelAssets(artefacts, _context_length_of(config), _legacy_context_length_of(tokenizer_config), sizes, named)


def read_context_lengths(name: str) -> ModelAssets | None:
    """Read how long a request may be, and nothing else: all that a frontend needs of a model that takes text; blocking.

    None for a name that is not a directory.
    """
    directory = Path(name)
    if not name or not directory.is_dir():
        return None
    config, tokenizer_config = _read_json(directory / "config.json"), _read_json(directory / "tokenizer_config.json")
    return ModelAssets({}, _context_length_of(config), _legacy_context_length_of(tokenizer_config))


def file_record(path: Path) -> dict[str, object]:
    """Build the card's FILE of a local file: absolute path, content hash, size."""
    path = path.absolute()  # links stay: a hub cache names its blobs by hash, without the suffix readers need
    digest = blake3().update_mmap(path).hexdigest() if path.stat().st_size else blake3().hexdigest()
    return {"path": str(path), "checksum": f"blake3:{digest}", "size": path.stat().st_size}


def _template(kind: str, path: Path, *, is_custom: bool) -> dict[str, object]:
    return {kind: {"is_custom": is_custom, "file": file_record(path)}}


def _tokenizer_of(directory: Path) -> dict[str, object]:
    if (found := readable_tokenizer(directory)) is not None:
        kind, path = found
        return {kind: file_record(path)}
    check_tokenizer_form(directory)
    raise InvalidArgument(f"model directory {str(directory)!r} has neither tokenizer.json nor a tiktoken model")


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgument(f"model file {str(path)!r} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidArgument(f"model file {str(path)!r} is not a JSON object")
    return content


_CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len")
_LONGEST_CONTEXT: Final = 2**32 - 1  # the card's type; tokenizers write 1e30 for "no limit"


def _plausible(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LONGEST_CONTEXT:
        return None
    return int(value)


def _context_length_of(config: Mapping[str, object]) -> int | None:
    text = config.get("text_config")  # multimodal models nest the language model's figures
    for source in (config, text if isinstance(text, dict) else {}):
        for key in _CONTEXT_KEYS:
            if (found := _plausible(source.get(key))) is not None:
                return found
    return None


def _legacy_context_length_of(tokenizer_config: Mapping[str, object]) -> int | None:
    return _plausible(tokenizer_config.get("model_max_length"))


async def resolve_assets(name: str, *, allow_download: bool = False, fetch: Fetch = fetch_model) -> ModelAssets | None:
    """Return the files behind a path, `hub:NAME` or a name; None for a name that leads to none.

    A hub is contacted for `hub:NAME`, and for any name with `allow_download`; else no name leaves the machine. Raises
    InvalidArgument for a path that does not exist or is not a model (a path is never meant as a mere name), CannotConnect
    when `hub:NAME` cannot be fetched.
    """
    if not name:
        return None
    path = local_path(name)
    if path is None and name.startswith(("/", ".", "~")):
        raise InvalidArgument(f"model path {name!r} does not exist")
    if path is None and name.startswith(HUB_PREFIX):
        path = Path(await fetch(name, True))
    if path is None and allow_download:
        try:
            path = Path(await fetch(f"{HUB_PREFIX}{name}", True))
        except CannotConnect as error:
            logger.warning(
                "Model %r is neither a local directory nor fetchable (%s). Registering its name only: the frontend will "
                "use the built-in byte tokenizer and a plain template. Give a local directory for the real ones.",
                name,
                error,
            )
            return None
    path = path or cached_copy(name)
    if path is None:
        logger.info(
            "Model %r is a name only: the frontend will use the built-in byte tokenizer and a plain template. For the real "
            "ones give a local directory, or %s%s to fetch it.",
            name,
            HUB_PREFIX,
            name,
        )
        return None
    return await asyncio.to_thread(read_model_directory, path)


# -- role and figures -------------------------------------------------------------------------------------------------


class RolePlan(Struct, frozen=True):
    """How a role shows itself in discovery."""

    model_type: ModelType
    worker_type: WorkerType
    needs: tuple[tuple[WorkerType, ...], ...]  # alternatives of roles that must also be present


def plan_role(mode: DisaggregationMode, endpoint_types: str, *, route_to_encoder: bool = False) -> RolePlan:
    """Plan what a worker of this role registers as. Raises InvalidArgument for bad endpoint types or a role without
    encoder.
    """
    surfaces = parse_endpoint_types(endpoint_types)  # checked for every role: a typo should not wait for the next one
    check_encoder_route(mode, route_to_encoder)
    prefill, decode, encode, whole = WorkerType.Prefill, WorkerType.Decode, WorkerType.Encode, WorkerType.Aggregated
    match mode:
        case DisaggregationMode.AGGREGATED:
            return RolePlan(surfaces, whole, ((encode,),) if route_to_encoder else ())
        case DisaggregationMode.PREFILL:
            # The marker is for frontends of the native system; ours read the role.
            return RolePlan(ModelType.Prefill, prefill, ((decode, encode),) if route_to_encoder else ((decode,),))
        case DisaggregationMode.DECODE:
            return RolePlan(surfaces, decode, ((prefill,),))
        case DisaggregationMode.ENCODE:
            return RolePlan(ModelType.Empty, encode, ((prefill, decode), (whole,)))


def check_encoder_route(mode: DisaggregationMode, route_to_encoder: bool) -> None:
    """Raises InvalidArgument: only workers that see the prompt can send it to an encoder first."""
    if route_to_encoder and mode in (DisaggregationMode.DECODE, DisaggregationMode.ENCODE):
        raise InvalidArgument(f"route_to_encoder is for agg and prefill workers, this one is {mode.value}")


_TAG_DEFAULTS: Final = {"scope": "always", "schema": "auto"}


def runtime_config_of(config: WorkerConfig, engine: EngineConfig) -> ModelRuntimeConfig:
    """Return the part of the card that describes the running engine."""
    is_prefill = config.disaggregation_mode is DisaggregationMode.PREFILL
    record = ModelRuntimeConfig(
        context_length=engine.context_length,
        total_kv_blocks=engine.total_kv_blocks,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        # A prefill worker's output is never parsed; a parser there would only be one more thing to disagree about.
        tool_call_parser=None if is_prefill else config.tool_call_parser,
        reasoning_parser=None if is_prefill else config.reasoning_parser,
        structural_tag_mode=config.structural_tag_mode,
        structural_tag_scope=config.structural_tag_scope,
        structural_tag_schema=config.structural_tag_schema,
        # Its defaults are written out: an empty object would not be on the card at all.
        structural_tag=None if config.structural_tag is None else {**_TAG_DEFAULTS, **config.structural_tag},
        exclude_tools_when_tool_choice_none=config.exclude_tools_when_tool_choice_none,
        data_parallel_start_rank=engine.data_parallel_start_rank or 0,
        data_parallel_size=engine.data_parallel_size or 1,
        enable_local_indexer=config.local_indexer_enabled,
        enable_eagle=engine.enable_eagle,
        kv_state_endpoint=config.kv_state_endpoint,
        runtime_data=dict(engine.runtime_data),
        max_gpu_lora_count=engine.max_gpu_lora_count,
    )
    if config.default_thinking_mode is not None:
        record.runtime_data["default_thinking_mode"] = config.default_thinking_mode
    if config.route_to_encoder:
        record.runtime_data[ENCODER_HANDOFF] = True
    record.set_disaggregated_endpoint(engine.bootstrap_host, engine.bootstrap_port)
    return record


# -- the card ---------------------------------------------------------------------------------------------------------


def build_card(
    display_name: str,
    *,
    source_path: str = "",
    assets: ModelAssets | None = None,
    model_input: ModelInput = ModelInput.Tokens,
    model_type: ModelType = ModelType.Chat | ModelType.Completions,
    worker_type: WorkerType = WorkerType.Aggregated,
    needs: Iterable[Iterable[WorkerType | str]] = (),
    runtime_config: ModelRuntimeConfig | None = None,
    kv_cache_block_size: int | None = None,
    custom_template_path: str | Path | None = None,
    aliases: Sequence[str] = (),
    **members: Any,
) -> ModelCard:
    """Put a card together; hashes the custom template, if there is one. `members` are further members of the card.

    Raises InvalidArgument when the template cannot be read or the name is empty.
    """
    if not display_name:
        raise InvalidArgument("a model needs a name: set EngineConfig.model or a served model name")
    assets = assets or ModelAssets()
    runtime_config = runtime_config or ModelRuntimeConfig()
    if assets.image_processor:
        runtime_config.runtime_data.setdefault(IMAGE_PROCESSOR, dict(assets.image_processor))
    if assets.named_templates and custom_template_path is None:  # the operator's template is for every request
        runtime_config.runtime_data.setdefault(CHAT_TEMPLATES, dict(assets.named_templates))
    card = ModelCard(
        display_name=display_name,
        source_path=source_path or display_name,
        architectural_max_context_length=assets.architectural_context_length,
        context_length=(
            runtime_config.context_length or assets.architectural_context_length or assets.legacy_context_length or 0
        ),
        kv_cache_block_size=kv_cache_block_size or DEFAULT_BLOCK_SIZE,
        model_type=str(model_type),
        model_input=str(model_input),
        worker_type=str(worker_type),
        needs=[[str(_role(role)) for role in alternative] for alternative in needs],
        aliases=[alias for alias in dict.fromkeys(aliases) if alias != display_name],
        runtime_config=runtime_config,
        **{**assets.artefacts, **members},
    )
    if custom_template_path is not None:
        template = Path(custom_template_path).expanduser()
        if not template.is_file():
            raise InvalidArgument(f"custom_jinja_template {str(custom_template_path)!r} is not a readable file")
        card.chat_template_file = _template("hf_chat_template_jinja", template, is_custom=True)
    return card


def _role(value: WorkerType | str) -> WorkerType:
    return value if isinstance(value, WorkerType) else WorkerType.from_card(value)


def _worker_type(value: object) -> WorkerType:
    if isinstance(value, WorkerType):
        return value
    if isinstance(value, str):
        return WorkerType.from_card(value)
    raise InvalidArgument(f"worker_type must be a WorkerType, got {value!r}")


class RegistrationRefused(InvalidArgument, ValueError):
    """A model that cannot be registered like this: code written for 1.6.1 catches a ValueError."""


def _checked_role(
    worker_type: WorkerType | str | None,
    model_input: ModelInput,
    model_type: ModelType,
    needs: Iterable[Iterable[WorkerType | str]] | None,
) -> WorkerType:
    """Return the role of a registration. Raises RegistrationRefused for what 1.6.1 refuses, in its order."""
    if worker_type is None:
        raise RegistrationRefused(
            "register_model: worker_type is required: WorkerType.Aggregated, Prefill, Decode or Encode"
        )
    role = _worker_type(worker_type)
    name = f"register_model: worker_type={role.name}"
    if role in (WorkerType.Prefill, WorkerType.Encode) and model_input is not ModelInput.Tokens:
        raise RegistrationRefused(f"{name} requires model_input=ModelInput.Tokens")
    if role is WorkerType.Prefill and model_type & ~ModelType.Prefill:
        raise RegistrationRefused(
            f"{name} must not have an OpenAI surface (model_type is {model_type}): clients call its decode "
            "peer; use ModelType.Empty or ModelType.Prefill"
        )
    if role is not WorkerType.Aggregated and not needs:
        raise RegistrationRefused(f"{name} requires a non-empty `needs`: the roles that it cannot serve without")
    return role


# -- discovery --------------------------------------------------------------------------------------------------------


async def register_model(
    model_input: ModelInput,
    model_type: ModelType,
    endpoint: ModelEndpoint,
    model_path: str,
    model_name: str | None = None,
    kv_cache_block_size: int | None = None,
    router_config: object = None,
    runtime_config: ModelRuntimeConfig | None = None,
    user_data: object = None,
    custom_template_path: str | None = None,
    media_decoder: object = None,
    media_fetcher: object = None,
    lora_name: str | None = None,
    base_model_path: str | None = None,
    worker_type: WorkerType | str | None = None,
    needs: Iterable[Iterable[WorkerType | str]] | None = None,
    self_host_metadata: bool | None = None,
    *,
    tensor_model_config: object = None,
    ignore_weights: bool = False,
    max_gpu_lora_count: int | None = None,
    model_aliases: Sequence[str] | None = None,
    skip_model_assets: bool = False,
) -> None:
    """Publish a model at an endpoint, so that frontends serve it.

    `model_path` is a directory, `hub:NAME` (fetched from the hub) or a mere name; `model_name` is what clients request
    (default: the path as given). An adapter has `lora_name` and `base_model_path`, beside its base model. `ignore_weights`
    is accepted for compatibility: a card never needs them. `worker_type` is required, and `needs` for every role but an
    aggregated worker's: what it cannot serve without, as alternatives (any of) of lists (all of). Raises InvalidArgument
    for bad arguments; where 1.6.1 raises ValueError, it is one, too.
    """
    role = _checked_role(worker_type, model_input, model_type, needs)
    if (lora_name is None) != (base_model_path is None):
        raise RegistrationRefused("lora_name and base_model_path belong together: give both or neither")
    source = base_model_path if base_model_path is not None else model_path
    # Neither text of a client nor the model's own tensors and media pass a tokenizer: nothing is fetched for them.
    if model_input is not ModelInput.Tokens or (model_type and not model_type & ~WITHOUT_TOKENIZER):
        assets = await asyncio.to_thread(read_context_lengths, source)
    else:
        assets = (
            None if skip_model_assets else await resolve_assets(source, allow_download=ALLOW_DOWNLOAD.value(os.environ))
        )
    members = {
        # A RouterConfig, which this room does not know, or its record.
        "router_config": router_config.as_record() if hasattr(router_config, "as_record") else router_config,
        "tensor_model_config": tensor_model_config,
        "user_data": user_data,
        "media_decoder": media_decoder,
        "media_fetcher": media_fetcher,
        "lora": LoraRecord(lora_name, max_gpu_lora_count) if lora_name is not None else None,
    }
    card = await asyncio.to_thread(
        build_card,
        lora_name or model_name or model_path.removeprefix(HUB_PREFIX),
        source_path=source.removeprefix(HUB_PREFIX),
        assets=assets,
        model_input=model_input,
        model_type=model_type,
        worker_type=role,
        needs=needs or (),
        runtime_config=runtime_config,
        kv_cache_block_size=kv_cache_block_size,
        custom_template_path=custom_template_path,
        aliases=model_aliases or (),
        **members,
    )
    await publish_card(endpoint, card, _suffix(lora_name), self_host=self_host_metadata)


async def publish_card(
    endpoint: ModelEndpoint, card: ModelCard, suffix: str | None = None, *, self_host: bool | None = None
) -> None:
    """Put a card into discovery. `self_host` None: its files are offered on the status server where there is one, so
    that frontends on other machines can read them, unless DYN_SELF_HOST_METADATA is false.

    Raises InvalidArgument when self-hosting is demanded and there is no status server.
    """
    host = _file_host(endpoint)
    if self_host is None:
        self_host = host is not None and bool(SELF_HOST_METADATA.value(os.environ))
    elif self_host and host is None:
        raise InvalidArgument("self_host_metadata needs the status server: set DYN_SYSTEM_PORT (0 for any free port)")
    record = card.to_json()
    if self_host and host is not None:
        files = {name: Path(ref.path) for name, ref in _named_files(card)}
        paths = host.add_metadata_files(*_place(endpoint), card.slug, suffix or BASE_SUFFIX, files)
        urls = {str(files[name]): f"{host.url}{path}" for name, path in paths.items()}
        record = _with_paths(record, urls)
    await endpoint.publish_model(record, suffix)


def _file_host(endpoint: ModelEndpoint) -> FileHost | None:
    host: FileHost | None = getattr(getattr(endpoint, "runtime", None), "status_server", None)
    return host if host is not None and host.url is not None else None


def _place(endpoint: Any) -> tuple[str, str, str]:
    return endpoint.namespace, endpoint.component, endpoint.name


def _named_files(card: ModelCard) -> list[tuple[str, FileRef]]:
    """Return the card's files by a unique name: two artefacts may come from different directories."""
    named: dict[str, FileRef] = {}
    for kind, ref in card.files():
        name = Path(ref.path).name
        named[name if name not in named else f"{kind}-{name}"] = ref
    return list(named.items())


def _with_paths(value: Any, urls: Mapping[str, str]) -> Any:
    """Return a card's JSON with every FILE of `urls` at its new place."""
    if not isinstance(value, dict):
        return value
    moved = {key: _with_paths(member, urls) for key, member in value.items()}
    if "checksum" in moved and moved.get("path") in urls:
        moved["path"] = urls[moved["path"]]
    return moved


async def unregister_model(endpoint: ModelEndpoint, lora_name: str | None = None) -> None:
    """Withdraw a model (or one adapter); absent is fine."""
    suffix = _suffix(lora_name)
    host = _file_host(endpoint)
    if host is not None and (published := await endpoint.published_model(suffix)) is not None:
        host.remove_metadata_files(*_place(endpoint), decode_card(published).slug, suffix or BASE_SUFFIX)
    await endpoint.withdraw_model(suffix)


async def update_model_taints(endpoint: ModelEndpoint, taints: object) -> list[str]:
    """Replace the taints of the model at this endpoint and return them sorted, each once.

    Taints are all that may change on a published card. Raises InvalidArgument for a malformed or reserved taint, or
    when no model is registered here.
    """
    wanted = checked_taints(taints)
    current = await endpoint.published_model(None)
    if current is None:
        raise InvalidArgument("no model is registered at this endpoint; register it before tainting it")
    card = decode_card(current)
    card.runtime_config.taints = set(wanted)
    # Written over what was read, so that members this version does not know stay.
    runtime = {**current.get("runtime_config", {}), **card.runtime_config.to_json()}
    if not wanted:
        runtime.pop("taints", None)
    await endpoint.publish_model({**current, "runtime_config": runtime}, None)
    return wanted


def checked_taints(taints: object) -> list[str]:
    """Taints sorted, each once. Raises InvalidArgument naming what is wrong."""
    if isinstance(taints, str) or not isinstance(taints, Iterable):
        raise InvalidArgument("taints must be a list of strings")
    found = list(taints)
    for taint in found:
        if not isinstance(taint, str) or not taint.strip():
            raise InvalidArgument(f"taints must be non-empty strings, got {taint!r}")
        if taint.startswith(RESERVED_TAINT_PREFIX):
            raise InvalidArgument(f"taint {taint!r} uses the reserved prefix {RESERVED_TAINT_PREFIX!r}")
    unique = sorted(set(found))
    if len(unique) > MAX_TAINTS:
        raise InvalidArgument(f"at most {MAX_TAINTS} taints, got {len(unique)}")
    return unique


def _suffix(lora_name: str | None) -> str | None:
    return slugify(lora_name) if lora_name is not None else None
