"""An answer of text, reasoning between tags, and calls: the grammar that all formats but the unified ones are read by.

    I look first. <think>2 and 2 is 4</think> It is 4. <tool_call>...</tool_call>

Tags of reasoning:

- Text before the opening tag is content; so is all text when no tag comes. Every further pair of tags is reasoning too.
- A closing tag without an opening one is removed. An opening tag inside reasoning is reasoning text.
- Reasoning that is never closed is reasoning to the end.
- Line breaks that touch a tag are no reasoning, and none of the content's beginning. All other white space is kept.
- Marks that frame the text of the answer (`<response>...</response>`) are removed, and the line breaks that touch them.
- A model whose prompt ends in the opening tag (or that was trained as if it did) begins inside: the tag may still come
  first, and is removed.

Tags count outside of calls only: in the arguments of a call they are data. That holds for calls in reasoning, too. What
begins like a call there and is none is reasoning up to the closing tag in it, and is read again from that tag on.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from msgspec import Struct

from dynamo.text.formats.call_form import CallForm
from dynamo.text.formats.output import Output
from dynamo.text.formats.scanner import MAX_CALL_CHARACTERS, NotACall, Scanner, Step, TextMachine
from dynamo.text.formats.tool_set import NO_TOOLS, ToolSet
from dynamo.text.markers import LINE_BREAKS, MAX_SEPARATOR, WHITE_SPACE, Found, MarkerSearch
from dynamo.text.output import Content, Idle, Reasoning

# The events of an answer whose reasoning stands between tags, and may hold calls.
#
# Models forget to end their reasoning and call. They also talk about their tags, so in reasoning only a complete call of a
# known tool counts, and is emitted when it is whole; all other text stays reasoning, to the letter.


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


MAX_REREAD: Final = 4 * MAX_CALL_CHARACTERS
"""Characters of one answer that are read twice, behind closing tags in what only began like a call."""

ContentStart: TypeAlias = Callable[[Scanner], Step[bool]]
"""Reads what may stand at the content's beginning. Returns whether calls are searched behind it."""


class ReasoningTags(Struct, frozen=True):
    """The tags around the reasoning of one answer. Where there are several of a kind, any of them will do."""

    openings: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    begins_inside: bool = False  # the prompt has begun the reasoning
    json_is_content: bool = False  # an answer that begins as JSON does not reason, although the prompt has begun it
    prepended: str = ""  # text in front of an answer that is not empty
    frame: tuple[str, ...] = ()  # marks around the text of the answer


_NO_TAGS: Final = ReasoningTags()


class _Searches(NamedTuple):
    """What is searched, by where reading is."""

    at_beginning: MarkerSearch
    outside: MarkerSearch
    inside: MarkerSearch
    closings: MarkerSearch
    among_noise: MarkerSearch  # what may begin in a run of one-character marks


@functools.cache  # as many as there are pairs of formats
def _searches(
    openings: tuple[str, ...],
    closings: tuple[str, ...],
    frame: tuple[str, ...],
    calls: tuple[str, ...],
    calls_inside: tuple[str, ...],
) -> _Searches:
    tags = openings + closings + frame
    return _Searches(
        MarkerSearch(*tags, *calls, takes_line_breaks=bool(tags)),
        MarkerSearch(*tags, *calls, takes_line_breaks=bool(frame)),
        MarkerSearch(*closings, *calls_inside, takes_line_breaks=True),
        MarkerSearch(*closings, takes_line_breaks=True),
        MarkerSearch(*(mark for mark in (*tags, *calls) if len(mark) > 1)),
    )


