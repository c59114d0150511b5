"""The screens of the live view: its pages with their keys, and above them text that can be scrolled, and one request.

A request is fetched again each second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from textual.app import ComposeResult
from textual.screen import Screen

from dynamo.cli.api_client import ServerError
from dynamo.cli.inspect.detail import detail_lines
from dynamo.cli.inspect.lines import Line, Tone, TonedText, flow, plain_text
from dynamo.cli.inspect.widgets import LinesView
from dynamo.protocol.inspector.views import RequestDetail

if TYPE_CHECKING:
    from dynamo.cli.inspect.app import InspectorApp

REFRESH_SECONDS: Final = 1.0
COPY_WIDTH: Final = 132


class LinesScreen(Screen[None]):
    """Lines to read, and the keys for them."""

    app: InspectorApp
    BINDINGS: ClassVar = [
        ("escape,q", "leave", "back"),
        ("up,k", "scroll(-1)", "up"),
        ("down,j", "scroll(1)", "down"),
        ("pageup", "page(-1)", "page up"),
        ("pagedown,space", "page(1)", "page down"),
        ("home", "scroll(-1000000)", "first"),
        ("end", "scroll(1000000)", "last"),
        ("y", "copy", "copy"),
    ]
    CSS = """
    LinesScreen { layout: vertical; }
    LinesScreen #lines { height: 1fr; }
    LinesScreen #foot { height: auto; dock: bottom; background: $surface; }
    """
    KEYS: ClassVar[tuple[tuple[str, str], ...]] = (("Esc", "back"), ("arrows", "scroll"), ("y", "copy"))

    def __init__(self, make: Callable[[int], Sequence[Line]]) -> None:
        """`make`: returns the lines for a width."""
        super().__init__()
        self._make_lines = make

    def compose(self) -> ComposeResult:
        """Lay the screen out."""
        yield LinesView(self.make, id="lines")
        yield LinesView(lambda width: key_lines(self.KEYS, width), id="foot")

    def make(self, width: int) -> Sequence[Line]:
        """Return the lines."""
        return self._make_lines(width)

    def action_leave(self) -> None:
        """Go back."""
        self.dismiss()

    def action_scroll(self, number: int) -> None:
        """Move by lines."""
        self.query_one("#lines", LinesView).scroll_lines(number)

    def action_page(self, number: int) -> None:
        """Move by a screen."""
        view = self.query_one("#lines", LinesView)
        view.scroll_lines(number * view.page_lines)

    def action_copy(self) -> None:
        """Copy all lines."""
        self.app.copy_lines(self.make(COPY_WIDTH))


class RequestScreen(LinesScreen):
    """One request."""

    BINDINGS: ClassVar = [("a", "abort", "abort"), ("e", "explain", "to the routing decision")]
    KEYS = (("Esc", "back"), ("arrows", "scroll"), ("e", "routing"), ("a", "abort"), ("y", "copy"))

    def __init__(self, request_id: str) -> None:
        super().__init__(self._now)
        self._request_id = request_id
        self._detail: RequestDetail | None = None
        self._problem = ""

    def on_mount(self) -> None:
        """Begin to fetch."""
        self._ask()
        self.set_interval(REFRESH_SECONDS, self._ask)

    def _ask(self) -> None:
        if not self.app.is_paused:
            self.run_worker(self._load, thread=True, exclusive=True, group="detail")

    def _load(self) -> None:
        """Fetch once, in a thread."""
        detail, problem = self._detail, ""
        try:
            detail = self.app.client.detail(self._request_id)
        except ServerError as error:
            problem = str(error)
        self.app.call_from_thread(self._take, detail, problem)

    def _take(self, detail: RequestDetail | None, problem: str) -> None:
        self._detail, self._problem = detail, problem
        if self.is_mounted:
            self.query_one("#lines", LinesView).remake()

    def _now(self, width: int) -> list[Line]:
        problem: list[Line] = [(TonedText.of(f" ! {self._problem}", Tone.BAD),)] if self._problem else []
        if self._detail is None:
            return problem or [(TonedText.of(f" asking for {self._request_id} ...", Tone.DIM),)]
        return [*problem, *detail_lines(self._detail, self.app.now_ms, width)]

    def action_abort(self) -> None:
        """Ask whether to abort it."""
        stream = self._detail.stream if self._detail else None
        if stream is None:
            self.app.tell("this request is not in flight: there is nothing to abort", "warning")
        else:
            self.app.actions.ask_to_abort(stream)

    def action_explain(self) -> None:
        """Scroll to the routing decision."""
        view = self.query_one("#lines", LinesView)
        view.scroll_to_line(lambda line: plain_text(line).startswith(" ─ Route"))


def key_lines(keys: Sequence[tuple[str, str]], width: int) -> list[Line]:
    """Return the keys of a screen for its foot."""
    parts: list[Line] = [(TonedText(key, Tone.STRONG), TonedText(f" {what}", Tone.DIM)) for key, what in keys]
    return flow(parts, width, gap=2)


# The pages of the live screen, each with its key; and the keys, for the line at the foot and for the help.


@dataclass(frozen=True, slots=True)
class Page:
    """One page: its key, and the tables on it."""

    key: str
    name: str
    tables: tuple[str, ...]
    about: str

    @property
    def filtered(self) -> str | None:
        """The table that a filter of this page is for."""
        return next((view for view in reversed(self.tables) if view in ("streams", "recent", "workers")), None)


PAGES: Final = (
    Page("o", "overview", ("workers", "streams"), "workers and requests in flight"),
    Page("w", "workers", ("workers",), "workers: state, load, queue, KV blocks, prefix hits"),
    Page("s", "streams", ("streams",), "requests in flight"),
    Page("m", "models", ("models",), "models, and why one is not ready"),
    Page("l", "residents", ("residents",), "models on demand: which are in memory, and which requests wait"),
    Page("c", "prefixes", ("caches", "prefixes"), "prefix caches: how full they are, what hits, who holds what"),
    Page("x", "errors", ("errors",), "failures, grouped"),
    Page("r", "recent", ("recent",), "requests that have ended"),
    Page("g", "routing", ("routing",), "routing decisions"),
    Page("v", "events", ("events",), "what happened: workers that came and went, actions"),
    Page("f", "frontends", ("frontends",), "processes of the frontend"),
)

HELP: Final = (
    ("arrows, PgUp, PgDn, Home, End", "choose a row (also j and k)"),
    ("Tab", "the other table of the page"),
    ("Enter", "open the row: a request with its timeline and routing, or all members of another row"),
    ("Esc", "back; out of a filter"),
    ("/", "filter, as in: model:demo age>30 stalled !key:batch"),
    (",", "sort by something else"),
    (":", "go to a page, a request or a worker by its name"),
    ("a", "abort the request (asks for a reason and for the end of its id)"),
    ("d", "drain the worker, or take it back from a drain or a quarantine (likewise)"),
    ("Q", "quarantine the worker for a minute, or take it back (likewise)"),
    ("e", "explain: why this request went where it went; on other rows: where a prompt would go"),
    ("y", "copy what is shown as text (through the terminal, also over SSH, where it allows that)"),
    ("t", "light or dark"),
    ("p", "pause: the picture stands still"),
    ("?", "this help"),
    ("q", "quit"),
)


def page_named(word: str) -> Page | None:
    """Return the page of this key or name, or whose name begins so."""
    exact = [page for page in PAGES if word in (page.key, page.name)]
    found = exact or [page for page in PAGES if word and page.name.startswith(word)]
    return found[0] if found else None
