"""A start that the next start would meet again ends with one sentence and the status 2, before anything is loaded."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from dynamo.errors import InvalidArgument
from dynamo.runtime.base import process_guard
from dynamo.runtime.base.addresses import bound_socket
from dynamo.vllm import starting
from dynamo.vllm.arguments import Arguments
from dynamo.vllm.errors import configuration_error
from dynamo.vllm.model_files import check_model, check_weights, is_local
from dynamo.vllm.reports import LoadReports
from dynamo.vllm.starting import NIXL_HOST, NIXL_PORT, transfer_addresses
from support.cases import each_case
from support.demo_model import FILES


@each_case("model, local", [("demo", False), ("owner/name", False), ("./demo", True), ("/x", True), ("a/b/c", True)])
def test_a_path_is_told_from_the_name_of_a_model(model: str, local: bool) -> None:
    assert is_local(model) is local


def test_a_directory_with_a_model_and_the_name_of_one_pass() -> None:
    for model in (str(FILES), "owner/name"):
        check_model(model)
        check_weights(model, "auto")


def test_a_directory_without_a_model_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="there is no such directory"):
        check_model(str(tmp_path / "nowhere"))
    with pytest.raises(InvalidArgument, match=r"has no config\.json or params\.json"):
        check_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidArgument, match=r"config\.json cannot be read"):
        check_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InvalidArgument, match="must hold an object, got list"):
        check_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path))
    with pytest.raises(InvalidArgument, match="has no weights"):
        check_weights(str(tmp_path), "auto")
    check_weights(str(tmp_path), "dummy")
    with pytest.raises(InvalidArgument, match="is a file"):
        check_model(str(tmp_path / "config.json"))


def test_a_refused_configuration_is_one_sentence() -> None:
    class ValidationError(ValueError):
        def errors(self) -> list[dict[str, str]]:
            return [{"msg": "max_model_len is too large"}, {"msg": "so is block_size"}]

    refusal = configuration_error(ValidationError("a\nb"), is_local=False)
    assert str(refusal) == "vLLM cannot serve this: max_model_len is too large; so is block_size"
    assert str(configuration_error(ValueError("two\n  lines"), is_local=False)).endswith("this: two lines")
    assert configuration_error(OSError("no network"), is_local=False) is None
    assert configuration_error(OSError("no file"), is_local=True) is not None
    assert configuration_error(RuntimeError("a device that is busy"), is_local=True) is None


def test_workers_of_one_machine_announce_their_blocks_at_different_ports() -> None:
    arguments = SimpleNamespace(kv_transfer_config={"kv_connector": "NixlConnector"}, data_parallel_size=2)
    environment = {"DYN_TCP_RPC_HOST": "127.0.0.1"}
    first = transfer_addresses(arguments, environment)
    with bound_socket("127.0.0.1", int(first[NIXL_PORT])):  # as vLLM holds it
        second = transfer_addresses(arguments, environment)
    assert first[NIXL_HOST] == second[NIXL_HOST] == "127.0.0.1"
    assert first[NIXL_PORT] != second[NIXL_PORT]
    chosen = {NIXL_HOST: "10.0.0.5", NIXL_PORT: "5600"}
    assert transfer_addresses(arguments, environment | chosen) == chosen
    for other in (None, {"kv_connector": "ExampleConnector"}):
        assert transfer_addresses(SimpleNamespace(kv_transfer_config=other), environment) == {}


class FakeVllm:
    """What `_start` uses of vLLM; notes what it is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.contexts: list[str] = []
        self.variables: dict[str, str] = {}
        self.config = SimpleNamespace(profiler_config=SimpleNamespace(ignore_frontend=False))
        usage = SimpleNamespace(ENGINE_CONTEXT="engine", OPENAI_API_SERVER="server")
        for name, members in {
            "vllm": {"__version__": "0.32.0", "envs": SimpleNamespace()},
            "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False)},
            "vllm.usage": {},
            "vllm.usage.usage_lib": {"UsageContext": usage},
            "vllm.v1": {},
            "vllm.v1.engine": {},
            "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_vllm_config=self.make_client)},
        }.items():
            module = ModuleType(name)
            vars(module).update(members)  # type: ignore[call-overload]
            monkeypatch.setitem(sys.modules, name, module)
        self.args = SimpleNamespace(
            enable_prefix_caching=False,
            enable_lora=False,
            kv_transfer_config=None,
            create_engine_config=self.make_config,
        )

    def make_config(self, context: str) -> Any:
        self.contexts.append(context)
        return self.config

    def make_client(self, config: Any, *, usage_context: str, stat_loggers: list[Any]) -> str:
        self.contexts.append(usage_context)
        self.variables = dict(os.environ)
        return "client"


def test_vllm_is_started_with_the_batch_sizes_of_vllm_serve_and_without_a_profiler_of_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    vllm = FakeVllm(monkeypatch)
    monkeypatch.setattr(process_guard, "_temporary", lambda: str(tmp_path))
    arguments = SimpleNamespace(vllm=vllm.args, model="demo", is_kv_routed=False, has_kv_events_config=False)
    started = starting._start(cast(Arguments, arguments), LoadReports())
    assert vllm.contexts == ["server", "server"]
    assert vllm.config.profiler_config.ignore_frontend is True
    assert started.directory.parent == tmp_path
    assert vllm.variables["TMPDIR"] == str(started.directory)


@each_case("length, is_apart", [(20, True), (66, True), (67, False), (100, False)])
def test_sockets_are_in_the_private_directory_where_their_paths_are_short_enough(length: int, is_apart: bool) -> None:
    directory = Path("/" + "d" * (length - 3) + "/e")
    chosen = starting._socket_directory(directory, {})["VLLM_RPC_BASE_PATH"]
    assert Path(chosen) == (directory if is_apart else directory.parent)
    assert starting._socket_directory(directory, {"VLLM_RPC_BASE_PATH": "/x"}) == {}