class TaggedAnswer:
    """Reads one answer; `grammar` is to be run once."""

    __slots__ = ("_form", "_frame", "_left", "_out", "_searches", "_start", "_tags", "_tools")

    def __init__(
        self,
        out: TaggedOutput,
        form: CallForm | None,
        tools: ToolSet,
        tags: ReasoningTags,
        start: ContentStart | None = None,
    ) -> None:
        """`form`: how the model writes calls; None: they are not read. `start`: what is read before anything else is."""
        self._out, self._form, self._tools, self._tags = out, form, tools, tags
        self._frame = tags.frame if form is None else (*tags.frame, *form.frame)
        if start is None and form is not None and form.is_whole_answer:
            start = self._whole_answer
        self._start = start
        out.is_reasoning = tags.begins_inside
        self._left = MAX_REREAD
        self._look_for_calls(form)

    def _look_for_calls(self, form: CallForm | None) -> None:
        """Search for calls of this form from here on, or for none; in reasoning for those that the model may mean."""
        calls = () if form is None else (*form.starts, *form.stray)
        inside: tuple[str, ...] = ()
        if self._form is not None and self._form.may_stand_in_reasoning and self._tools.names:
            inside = (*self._form.starts, *self._form.stray)
        self._searches = _searches(self._tags.openings, self._tags.closings, self._frame, calls, inside)

    def grammar(self, s: Scanner) -> Step[None]:
        """Read the whole answer."""
        if self._tags.prepended and (yield from s.peek()):
            self._out.content(self._tags.prepended)
        if self._tags.begins_inside:
            yield from self._begin(s)
        if self._start is not None:
            yield from self._read(s, to_content=True)
            if not (yield from self._start(s)):
                self._look_for_calls(None)
        yield from self._read(s)

    def _whole_answer(self, s: Scanner) -> Step[bool]:
        assert self._form is not None
        yield from self._form.whole_answer(s, self._tools)
        return True

    def _begin(self, s: Scanner) -> Step[None]:
        """Read the opening tag that a model writes although its prompt ended in it."""
        while True:
            stripped = s.text[s.at :].lstrip(WHITE_SPACE)
            space = len(s.text) - s.at - len(stripped)
            if space > MAX_SEPARATOR:
                break
            if stripped and self._tags.json_is_content and stripped[0] in "{[":
                self._out.is_reasoning = False
                s.take(s.at + space)
                return
            if (opening := next(filter(stripped.startswith, self._tags.openings), None)) is not None:
                s.take(s.at + space + len(opening))
                break
            if s.is_ended or not any(opening.startswith(stripped) for opening in self._tags.openings):
                break
            yield
        yield from self._line_breaks(s)

    def _read(self, s: Scanner, *, to_content: bool = False) -> Step[None]:
        """Read to the end; or `to_content`, to what is neither reasoning nor white space in front of it."""
        out, tags, form = self._out, self._tags, self._form
        while True:
            is_content = to_content and not out.is_reasoning
            if is_content and not (yield from s.comes(0, *tags.openings, *tags.closings, *self._frame)):
                return
            mark = yield from self._text(s)
            if mark is None:
                return
            if mark in tags.openings or mark in tags.closings or mark in self._frame:
                yield from self._tag(s, mark)
            elif form is None or mark in form.stray:
                s.take(s.at + len(mark))
            else:
                yield from s.attempt(form.calls(s, mark, self._tools), goes_on=self._goes_on)

    def _text(self, s: Scanner) -> Step[str | None]:
        """Emit text up to the next mark, which is returned and not read; None at the end of the text.

        Line breaks that are a tag's own are not read either.
        """
        out, tags, form = self._out, self._tags, self._form
        is_inside = out.is_reasoning
        noise = form.noise if form is not None and not is_inside else None
        while True:
            is_beginning = not is_inside and not out.has_content
            at_beginning, outside, inside = self._searches[:3]
            search = inside if is_inside else at_beginning if is_beginning else outside
            start, end, mark = search.search(s.text, s.at)
            if noise is not None and mark is not None and len(mark) == 1:
                start, end, mark = self._behind_noise(s, search, noise, end - len(mark))
            if mark is None:
                if s.is_ended:
                    start = end if is_inside else s.before_cut_mark(start, end)
            elif mark not in (tags.closings if is_inside else tags.openings if is_beginning else ()) + self._frame:
                start = end - len(mark)
            if start > s.at:
                text = s.take(start)
                if is_inside:
                    out.reasoning(text)
                else:
                    out.content(text)
                    if is_beginning:  # line breaks in front of a tag are no longer at the content's beginning
                        continue
            if mark is not None:
                return mark
            if s.is_ended:
                return None
            if start == end and (is_inside or out.is_flowing):
                s.idle = Idle(search.stops, Reasoning if is_inside else Content)
            yield
            s.idle = None

    def _behind_noise(self, s: Scanner, search: MarkerSearch, noise: re.Pattern[str], at: int) -> Found:
        """Return the first mark behind the noise at `at`, if it is that, else the mark at `at`."""
        assert self._form is not None
        among = self._searches.among_noise
        is_alone = among.first_chars.isdisjoint(self._form.starts)
        while (run := noise.match(s.text, at)) is not None:
            if not is_alone:
                start, end, mark = among.search(s.text[at : run.end() + among.longest])
                if at + start < run.end():
                    return Found(at + start, at + end, mark)
            found = search.search(s.text, run.end())
            if found.mark is None or len(found.mark) > 1:
                return found
            at = found.end - 1
        found = search.search(s.text, at)
        if found.end == len(s.text) and not s.is_ended:
            return Found(at, found.end, None)  # it depends on the next character
        return found

    def _tag(self, s: Scanner, tag: str) -> Step[None]:
        """Read a tag and the line breaks that touch it."""
        out = self._out
        was_inside = out.is_reasoning
        s.take(s.text.index(tag, s.at) + len(tag))
        if was_inside or tag in self._tags.openings:
            out.is_reasoning = not was_inside
        if tag in self._frame or ((was_inside or tag in self._tags.openings) and not (was_inside and out.has_content)):
            yield from self._line_breaks(s)
        form = self._form
        if (
            was_inside
            and form is not None
            and form.behind_reasoning
            and (yield from s.comes(0, *form.behind_reasoning))
        ):
            yield from s.attempt(form.calls(s, "", self._tools))

    def _line_breaks(self, s: Scanner) -> Step[None]:
        while True:
            end = s.at
            while end < len(s.text) and s.text[end] in LINE_BREAKS:
                end += 1
            s.take(end)
            if end < len(s.text) or s.is_ended:
                return
            yield

    def _goes_on(self, raw: str) -> int:
        """Return where reading goes on in what began like a call: in reasoning at the closing tag."""
        if not self._out.is_reasoning:
            return len(raw)
        start = self._searches.closings.search(raw, 1).start
        self._left -= len(raw) - start
        return start if self._left >= 0 else len(raw)


def tagged_machine(
    form: CallForm | None,
    tools: ToolSet = NO_TOOLS,
    tags: ReasoningTags | None = None,
    start: ContentStart | None = None,
    *,
    keeps_cut_call: bool = True,
) -> TextMachine:
    """Make the parser of one choice; see `TaggedAnswer`.

    `keeps_cut_call`: with `start`, which then reads a forced choice, what there is of a call that was cut off is kept.
    """
    out = TaggedOutput(tools.names)
    out.keeps_cut_call = keeps_cut_call and start is not None
    return TextMachine(TaggedAnswer(out, form, tools, _NO_TAGS if tags is None else tags, start).grammar, out)
