"""Calls that a model writes into its reasoning, because it forgot to end it.

A model also talks about its tags, so only a complete call of a known tool counts; all other text stays reasoning, to the
letter. A call is told when it is whole.
"""

from __future__ import annotations

from dynamo.text.formats.output import Output
from dynamo.text.formats.scanner import NotACall
from dynamo.text.output import Reasoning

__all__ = ["ReasonedCalls"]


class ReasonedCalls(Output):
    """The events of reasoning that may hold calls."""

    __slots__ = ("_known", "_name")

    def __init__(self, known: frozenset[str]) -> None:
        super().__init__()
        self._known = known
        self._name = ""

    def flowing(self, emit: object) -> type[Reasoning]:
        return Reasoning

    def content(self, text: str) -> None:
        if text:
            self._add(Reasoning(text))

    def begin(self, name: str, call_id: str | None = None) -> None:
        if name not in self._known:
            raise NotACall
        if not self.is_holding:
            self.hold()
        super().begin(name, call_id)

    def end(self) -> None:
        super().end()
        self._is_flowing = True  # line breaks are reasoning like any other
        self.release()

    def drop(self, raw: str, *, is_cut: bool) -> None:
        self.has_all_arguments = False
        super().drop(raw, is_cut=is_cut)
