"""`dynamo chat`: talk to a served model in the terminal. Only the standard library; any OpenAI-compatible server will do."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, TextIO

from dynamo.cli.api_client import EXIT_FAILED, MAX_LINE_BYTES, ApiClient, ServerError, ServerFlags, error_text
from dynamo.cli.usage import UsageError
from dynamo.settings.command import CommandParser, did_you_mean
from dynamo.settings.flags import add_flags
from dynamo.settings.foreign import has_colour
from dynamo.settings.readers import integer, number, placeholder, text
from dynamo.settings.table import read_settings, setting, settings_of

__all__ = ["ChatClient", "ChatFlags", "ServerError", "build_parser", "main"]

_COMMANDS: Final = {"/reset": "forget the conversation", "/quit": "leave (also Ctrl-D)", "/help": "show these commands"}


class ChatClient(ApiClient):
    """Calls one server over HTTP."""

    def models(self) -> list[str]:
        """Return the names of the models that are served. Raises ServerError."""
        with closing(self.connect()) as connection:
            answer = self.request(connection, "GET", "/v1/models")
            return [str(model["id"]) for model in json.loads(answer.read())["data"]]

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the delta of each chunk of one chat answer. Raises ServerError, also in the middle."""
        with closing(self.connect()) as connection:
            answer = self.request(connection, "POST", "/v1/chat/completions", {**body, "stream": True})
            while line := answer.readline(MAX_LINE_BYTES):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerError(error_text(chunk))
                for choice in chunk.get("choices", ()):
                    yield choice.get("delta") or {}
            raise ServerError("the connection ended before the answer did")


@dataclass(frozen=True, slots=True)
class ChatFlags(ServerFlags):
    """The server to call, and how."""

    # fmt: off
    model: str | None = setting(None, None, placeholder("NAME", text), "Which model", flag="--model", shown="the only one, or the first")
    system: str | None = setting(None, None, text, "Instructions that come before the conversation", flag="--system")
    max_tokens: int | None = setting(None, None, integer(1), "At most so many tokens per answer", flag="--max-tokens")
    temperature: float | None = setting(None, None, number(0, metavar="T"), "0 is greedy", flag="--temperature", shown="the server's")
    # fmt: on


def build_parser(env: Mapping[str, str]) -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser(
        "dynamo chat",
        description="Talk to a served model in the terminal.",
        usage="dynamo chat [MESSAGE ...] [options]",
        epilog="Without a MESSAGE it asks for one after the other and keeps the conversation; /help lists its commands.\n"
        "A MESSAGE of - is read from standard input.\n\nexample:\n  dynamo chat What is 27 + 15?",
    )
    parser.add_argument("message", nargs="*", metavar="MESSAGE", help="ask this, print the answer and leave")
    add_flags(parser, (made for _, made in settings_of(ChatFlags)), env)
    return parser


def main(argv: list[str]) -> int:
    """Hold a conversation, or send one message; return the exit status."""
    given = build_parser(os.environ).parse_args(argv)
    options = read_settings(ChatFlags, os.environ, vars(given))
    client = ChatClient(options.url, options.api_key)
    try:
        body: dict[str, Any] = {"model": _model(client, options.model)}
        if options.max_tokens is not None:
            body["max_tokens"] = options.max_tokens
        if options.temperature is not None:
            body["temperature"] = options.temperature
        messages = [] if options.system is None else [{"role": "system", "content": options.system}]
        if given.message:
            question = sys.stdin.read() if given.message == ["-"] else " ".join(given.message)
            _ask(client, body, [*messages, {"role": "user", "content": question}], sys.stdout)
            return 0
        return _converse(client, body, messages)
    except ServerError as error:
        print(f"dynamo chat: {error}", file=sys.stderr)
        return EXIT_FAILED


def _model(client: ChatClient, asked: str | None) -> str:
    served = client.models()
    if not served:
        raise ServerError("the server has no model yet; try again when a worker is ready")
    if asked is not None and asked not in served:
        raise UsageError(f"--model {asked!r} is not served{did_you_mean(asked, served)}; there is {', '.join(served)}")
    return asked or served[0]


def _converse(client: ChatClient, body: dict[str, object], messages: list[dict[str, str]]) -> int:
    print(f"{body['model']} (/help lists the commands)", file=sys.stderr)
    first = len(messages)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if text.startswith("/"):
            if text == "/quit":
                return 0
            if text == "/reset":
                del messages[first:]
            elif text == "/help":
                print("\n".join(f"{name:8}{what}" for name, what in _COMMANDS.items()))
            else:
                print(f"there is no command {text}{did_you_mean(text, _COMMANDS)}; /help lists them")
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        try:
            messages.append({"role": "assistant", "content": _ask(client, body, messages, sys.stdout)})
        except ServerError as error:
            print(f"dynamo chat: {error}", file=sys.stderr)
            messages.pop()
        except KeyboardInterrupt:  # ends this answer, and the worker's work on it, but not the conversation
            print(" [stopped]")
            messages.pop()


def _ask(client: ChatClient, body: dict[str, Any], messages: list[dict[str, str]], out: TextIO) -> str:
    """Print one answer as it comes, thoughts dimmed on a terminal; return its text."""
    said: list[str] = []
    is_thinking = False
    dim, plain = ("\x1b[2m", "\x1b[0m") if has_colour(out, os.environ) else ("", "")
    try:
        for delta in client.stream({**body, "messages": messages}):
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            if thought:
                out.write(thought if is_thinking else dim + thought)
                is_thinking = True
            if text := delta.get("content"):
                out.write(f"{plain}\n{text}" if is_thinking else text)
                is_thinking = False
                said.append(text)
            out.flush()
    finally:
        if said or is_thinking:
            out.write(plain + "\n" if is_thinking else "\n")
            out.flush()
    return "".join(said)
