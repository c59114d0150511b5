"""Structural tags as a Lark grammar: free text, until a trigger begins a tag whose content has a form of its own.

Both shapes are read: `{"structures": [...], "triggers": [...]}` and `{"format": {...}}`. Text that names a special token
(`<tool_call>`, where the tokenizer has it as one) becomes that token: free text can never contain it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from dynamo.protocol.openai.shapes import JsonMapping, JsonObject

ANY_TEXT: Final = r"(.|\n)*"

# Between two JSON tokens. The format allows any amount, and a model that likes newlines would never end.
WHITESPACE: Final = r"[ \t\n\r]{1,16}"


def structural_grammar(tag: JsonMapping, special_tokens: Mapping[str, int]) -> str:
    """Return the grammar of a structural tag, in llguidance's Lark. Raises ValueError naming the member that is wrong."""
    rules = _Rules(special_tokens)
    if "format" in tag:
        body = rules.format(_object(tag["format"], "format"), "format")
    elif "structures" in tag:
        structures = _list(tag["structures"], "structures")
        tags = [
            {"begin": one.get("begin"), "content": _schema(one, f"structures[{n}]"), "end": one.get("end", "")}
            for n, one in enumerate(_object(item, f"structures[{n}]") for n, item in enumerate(structures))
        ]
        body = rules.triggered({"triggers": tag.get("triggers"), "tags": tags}, "structures")
    else:
        raise ValueError("has neither `format` nor `structures`")
    return "\n".join(["%llguidance {}", f"start: {body}", *rules.lines])


def _schema(structure: JsonMapping, at: str) -> JsonObject:
    if "schema" not in structure:
        raise ValueError(f"{at}.schema is missing")
    schema = structure["schema"]
    return {"type": "json_schema", "json_schema": json.loads(schema) if isinstance(schema, str) else schema}


class _Rules:
    """Rules of a grammar under construction; methods return an expression, and add the rules it needs."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self._tokens = special_tokens
        names = sorted(special_tokens, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        self._count = 0

    def format(self, form: JsonMapping, at: str) -> str:
        """Compile `form`, one of the formats by `type`; `at` is its path, for error messages."""
        kind = form.get("type")
        if kind == "const_string":
            return self._text(_string(form, "value", at))
        if kind == "json_schema":
            return self._json(form.get("json_schema", {}))
        if kind == "regex":
            return self._terminal(_string(form, "pattern", at))
        if kind == "grammar":
            return self._add("%lark {\n" + _string(form, "grammar", at) + "\n}")
        if kind == "any_text":
            return self._terminal(ANY_TEXT)
        if kind in ("sequence", "or"):
            parts = [
                self.format(_object(part, f"{at}.elements"), f"{at}.elements[{n}]")
                for n, part in enumerate(_list(form.get("elements"), f"{at}.elements"))
            ]
            return self._add((" " if kind == "sequence" else " | ").join(parts))
        if kind == "tag":
            return self._add(f"{self._text(_string(form, 'begin', at))} {self._inside(form, at)}")
        if kind == "triggered_tags":
            return self.triggered(form, at)
        if kind == "tags_with_separator":
            return self._separated(form, at)
        raise ValueError(f"{at}.type {kind!r} is not supported")

    def _json(self, schema: Any) -> str:
        if isinstance(schema, Mapping):  # as for a plain schema: without a bound a model may write blanks for ever
            schema = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        return self._add(f"%json {json.dumps(schema)}")

    def triggered(self, form: JsonMapping, at: str) -> str:
        """Free text with tags in it: where a trigger appears, one of the tags that begin with it must follow."""
        triggers = _list(form.get("triggers"), f"{at}.triggers")
        tags = [_object(tag, f"{at}.tags") for tag in _list(form.get("tags"), f"{at}.tags")]
        calls = []
        for trigger in triggers:
            if not isinstance(trigger, str) or not trigger:
                raise ValueError(f"{at}.triggers must be strings that are not empty")
            branches = [
                f"{self._text(begin[len(trigger) :])} {self._inside(tag, at)}"
                for tag in tags
                if (begin := _string(tag, "begin", at)).startswith(trigger)
            ]
            if branches:
                calls.append(self._add(f"{self._until(trigger)} ({' | '.join(branches)})"))
        if not calls:
            raise ValueError(f"{at}: no tag begins with one of the triggers")
        if any(not _string(tag, "begin", at).startswith(tuple(triggers)) for tag in tags):
            raise ValueError(f"{at}: every tag must begin with one of the triggers")
        call = self._add(" | ".join(calls))
        if form.get("stop_after_first"):
            return call if form.get("at_least_one") else self._add(f"{call} | {self._terminal(ANY_TEXT)}")
        return f"{call}{'+' if form.get('at_least_one') else '*'} {self._terminal(ANY_TEXT)}"

    def _separated(self, form: JsonMapping, at: str) -> str:
        tags = [
            self._add(f"{self._text(_string(tag, 'begin', at))} {self._inside(tag, at)}")
            for tag in (_object(tag, f"{at}.tags") for tag in _list(form.get("tags"), f"{at}.tags"))
        ]
        one = self._add(" | ".join(tags))
        more = "" if form.get("stop_after_first") else f" ({self._text(_string(form, 'separator', at))} {one})*"
        return self._add(f"{one}{more}" if form.get("at_least_one") else f"({one}{more})?")

    def _inside(self, tag: JsonMapping, at: str) -> str:
        """Compile a tag behind its `begin`: the content and the end, which may be one of several."""
        ends = tag.get("end", "")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise ValueError(f"{at}: a tag's end must be a string or a list of strings")
        content = _object(tag.get("content"), f"{at}: a tag's content")
        if content.get("type") == "any_text" and all(ends):
            return f"({' | '.join(self._until(end) for end in ends)})"
        return f"{self.format(content, f'{at}.content')} ({' | '.join(self._text(end) for end in ends)})"

    def _until(self, marker: str) -> str:
        """Compile any text up to and including the first `marker`."""
        head, *rest = self._pieces(marker)
        if isinstance(head, int):
            return f"{self._terminal(ANY_TEXT)} {self._joined([head, *rest])}"
        if rest:  # the special token behind it is what the text cannot contain
            return f"{self._terminal(ANY_TEXT + re.escape(head))} {self._joined(rest)}"
        return self._add(f"{self._terminal(ANY_TEXT)} {json.dumps(head)}", lazy=True)

    def _text(self, text: str) -> str:
        return self._joined(self._pieces(text)) if text else '""'

    def _pieces(self, text: str) -> list[str | int]:
        """Plain text and special tokens, in turn."""
        parts = self._split.split(text) if self._split is not None else [text]
        return [self._tokens.get(part, part) for part in parts if part]

    def _joined(self, pieces: list[str | int]) -> str:
        return " ".join(f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece) for piece in pieces)

    def _terminal(self, pattern: str) -> str:
        return self._add("/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern) + "/", terminal=True)

    def _add(self, expression: str, *, lazy: bool = False, terminal: bool = False) -> str:
        self._count += 1
        name = f"TEXT_{self._count}" if terminal else f"part_{self._count}"
        self.lines.append(f"{name}{'[lazy]' if lazy else ''}: {expression}")
        return name


def _object(value: Any, what: str) -> JsonMapping:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be an object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{what} must be a list that is not empty")
    return value


def _string(form: JsonMapping, name: str, at: str) -> str:
    value = form.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{at}.{name} must be a string")
    return value
