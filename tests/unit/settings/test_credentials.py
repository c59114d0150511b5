"""Users and passwords inside addresses are in no log and no dump."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from dynamo.common import config_dump
from dynamo.errors import InvalidArgument
from dynamo.runtime.base.settings import EtcdSettings, NatsSettings, RuntimeSettings
from dynamo.runtime.discovery.etcd.client import parse_endpoints
from dynamo.settings.credentials import without_credentials
from dynamo.settings.table import without_secrets

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://h:1", "http://h:1"),
        ("someone@example.org", "someone@example.org"),
        ("https://hub/name@revision", "https://hub/name@revision"),
        ("nats://root:hunter2@h:4222", "nats://***@h:4222"),
        ("nats://hunter2@h:4222", "nats://***@h:4222"),
        ("root:hunter2@h:2379", "***@h:2379"),
        ("root:hunter2@h:2379,root:hunter2@i:2379", "***@h:2379,***@i:2379"),
        ("http://root:hunter2@h,https://root:hunter2@i", "http://***@h,https://***@i"),
        ("http://root:p@hunter2@h", "http://***@h"),
        ("root:p@hunter2@h", "***@h"),
        ("--etcd=http://root:hunter2@h is down", "--etcd=http://***@h is down"),
    ],
)
def test_what_stands_before_a_host_is_masked(text: str, shown: str) -> None:
    assert without_credentials(text) == shown


def test_settings_dumps_hold_no_password_of_an_address() -> None:
    settings = RuntimeSettings.from_env(
        {
            "ETCD_ENDPOINTS": f"http://root:{SECRET}@a:2379,root:{SECRET}@b:2379",
            "NATS_SERVER": f"nats://{SECRET}@a:4222,u:{SECRET}@b",
        }
    )
    assert SECRET not in json.dumps(without_secrets(settings), default=str)
    assert settings.etcd.address == "http://***@a:2379,***@b:2379"
    assert settings.nats.address == "nats://***@a:4222, nats://***@b"


def test_an_endpoint_that_is_none_is_named_without_its_password() -> None:
    with pytest.raises(InvalidArgument) as raised:
        parse_endpoints(EtcdSettings(endpoints=f"ftp://root:{SECRET}@h"))
    assert "ftp://***@h" in str(raised.value)


@dataclass
class Config:
    server: str
    mirrors: list[str]


def test_a_dump_of_a_worker_holds_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"http://root:{SECRET}@h:1"
    monkeypatch.setenv("ETCD_ENDPOINTS", address)
    arguments = ["worker", "--nats", address, f"--etcd={address}", "--api-key", SECRET, f"--hf-token={SECRET}"]
    monkeypatch.setattr("sys.argv", [*arguments, "--max-tokens", "5", "--tls-key-path", "k.pem"])
    found = json.loads(config_dump.get_config_dump(Config(address, [address])))
    assert SECRET not in json.dumps({name: found[name] for name in ("config", "environment", "runtime_info")})
    shown = found["runtime_info"]["command_line_args"]
    assert shown[-4:] == ["--max-tokens", "5", "--tls-key-path", "k.pem"]
    assert shown[1:3] == ["--nats", "http://***@h:1"]


def test_nats_settings_still_connect_with_what_was_written() -> None:
    assert NatsSettings.from_env({"NATS_SERVER": f"u:{SECRET}@h"}).servers == (f"nats://u:{SECRET}@h",)
