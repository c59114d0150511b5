"""Processes that find each other through the Kubernetes backend, over a fake of the API server."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.fake_kubernetes import NAMESPACE, FakeKubernetes
from support.http_client import CHAT, ask, chat
from support.patience import PATIENCE_SECONDS
from support.processes import Cluster, until


async def test_a_frontend_serves_the_models_of_ready_pods(tmp_path: Path) -> None:
    kubernetes = FakeKubernetes()
    await kubernetes.start()
    config = tmp_path / "kubeconfig"
    config.write_text(kubernetes.kubeconfig())

    def pod(name: str) -> dict[str, str]:
        return {"POD_NAME": name, "POD_NAMESPACE": NAMESPACE, "POD_UID": f"uid-{name}"}

    try:
        with Cluster(tmp_path, "kubernetes", KUBECONFIG=str(config)) as cluster:
            frontend = cluster.frontend("frontend", **pod("frontend"))
            worker = cluster.sample("worker", "m", "--delay", "0.001", **pod("w-0"))
            await until(lambda: "w-0" in kubernetes.workers(), lambda: worker.log)
            await until(lambda: "serving HTTP on" in frontend.log, lambda: frontend.log)
            frontend.wait_ready()

            async def answers(wanted: int) -> None:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while (await ask(frontend.port, CHAT, chat("m", max_tokens=3))).status != wanted:
                        await asyncio.sleep(0.02)

            await answers(404)  # its pod is not ready
            await kubernetes.set_pod("w-0")
            await answers(200)
            worker.terminate()
            await answers(503)
            assert await worker.ended() == 0
            assert kubernetes.workers() == {}
    finally:
        await kubernetes.stop()
