"""What several processes on one port keep of the Responses API: in a file they share, or honestly nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from support.processes import Cluster, Frontend, Worker

MODEL = "stored"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("stored")) as found:
        yield found


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Worker:
    return cluster.worker("worker", MODEL)


def client(frontend: Frontend) -> openai.OpenAI:
    """A client with a connection of its own, which any of the processes may take."""
    return openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0, timeout=20)


def test_a_file_is_shared_by_all_and_outlives_them(cluster: Cluster, worker: Worker, tmp_path: Path) -> None:
    place = f"--responses-store=sqlite:{tmp_path / 'responses.db'}"
    frontend = cluster.frontend("sharing", "--workers=2", place)
    cluster.wait_ready(frontend, worker)
    last = None
    for _ in range(6):
        with client(frontend) as one:
            made = one.responses.create(model=MODEL, input="hi", previous_response_id=last)
        last = made.id
        for _ in range(3):
            with client(frontend) as other:
                assert other.responses.retrieve(last).to_dict() == made.to_dict()
    frontend.terminate()
    frontend.exit_code()
    again = cluster.frontend("again", place)
    cluster.wait_ready(again, worker)
    with client(again) as one:
        assert one.responses.create(model=MODEL, input="hi", previous_response_id=last).status == "completed"
        one.responses.delete(last or "")


def test_memory_of_one_process_is_not_offered_where_there_are_several(cluster: Cluster, worker: Worker) -> None:
    frontend = cluster.frontend("several", "--workers=2")
    cluster.wait_ready(frontend, worker)
    with client(frontend) as one:
        made = one.responses.create(model=MODEL, input="hi", store=True)
        assert made.to_dict()["store"] is False
        with pytest.raises(openai.UnprocessableEntityError, match="responses-store"):
            one.responses.create(model=MODEL, input="hi", previous_response_id=made.id)
        with pytest.raises(openai.NotFoundError):
            one.responses.retrieve(made.id)
