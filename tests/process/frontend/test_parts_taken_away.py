"""A part can be taken away: what is off is not imported, and what is missing costs only itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Runs in a process of its own, as it looks at the modules of a whole frontend. `sys.argv[1]`: a part that is not there.
SERVE = """
import asyncio, json, sys
from importlib.machinery import PathFinder
from pathlib import Path
missing = sys.argv[1]
if missing:
    class Without(PathFinder):
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            is_missing = name == missing or name.startswith(missing + ".")
            return None if is_missing else PathFinder.find_spec(name, path, target)
    sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
from support.frontend_cluster import cluster, say
async def main():
    async with cluster(Path(sys.argv[2])) as house:
        await house.worker(say("hel", "lo"))
        answer = await house.client.chat(stream=True)
        print(json.dumps({
            "status": answer.status, "text": answer.text(), "parts": list(house.frontend.parts),
            "modules": sorted(name for name in sys.modules if name.startswith("dynamo.frontend.parts.")),
        }))
asyncio.run(main())
"""


def served(directory: Path, missing: str = "") -> dict[str, object]:
    """Serve a streamed chat in a fresh process; return its answer, its parts and its modules."""
    name = f"dynamo.frontend.parts.{missing}" if missing else ""
    paths = [path for path in sys.path if path]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}\n{SERVE}", name, str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, object] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize(
    "part",
    [
        "keys",
        "recording",
        "inspector",
        "batches",
        "stored_responses",
        "media",
        "scaling",
        "residency",
        "group",
        "vllm_routes",
        "ollama",
        "fallbacks",
        "route_extensions",
        "token_routes",
        "rl",
    ],
)
def test_a_frontend_without_the_folder_of_a_part_serves(tmp_path: Path, part: str) -> None:
    found = served(tmp_path, part)
    assert (found["status"], found["text"]) == (200, "hello")
    assert part not in found["parts"]  # type: ignore[operator]


def test_a_frontend_without_the_whole_wing_of_the_parts_serves(tmp_path: Path) -> None:
    found = served(tmp_path, "opening")
    assert (found["status"], found["text"], found["parts"]) == (200, "hello", [])


def test_an_idle_frontend_imports_no_module_of_a_part_that_is_off(tmp_path: Path) -> None:
    found = served(tmp_path)
    folders = {name.split(".")[3] for name in found["modules"]}  # type: ignore[attr-defined]
    assert folders == {
        "part",
        "opening",
        "switches",
        "recording",
        "inspector",
        "stored_responses",
        "media",
        "vllm_routes",
        "ollama",
    }
    assert set(found["parts"]) == folders - {"part", "opening", "switches"}  # type: ignore[call-overload]
