"""A worker's resolved configuration as JSON, with what is known about its process: for reports of problems."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TypeVar

from dynamo import __version__
from dynamo.settings.credentials import without_credentials

__all__ = [
    "add_config_dump_args", "dump_config", "get_config_dump", "get_environment_vars", "get_gpu_info",
    "get_runtime_info", "get_system_info", "register_encoder",
]  # fmt: skip

logger = logging.getLogger(__name__)

PREFIXES: Final = ("DYN_", "ETCD_", "NATS_", "HF_", "CUDA_", "NCCL_", "UCX_", "VLLM_", "SGLANG_", "TRTLLM_", "TORCH_")
SENSITIVE: Final = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL", "AUTH")
REDACTED: Final = "<REDACTED>"
MAX_DEPTH: Final = 32  # a configuration that refers to itself ends here

EncoderT = TypeVar("EncoderT", bound=Callable[[Any], Any])
_encoders: dict[type, Callable[[Any], Any]] = {}


def register_encoder(type_class: type) -> Callable[[EncoderT], EncoderT]:
    """Decorate the function that turns an object of `type_class` into JSON values."""

    def register(encoder: EncoderT) -> EncoderT:
        _encoders[type_class] = encoder
        return encoder

    return register


def add_config_dump_args(parser: argparse.ArgumentParser) -> None:
    """Add `--dump-config-to`."""
    parser.add_argument(
        "--dump-config-to", metavar="FILE", help="write the resolved configuration to this file as JSON"
    )


def dump_config(dump_config_to: str | None, config: Any) -> None:
    """Write the configuration to a file, or to the log (DEBUG) when there is none. A failure is logged, not raised."""
    text = get_config_dump(config)
    if dump_config_to is None:
        logger.debug("CONFIG_DUMP: %s", text)
        return
    try:
        path = Path(dump_config_to)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        logger.error("cannot write the configuration to %s: %s; the worker goes on", dump_config_to, error.strerror)


def get_config_dump(config: Any, extra_info: Mapping[str, Any] | None = None) -> str:
    """Return the configuration and what is known about the process as JSON text."""
    document = {
        "config": _plain(config, MAX_DEPTH),
        "dynamo_version": __version__,
        "environment": get_environment_vars(),
        "gpu_info": get_gpu_info(),
        "installed_packages": {found.name: found.version for found in metadata.distributions()},
        "runtime_info": get_runtime_info(),
        "system_info": get_system_info(),
        **_plain(dict(extra_info or {}), MAX_DEPTH),
    }
    return json.dumps(document, indent=2, sort_keys=True)


def get_environment_vars(
    prefixes: Collection[str] | None = None,
    include_sensitive: bool = False,
    additional_vars: Collection[str] | None = None,
) -> dict[str, str]:
    """Return the variables that begin with one of `prefixes` or are named; secrets are redacted unless `include_sensitive` is set."""
    wanted = tuple(PREFIXES if prefixes is None else prefixes)
    return {
        name: value if include_sensitive else REDACTED if _is_sensitive(name) else without_credentials(value)
        for name, value in sorted(os.environ.items())
        if name.startswith(wanted) or name in (additional_vars or ())
    }


def get_gpu_info() -> dict[str, Any] | None:
    """Return the devices torch sees where the engine has loaded it already; None otherwise."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"gpu_count": len(names), "gpus": names}


def get_runtime_info() -> dict[str, Any]:
    """Return the Python and the command line of this process."""
    version = sys.version_info
    return {
        "python_version": sys.version,
        "python_version_info": {"major": version.major, "minor": version.minor, "micro": version.micro},
        "python_executable": sys.executable,
        "command_line_args": _shown_arguments(sys.argv),
    }


def get_system_info() -> dict[str, Any]:
    """Return the machine and its operating system."""
    return {
        "platform": platform.platform(),
        "architecture": platform.architecture(),
        "processor": platform.processor() or "unknown",
        "hostname": platform.node(),
        "os_name": platform.system(),
        "os_release": platform.release(),
        "os_version": platform.version(),
    }


def _shown_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without the values of flags with a secret's name, and without passwords in addresses."""
    shown: list[str] = []
    is_value_of_secret = False
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        is_flag = flag.startswith("--")
        if is_value_of_secret and not is_flag:
            shown.append(REDACTED)
        elif is_flag and equals and _is_secret_flag(flag):
            shown.append(f"{flag}={REDACTED}")
        else:
            shown.append(without_credentials(argument))
        is_value_of_secret = is_flag and not equals and _is_secret_flag(flag)
    return shown


def _is_secret_flag(flag: str) -> bool:
    # Not every flag with "token" or "key" in its name: --max-tokens and --tls-key-path are what a report is read for.
    return flag.endswith(("-key", "-token", "-secret", "-password", "-credentials")) or flag in ("--key", "--token")


def _is_sensitive(name: str) -> bool:
    return any(word in name.upper() for word in SENSITIVE)


def _plain(value: Any, depth: int) -> Any:
    """Turn a value into JSON values. What has no form of its own is given as its `repr`."""
    if isinstance(value, str):
        return without_credentials(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth == 0:
        return repr(value)
    for kind, encoder in _encoders.items():
        if isinstance(value, kind):
            return _plain(encoder(value), depth - 1)
    if isinstance(value, Enum):
        return _plain(value.value, depth - 1)
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
    elif not isinstance(value, Mapping | type) and hasattr(value, "__dict__"):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): _redacted(str(key), entry, depth - 1) for key, entry in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_plain(entry, depth - 1) for entry in value), key=repr)
    if isinstance(value, list | tuple):
        return [_plain(entry, depth - 1) for entry in value]
    return repr(value)


def _redacted(name: str, value: Any, depth: int) -> Any:
    is_secret = isinstance(value, str) and any(word in name.upper() for word in ("SECRET", "PASSWORD", "API_KEY"))
    return REDACTED if is_secret else _plain(value, depth)
