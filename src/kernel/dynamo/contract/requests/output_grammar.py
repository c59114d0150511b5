"""From a constraint of a request to a grammar of llguidance (Lark), for engines that decode with that library.

An engine that samples without the constraint where the grammar does not compile is a trap: so every grammar is compiled here
before an engine sees it. Needs the extra `guided`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from dynamo.contract.requests.generation import OutputConstraint
from dynamo.errors import InvalidArgument
from dynamo.settings.extras import install_command

THINK: Final = "<think>"
END_THINK: Final = "</think>"
HEADER: Final = "%llguidance {}"  # the first line of a grammar in this form; any other is GBNF
START: Final = re.compile(r"\bstart\b")
FIELD: Final = "sampling_options.guided_decoding"
MAX_COMPLAINT_CHARS: Final = 300


def grammar_of(constraint: OutputConstraint, *, is_thinking: bool = False) -> str:
    """Return the grammar of a constraint. `is_thinking`: the prompt ends inside thoughts.

    Takes from a millisecond to seconds: not for the event loop. Raises InvalidArgument naming the member that does not
    compile.
    """
    if constraint.kind == "structural_tag":
        raise InvalidArgument(f"{FIELD}.structural_tag is set: structural tags are not built for this engine")
    grammar = _lark(constraint, is_thinking=is_thinking)
    if complaint := _complaint(grammar):
        raise _does_not_compile(constraint, complaint)
    return grammar


def _lark(constraint: OutputConstraint, *, is_thinking: bool) -> str:
    rules = ""
    match constraint.kind:
        case "json":
            schema = constraint.value
            if constraint.whitespace is not None:
                schema = schema if isinstance(schema, dict) else {"allOf": [schema]}
                schema = {**schema, "x-guidance": {"whitespace_pattern": constraint.whitespace}}
            answer = f"%json {json.dumps(schema)}"
        case "regex":
            answer = f"/{constraint.value.replace('/', chr(92) + '/')}/"
        case "choice":
            answer = " | ".join(json.dumps(text) for text in constraint.value)
        case _:
            rules = _rules_of(constraint)
            if not constraint.after_reasoning:
                return f"{HEADER}\n{rules}"
            rules, answer = START.sub("given", rules), "given"
    if not constraint.after_reasoning:
        return f"{HEADER}\nstart: {answer}"
    begin = "" if is_thinking else json.dumps(THINK)
    thoughts = "thoughts blanks" if is_thinking else "(begin thoughts blanks)?"
    return (
        f"{HEADER}\nstart: {thoughts} answer\n"
        + (f"begin: {begin}\n" if begin else "")
        + f'thoughts[suffix="{END_THINK}"]: /(?s:.*)/\nblanks: /\\n*/\nanswer: {answer}\n{rules}'
    )


def _rules_of(constraint: OutputConstraint) -> str:
    """Return the rules of a grammar, in Lark. Those of GBNF are recognised by their `::=` and translated."""
    if "::=" not in constraint.value:
        return str(constraint.value).strip().removeprefix(HEADER)
    _import_llguidance()
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(constraint.value)).removeprefix(HEADER).strip()
    except Exception as error:  # it raises whatever its parser meets
        raise _does_not_compile(constraint, str(error)) from error


def _does_not_compile(constraint: OutputConstraint, complaint: str) -> InvalidArgument:
    line = " ".join(complaint.split())
    return InvalidArgument(f"{FIELD}.{constraint.kind} cannot be compiled: {line[:MAX_COMPLAINT_CHARS]}")


def _complaint(grammar: str) -> str:
    return str(_import_llguidance().LLMatcher.validate_grammar(grammar))


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise InvalidArgument(f"{FIELD} needs the extra `guided` on the worker: {install_command('guided')}") from error
    return llguidance


def read_thought_markers(directory: Path) -> tuple[int, int] | None:
    """Return the token ids around a model's thoughts, from its `tokenizer.json`; None where these are not one token each.

    Raises InvalidArgument for a file that cannot be read.
    """
    try:
        found = json.loads((directory / "tokenizer.json").read_bytes())
        added = {entry["content"]: int(entry["id"]) for entry in found.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"{directory / 'tokenizer.json'} cannot be used: {error!r}") from error
    return (added[THINK], added[END_THINK]) if THINK in added and END_THINK in added else None


def is_thinking(prompt: Sequence[int], markers: tuple[int, int] | None) -> bool:
    """Return whether a prompt ends inside thoughts."""
    if markers is None:
        return False
    begin, end = markers
    return next((token == begin for token in reversed(prompt) if token in (begin, end)), False)
