"""`make test-clients`: make an environment for each client library, because their requirements clash with each other's.

    python tools/client_environments.py [--only NAME] [--suites]

`--suites`: for the suites of others that judge this server, instead (`make test-foreign`).

Environments that are there are left as they are; remove `.clients` to have the newest versions. One that cannot be made is
named with pip's reason, and its test is skipped.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[1] / ".clients"
CLIENTS: Final = {
    "litellm": (
        "litellm[proxy]",
        "mcp",
        "soundfile",
    ),  # what it imports for tools and for streams in the form of Anthropic
    "langchain": ("langchain-openai", "langchain-anthropic"),
    "pydantic_ai": ("pydantic-ai-slim[openai,anthropic]",),
    "instructor": ("instructor[anthropic]",),
    "ollama": ("ollama",),
    "aiperf": ("aiperf",),  # 1.2 GB
}
"""Requirements by the name of the environment, which is that of the script that calls the library."""
SUITES: Final = {
    "llm_comply": ("llm-comply",),  # and OpenAI's document, which it carries
    "lm_eval": (
        "lm-eval[api,hf]",
        "torch==2.13.0",
    ),  # a release of torch that has a build without CUDA where there is one
    "bfcl": ("--no-deps", "bfcl-eval"),  # its data alone
}
"""The same for the suites of `make test-foreign`."""


def python_of(name: str) -> Path:
    """Return the interpreter of a client's environment, made or not."""
    return FOLDER / name / "bin" / "python"


def make(name: str) -> str | None:
    """Make an environment. Return why that is not possible; None when it is there."""
    python = python_of(name)
    if python.exists():
        return None
    print(f"making {python.parent.parent} ...", flush=True)
    unfinished = FOLDER / f"{name}.unfinished"  # an interrupted installation must not pass for a whole one
    venv.create(unfinished, with_pip=True, clear=True)
    command = [
        str(unfinished / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "-q",
        "--no-warn-script-location",
        *(CLIENTS | SUITES)[name],
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return done.stderr.strip().rpartition("\n")[2] or f"pip ended with status {done.returncode}"
    unfinished.rename(FOLDER / name)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Make an environment for each client library.")
    parser.add_argument("--only", choices=[*CLIENTS, *SUITES], help="this one")
    parser.add_argument("--suites", action="store_true", help="the suites that judge this server, instead of clients")
    given = parser.parse_args()
    for name in [given.only] if given.only else SUITES if given.suites else CLIENTS:
        if (reason := make(name)) is not None:
            print(f"{name}: not tested, its environment cannot be made: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
