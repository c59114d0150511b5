"""The overlays, rendered by kubectl, against the schemas of Kubernetes and a real API server (`make test-kube`)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.kube_server import REPOSITORY, KubeServer, collection_of, kube_binary

TOOLS = REPOSITORY / ".clients" / "kube" / "venv" / "bin"
DEPLOY = REPOSITORY / "deploy"
VERSIONS = ("1.30", "1.34", "1.37")
OTHERS = {"ScaledObject", "ServiceMonitor", "PodMonitor"}  # of operators, whose schemas no package has
UNKNOWN_TO_1_20 = {"PodDisruptionBudget", "HorizontalPodAutoscaler"}  # policy/v1 and autoscaling/v2 came later

pytestmark = [
    pytest.mark.kube,
    pytest.mark.skipif(not (TOOLS / "kubectl").exists(), reason="no kubectl: make test-kube fetches it"),
]


def rendered(folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run([TOOLS / "kubectl", "kustomize", folder], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """The folders to apply; `production` once more with the other autoscaler."""
    other = tmp_path / "deploy" / "overlays" / "production"
    subprocess.run(["cp", "-r", DEPLOY, tmp_path], check=True)
    file = other / "kustomization.yaml"
    file.write_text(file.read_text().replace("../keda", "../hpa"))
    return {"base": DEPLOY / "kubernetes", "production": DEPLOY / "overlays" / "production", "with hpa": other}


def test_every_object_of_every_overlay_is_valid_by_the_schemas(places: dict[str, Path], tmp_path: Path) -> None:
    for place, folder in places.items():
        found = rendered(folder)
        assert len(found) >= 10
        for number, each in enumerate(found):
            if each["kind"] not in OTHERS:
                file = tmp_path / f"{number}.json"
                file.write_text(json.dumps(each))
                for version in VERSIONS:
                    argv = [str(TOOLS / "kubernetes-validate"), "--strict", "--kubernetes-version", version, str(file)]
                    done = subprocess.run(argv, check=False, capture_output=True, text=True)
                    assert done.returncode == 0, (place, version, each["kind"], done.stdout + done.stderr)


def test_the_overlay_for_production_has_one_frontend_that_measures(places: dict[str, Path]) -> None:
    for place in ("production", "with hpa"):
        found = {(each["kind"], each["metadata"]["name"]): each for each in rendered(places[place])}
        frontend = found["Deployment", "dynamo-frontend"]["spec"]
        assert frontend["replicas"] == 1
        assert {"name": "DYN_AUTOSCALE", "value": "1"} in frontend["template"]["spec"]["containers"][0]["env"]
        assert found["PodDisruptionBudget", "dynamo-frontend"]["spec"]["maxUnavailable"] == 1
        assert "replicas" not in found["Deployment", "dynamo-worker"]["spec"]
        assert ("ScaledObject" if place == "production" else "HorizontalPodAutoscaler", "dynamo-worker") in found


@pytest.mark.skipif(kube_binary() is None, reason="no API server of Kubernetes: make test-kube builds one")
async def test_a_real_server_takes_every_object_that_it_knows(places: dict[str, Path], tmp_path: Path) -> None:
    async with KubeServer(tmp_path) as kube:
        taken = set()
        for each in rendered(places["production"]):
            if each["kind"] in OTHERS | UNKNOWN_TO_1_20:
                continue
            # Created, as an apply of that version knows no defaults of ports; 409: it is among what a test begins with.
            status, answer = await kube.call("POST", collection_of(each), each)
            assert status in (201, 409), (each["kind"], answer["message"])
            taken.add(each["kind"])
        assert taken == {
            "CustomResourceDefinition", "ServiceAccount", "Role", "RoleBinding", "Deployment", "Service", "NetworkPolicy"
        }  # fmt: skip
