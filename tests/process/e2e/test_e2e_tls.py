"""Everything encrypted and everybody known: HTTPS, mutual TLS and the secret, with processes as users start them."""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path

from support.certificates import Authority
from support.processes import PATIENCE_SECONDS, Cluster, wait

BODY = json.dumps({"model": "tls", "messages": [{"role": "user", "content": "hi"}]}).encode()


def test_a_cluster_serves_with_tls_everywhere(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    (tmp_path / "secret").write_text("a secret of some length\n")
    cert, key = authority.issue("127.0.0.1")
    plane = {
        "DYN_TCP_TLS_CERT_PATH": cert,
        "DYN_TCP_TLS_KEY_PATH": key,
        "DYN_TCP_TLS_CA_CERT_PATH": authority.path,
        "DYN_TCP_TLS_CLIENT_CA_CERT_PATH": authority.path,
        "DYN_TCP_TLS_CLIENT_CERT_PATH": cert,
        "DYN_TCP_TLS_CLIENT_KEY_PATH": key,
        "DYN_TCP_SECRET_PATH": str(tmp_path / "secret"),
    }
    context = ssl.create_default_context(cafile=authority.path)

    with Cluster(tmp_path) as cluster:
        frontend = cluster.frontend(
            "frontend", "--workers=2", f"--tls-cert-path={cert}", f"--tls-key-path={key}", **plane
        )
        worker = cluster.worker("worker", "tls", **plane)
        frontend.wait_ready()
        worker.wait_ready()
        answers: list[tuple[int, bytes]] = []

        def ask() -> bool:
            connection = http.client.HTTPSConnection(
                "127.0.0.1", frontend.port, timeout=PATIENCE_SECONDS, context=context
            )
            connection.request("POST", "/v1/chat/completions", BODY, {"content-type": "application/json"})
            response = connection.getresponse()
            answers.append((response.status, response.read()))
            connection.close()
            return answers[-1][0] == 200

        wait(ask, lambda: f"an answer; the last one: {answers[-1:]}; log:\n{frontend.log}\n{worker.log}")
        assert b"Hello" in answers[-1][1]
        stranger = cluster.frontend("stranger")
        stranger.wait_ready()
        wait(lambda: "tls" in stranger.models(), lambda: stranger.log)
        connection = http.client.HTTPConnection("127.0.0.1", stranger.port, timeout=PATIENCE_SECONDS)
        connection.request("POST", "/v1/chat/completions", BODY, {"content-type": "application/json"})
        assert connection.getresponse().status == 503
        connection.close()
        assert "DYN_TCP_TLS_CA_CERT_PATH" in stranger.log


def test_a_frontend_whose_files_cannot_be_used_says_so_and_ends(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        frontend = cluster.frontend("frontend", "--tcp-tls-ca-cert-path=/nowhere/ca.pem")
        assert frontend.exit_code() == 1
        assert "DYN_TCP_TLS_CA_CERT_PATH: cannot read /nowhere/ca.pem" in frontend.log
        assert "Traceback" not in frontend.log
