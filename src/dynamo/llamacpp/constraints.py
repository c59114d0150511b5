"""From a constraint of the contract to a grammar that llama.cpp takes.

llama.cpp samples without any constraint where its grammar does not compile, and says so in its log alone. So a grammar is
compiled here first, by the library that llama.cpp has in it.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from dynamo.contract.requests.generation import OutputConstraint
from dynamo.errors import InvalidArgument

__all__ = ["END_THINK", "THINK", "grammar_of"]

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
        raise InvalidArgument(f"{FIELD}.structural_tag is set: structural tags are not built for llama.cpp")
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
    """Return the rules of a grammar, in Lark. llama.cpp's own form (GBNF) is told by its `::=` and translated."""
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
        raise InvalidArgument(
            f"{FIELD} needs the extra `llamacpp` on the worker: pip install 'dynamo-unified[llamacpp]'"
        ) from error
    return llguidance
