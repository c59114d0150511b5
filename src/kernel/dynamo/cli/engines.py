"""From what a person writes after `--engine` to an engine class, and the configuration that `dynamo serve` gives its worker."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from dynamo.cli.usage import UsageError
from dynamo.settings.command import did_you_mean
from dynamo.settings.extras import install_command

if TYPE_CHECKING:
    from dynamo.contract.config import WorkerConfig
    from dynamo.contract.engine import BaseEngine

BUILT_IN: Final[dict[str, str]] = {
    "reference": "dynamo.reference.engine:ReferenceEngine",
    "sample": "dynamo.engines.sample.engine:SampleLLMEngine",
    "llamacpp": "dynamo.llamacpp.engine:LlamaCppEngine",
    "llamacpp-text": "dynamo.llamacpp.engine:LlamaCppTextEngine",
    "sglang": "dynamo.sglang.engine:SglangEngine",
    "transformers": "dynamo.transformers.engine:TransformersEngine",
    "trtllm": "dynamo.trtllm.engine:TrtllmEngine",
    "upstream": "dynamo.upstream.engine:UpstreamEngine",
    "vllm": "dynamo.vllm.engine:VllmEngine",
}
"""The engines that come with us, by the name a person types."""

OF_FUNCTIONS: Final = (
    "dynamo.engines.callable.engine"  # its `engine_class(function, name)` makes an engine of a function
)

EXTRAS: Final = frozenset({"reference"})  # built-in engines that need the extra of their name


def class_path(engine: str) -> str:
    """Return `module:Class`, `module:function` or `file.py:function` for a name or a path; imports nothing.

    Raises UsageError for a text that can be none of them, or for a file that is not there.
    """
    path = BUILT_IN.get(engine, engine)
    module, colon, name = path.rpartition(":")
    if colon and name.isidentifier():
        if module.endswith(".py"):
            if not Path(module).expanduser().is_file():
                raise UsageError(f"there is no file {module}")
            return path
        if all(part.isidentifier() for part in module.split(".")):
            return path
    raise UsageError(
        f"there is no engine {engine!r}{did_you_mean(engine, BUILT_IN)}; use one of {', '.join(sorted(BUILT_IN))}, or "
        "module:Class, module:function or file.py:function for one of your own"
    )


def load_engine(engine: str) -> type[BaseEngine]:
    """Import an engine class, also from the current directory; a function becomes one (`engines.callable`).

    Raises UsageError that names which of module, class, base class and signature is wrong. What the module itself raises
    passes.
    """
    module_name, _, class_name = class_path(engine).rpartition(":")
    module = _load_file(Path(module_name)) if module_name.endswith(".py") else _import(engine, module_name)
    found = getattr(module, class_name, None)
    if found is None:
        raise UsageError(f"module {module_name!r} has no {class_name!r}{_suggest(module)}")

    from dynamo.contract.engine import LLMEngine, RawEngine

    if isinstance(found, type) and issubclass(found, LLMEngine | RawEngine):
        return found
    if isinstance(found, type) or not callable(found):
        raise UsageError(f"{module_name}:{class_name} is neither a subclass of LLMEngine or RawEngine nor a function")

    from dynamo.errors import InvalidArgument

    try:
        made: type[BaseEngine] = importlib.import_module(OF_FUNCTIONS).engine_class(found, class_name)
        return made
    except InvalidArgument as error:
        raise UsageError(f"{module_name}:{error}") from error


def source_directory(engine: str) -> str:
    """Return the directory of the file that defines an engine which `load_engine` has imported; "" for a built-in one."""
    if engine in BUILT_IN:
        return ""
    module_name = class_path(engine).rpartition(":")[0]
    if module_name.endswith(".py"):
        return str(Path(module_name).expanduser().absolute().parent)
    file = sys.modules[module_name].__file__
    return str(Path(file).absolute().parent) if file else ""


def _import(engine: str, module_name: str) -> ModuleType:
    _search_in(Path.cwd())
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            hint = f"; try: {install_command(engine)}" if engine in EXTRAS else ""
            raise UsageError(f"module {module_name!r} needs {error.name!r}, which is not installed{hint}") from error
        raise UsageError(
            f"there is no module {error.name!r}; is its package installed, or the current directory the right one?"
        ) from error


def _load_file(path: Path) -> ModuleType:
    """Import one file under the name of its stem; modules beside it can be imported, too."""
    path = path.expanduser().absolute()
    _search_in(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickles find a class's module by its name
    spec.loader.exec_module(module)
    return module


def _search_in(directory: Path) -> None:
    if str(directory) not in sys.path and (directory != Path.cwd() or "" not in sys.path):
        sys.path.insert(0, str(directory))


def _suggest(module: object) -> str:
    from dynamo.contract.engine import LLMEngine, RawEngine

    name = getattr(module, "__name__", "")
    engines = [
        key
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, LLMEngine | RawEngine) and value.__module__ == name
    ]
    return f"; it has {', '.join(engines)}" if engines else ""


def served_as(config: WorkerConfig, names: Sequence[str]) -> WorkerConfig:
    """Return the configuration of a model with these names, the first of which is its own; without any, with its own."""
    if not names:
        return config
    return dataclasses.replace(config, served_model_name=names[0], model_aliases=names[1:])


def endpoint_path(config: WorkerConfig) -> str:
    return f"{config.namespace}.{config.component}.{config.endpoint}"


def on_planes(config: WorkerConfig, *, discovery: str, requests: str) -> WorkerConfig:
    """Return the configuration with planes that need no service, whatever the engine's flags default to."""
    event_plane = None if config.event_plane == "nats" else config.event_plane
    return dataclasses.replace(
        config, discovery_backend=discovery, request_plane=requests, response_plane="tcp", event_plane=event_plane
    )
