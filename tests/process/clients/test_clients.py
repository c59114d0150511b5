"""Client libraries that people use, unchanged, each in an environment of its own: `make test-clients` makes these."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_environments import CLIENTS, FOLDER, python_of

from support.patience import PATIENCE_SECONDS
from support.processes import Cluster
from support.random_weights import random_tensors
from support.reference_models import LLAMA, write_model
from support.serve_command import serve_command
from support.tiny_model import tiny_tokenizer

HERE = Path(__file__).parent
RAW = {"pictures": "diffusion_main", "speech": "speech_engine", "ears": "transcription_engine"}
"""The modules of the sample engines, by the model that they serve."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("served")
    with serve_command(directory, "--http-host", "127.0.0.1", "--http-port", "0", "--in-process") as command:
        command.wait_ready()
        yield command.url


@pytest.fixture(scope="module")
def media_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a frontend with a model of vectors and the sample engines that need no model."""
    root = tmp_path_factory.mktemp("media")
    tokenizer = tiny_tokenizer(320)
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"], "vocab_size": tokenizer.get_vocab_size()}
    write_model(root / "vector", config, random_tensors(config))
    tokenizer.save(str(root / "vector" / "tokenizer.json"))
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        small = ("--kv-cache-mb", "4", "--endpoint-types", "embeddings")
        workers = [cluster.reference("vector", "vector", root / "vector", *small)]
        workers += [cluster.raw(name, name, f"dynamo.engines.sample.{module}") for name, module in RAW.items()]
        frontend = cluster.frontend("frontend")
        cluster.wait_ready(frontend, *workers)
        yield frontend.url


@pytest.mark.clients
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_library_works_unchanged(name: str, url: str) -> None:
    run(name, f"{name}_calls.py", url)


@pytest.mark.clients
@pytest.mark.parametrize("name", ["litellm", "langchain"])
def test_a_client_library_makes_media_and_vectors(name: str, media_url: str) -> None:
    run(name, f"{name}_media_calls.py", media_url)


def run(name: str, script: str, url: str) -> None:
    """Run a script with the interpreter of a client's environment."""
    python = python_of(name)
    if not python.exists():
        pytest.skip(f"{FOLDER.name}/{name} is missing: `make test-clients` makes it, and says why when it cannot")
    done = subprocess.run(
        [python, HERE / script, url],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
