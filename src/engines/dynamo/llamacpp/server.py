"""The process that holds llama.cpp: `python -m dynamo.llamacpp.server`.

It reads one JSON object of parameters from standard input, loads the model, and writes one line: `{"ready": true, "vocab_size":
...}` or `{"error": ...}`. Then it serves on a socket until standard input ends. A process of its own, because loading holds the
interpreter's lock, and because a fault in native code ends the process it is in.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    answers = os.dup(sys.stdout.fileno())  # llama.cpp may write to standard output, too
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    settings = json.loads(sys.stdin.readline())
    try:
        server = load(settings)
    except Exception as error:  # whatever it is, the parent reports it
        _answer(answers, {"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    _answer(answers, {"ready": True})
    sys.stdin.read()  # the worker has ended, or this process is to end
    del server
    os._exit(0)


def load(settings: dict[str, Any]) -> Any:
    """Return a running server. Raises what xllamacpp raises, and AttributeError for a parameter that it does not have."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    for name, value in settings.items():
        holder, attribute = parameters, name
        while "." in attribute:
            first, _, attribute = attribute.partition(".")
            holder = getattr(holder, first)
        current = getattr(holder, attribute)
        setattr(holder, attribute, type(current)(value) if isinstance(current, int | float | str) else value)
    return xllamacpp.Server(parameters)


def _answer(descriptor: int, answer: dict[str, Any]) -> None:
    os.write(descriptor, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
