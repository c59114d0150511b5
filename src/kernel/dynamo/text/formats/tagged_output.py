"""The events of an answer whose reasoning stands between tags, and may hold calls.

Models forget to end their reasoning and call. They also talk about their tags, so in reasoning only a complete call of a
known tool counts, and is emitted when it is whole; all other text stays reasoning, to the letter.
"""

from __future__ import annotations

from dynamo.text.formats.output import Output
from dynamo.text.formats.scanner import NotACall

__all__ = ["TaggedOutput"]


class TaggedOutput(Output):
    """Events of one choice; `is_reasoning` while the text at hand stands between tags."""

    __slots__ = ("_known", "has_content")

    def __init__(self, known: frozenset[str]) -> None:
        """`known`: the names of the request's tools."""
        super().__init__()
        self._known = known
        self.has_content = False  # text or a call outside of reasoning has come

    @property
    def is_cut(self) -> bool:
        """Whether a call that ends here counts only with its closing marks: always so in reasoning."""
        return self.is_reasoning or super().is_cut

    def content(self, text: str) -> None:
        if text:
            self.has_content = True
        super().content(text)

    def begin(self, name: str, call_id: str | None = None) -> None:
        if not self.is_reasoning:
            self.has_content = True
        elif name not in self._known:
            raise NotACall
        elif not self.is_holding:
            self.hold()
        super().begin(name, call_id)

    def end(self) -> None:
        if not self.is_reasoning:
            super().end()
            return
        around = (
            self._gap,
            self._is_flowing,
            self._has_called,
        )  # of the content, which a call in reasoning is no part of
        super().end()
        self._gap, self._is_flowing, self._has_called = around
        self.release()

    def drop(self, raw: str, *, is_cut: bool) -> None:
        if not self.is_reasoning:
            super().drop(raw, is_cut=is_cut)
            return
        if self.is_holding:
            self._take_back()
        self.name, self.has_all_arguments, self.is_open = None, False, False
        self.reasoning(raw)
