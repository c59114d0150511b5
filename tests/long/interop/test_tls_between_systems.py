"""TLS and mutual TLS between processes of both systems: requests one way, answers over connections of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.certificates import Authority
from support.interop_cluster import interop_cluster
from support.interop_engine import SENTENCE
from support.native_frontend import why_not

REASON = why_not()
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(bool(REASON), reason=REASON),
]


@pytest.mark.parametrize("is_mutual", [False, True], ids=["one side", "mutual"])
@pytest.mark.parametrize("frontend", ["ours", "native"])
async def test_workers_of_both_systems_answer_over_tls(tmp_path: Path, frontend: str, is_mutual: bool) -> None:
    authority = Authority(tmp_path / "ca")
    cert, key = authority.issue("127.0.0.1")
    tls = {
        "DYN_TCP_TLS_CERT_PATH": cert,
        "DYN_TCP_TLS_KEY_PATH": key,
        "DYN_TCP_TLS_CA_CERT_PATH": authority.path,
    }
    if is_mutual:
        tls |= {
            "DYN_TCP_TLS_CLIENT_CA_CERT_PATH": authority.path,
            "DYN_TCP_TLS_CLIENT_CERT_PATH": cert,
            "DYN_TCP_TLS_CLIENT_KEY_PATH": key,
        }
    async with interop_cluster(tmp_path, frontend=frontend, workers=["ours", "native"], everywhere=tls) as cluster:
        for _ in range(50):
            reply = await cluster.chat()
            assert reply.status == 200, reply.body
            assert reply.json()["choices"][0]["message"]["content"] == SENTENCE
            if all(worker.served() for worker in cluster.workers):
                break
        assert all(worker.served() for worker in cluster.workers)
