"""The live screen of `dynamo top`."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from textual.app import App, ComposeResult
from textual.message import Message
from textual.notifications import SeverityLevel

from dynamo.cli.inspect.actions import ServerActions
from dynamo.cli.inspect.client import InspectorClient, PictureWatch, ViewQuery, WatchState
from dynamo.cli.inspect.detail import record_lines
from dynamo.cli.inspect.dialogs import TextDialog
from dynamo.cli.inspect.figures import age
from dynamo.cli.inspect.lines import Line, Tone, TonedText, flow, heading, plain_text
from dynamo.cli.inspect.overview import picture_notes, section_title, summary_lines
from dynamo.cli.inspect.plain import picture_lines
from dynamo.cli.inspect.printable import printable
from dynamo.cli.inspect.screens import HELP, PAGES, LinesScreen, Page, RequestScreen, key_lines, page_named
from dynamo.cli.inspect.tables import FORMS
from dynamo.cli.inspect.widgets import LinesView, TableView
from dynamo.protocol.inspector.filters import Filter, FilterError, parse_filter
from dynamo.protocol.inspector.views import Entry, FleetView, StreamView, WorkerView

MOST_ROWS: Final = 1000  # of a view; the title has of how many
STALE_SECONDS: Final = 5.0  # a watch brings a patch each second while anything moves
TICK_SECONDS: Final = 1.0

_FOOT: Final = (
    ("Enter", "open"), ("a", "abort"), ("e", "explain"), ("d Q", "drain, quarantine"), ("/", "filter"), (",", "sort"),
    ("o w s m l c x r g v f", "pages"), (":", "go to"), ("y", "copy"), ("?", "help"), ("q", "quit"),
)  # fmt: skip


class InspectorApp(App[int]):
    """Shows a picture that a watch keeps current, on one page at a time."""

    TITLE = "dynamo top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; layers: base; }
    #summary { height: auto; }
    #foot { height: auto; dock: bottom; background: $surface; }
    TableView { height: 1fr; display: none; }
    TableView.shown { display: block; }
    """
    BINDINGS: ClassVar = [
        *((page.key, f"page('{page.name}')", page.name) for page in PAGES),
        ("q", "quit", "quit"),
        ("slash", "filter", "filter"),
        ("escape", "unfilter", "no filter"),
        ("comma", "sort", "sort"),
        ("colon", "go_to", "go to"),
        ("a", "abort", "abort"),
        ("d", "drain", "drain"),
        ("Q", "quarantine", "quarantine"),
        ("e", "explain", "explain"),
        ("y", "copy", "copy"),
        ("t", "theme", "light or dark"),
        ("p", "pause", "pause"),
        ("question_mark", "help", "help"),
    ]

    @dataclass
    class Changed(Message):
        """A watch has something new."""

        watch: PictureWatch
        state: WatchState

    def __init__(self, client: InspectorClient, *, view: str = "", filter: str = "", limit: int = MOST_ROWS) -> None:
        """`view`: the page to begin with. Raises FilterError."""
        super().__init__()
        self.client = client
        self.is_paused = False
        self._limit = limit
        self._state = WatchState()
        self._watch: PictureWatch | None = None
        self._page: Page = page_named(view) or PAGES[0]
        self._page_filters: dict[str, Filter] = {self._page.name: parse_filter(filter)}
        self._orders: dict[str, int] = {}

    @property
    def actions(self) -> ServerActions:
        """What can be done on the server."""
        return ServerActions(self)

    def compose(self) -> ComposeResult:
        """Lay the screen out."""
        yield LinesView(self._summary, id="summary")
        for view, form in FORMS.items():
            yield TableView(form, id=view)
        yield LinesView(lambda width: key_lines(_FOOT, width), id="foot")

    def on_mount(self) -> None:
        """Begin."""
        self.set_interval(TICK_SECONDS, self._redraw)
        self._turn_to(self._page)

    def on_unmount(self) -> None:
        """End the watch."""
        if self._watch is not None:
            self._watch.stop()

    # -- the picture ---------------------------------------------------------------------------------------------------

    @property
    def fleet(self) -> FleetView | None:
        """The whole system, once it is known."""
        return self._state.picture.fleet if self._state.picture else None

    @property
    def now_ms(self) -> int:
        """The server's time, as far as it is known."""
        return self._state.now_ms(time.monotonic())

    def _begin_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        query = ViewQuery(("fleet", *self._page.tables), self._limit, self._filter.text)
        watch = PictureWatch(self.client, query, lambda state: self._on_watch(watch, state), first=self._state)
        self._watch = watch
        threading.Thread(target=watch.run, name="watch", daemon=True).start()  # `stop` ends it

    def _on_watch(self, watch: PictureWatch, state: WatchState) -> None:
        self.post_message(self.Changed(watch, state))  # from the thread of the watch

    def on_inspector_app_changed(self, message: Changed) -> None:
        """Show the new picture, unless another one was requested since."""
        if message.watch is self._watch and not self.is_paused:
            self._state = message.state
            self._redraw()

    def _redraw(self) -> None:
        base = self.screen_stack[0] if self.screen_stack else None
        if base is None or not base.query("#summary"):
            return  # the app is closing, and its widgets have gone
        base.query_one("#summary", LinesView).remake()
        picture, now = self._state.picture, self.now_ms
        for view in self._page.tables:
            table = base.query_one(f"#{view}", TableView)
            order, key = FORMS[view].orders[self._orders.get(view, 0)]
            rows = sorted(self._rows(view), key=key)
            title = FORMS[view].title if picture is None else section_title(picture, view, FORMS[view].title)
            if self._is_filtered(view):
                title += f", {len(rows):,} shown"
            table.show(rows, now, title, self._remark(view, order))
        if len(self._page.tables) > 1:
            upper = base.query_one(f"#{self._page.tables[0]}", TableView)
            upper.styles.height = min(len(upper.rows) + 2, max(4, int(self.size.height * 0.4)))

    def _rows(self, view: str) -> list[Entry]:
        entries = (getattr(self._state.picture, view) or []) if self._state.picture else []
        if self._is_filtered(view):
            now = self.now_ms
            return [entry for entry in entries if self._filter.matches(entry, now)]
        return list(entries)

    def _is_filtered(self, view: str) -> bool:
        return bool(self._filter.terms) and view == self._page.filtered

    @property
    def _filter(self) -> Filter:
        return self._page_filters.get(self._page.name) or parse_filter("")

    def _remark(self, view: str, order: str) -> str:
        remark = f"by {order}" if self._orders.get(view, 0) else ""
        if self._is_filtered(view):
            remark = f"/ {self._filter.text}" + (f"  {remark}" if remark else "")
        return remark

    def _summary(self, width: int) -> list[Line]:
        notes = flow([(piece,) for piece in _notes(self._state, is_paused=self.is_paused)], width, gap=2)
        if self._state.picture is None:
            return notes or [(TonedText.of(f" asking {self.client.url} ...", Tone.DIM),)]
        picture = self._state.picture
        return [*summary_lines(picture, self.now_ms, width), *picture_notes(picture, width), *notes]

    # -- pages ---------------------------------------------------------------------------------------------------------

    def _turn_to(self, page: Page) -> None:
        self._page = page
        base = self.screen_stack[0]
        for view in FORMS:
            table = base.query_one(f"#{view}", TableView)
            table.set_class(view in page.tables, "shown")
            table.styles.height = "1fr"
        self._begin_watch()
        self._redraw()
        base.query_one(f"#{page.tables[-1]}", TableView).focus()

    def action_page(self, name: str) -> None:
        """Turn to a page."""
        page = page_named(name)
        if page is not None:
            self._turn_to(page)

    def action_sort(self) -> None:
        """Sort the table by the next of its orders."""
        table = self._table()
        self._orders[table.form.view] = (self._orders.get(table.form.view, 0) + 1) % len(table.form.orders)
        self._redraw()
        self.tell(f"{table.form.title}: by {table.form.orders[self._orders[table.form.view]][0]}")

    def action_theme(self) -> None:
        """Change between light and dark."""
        self.theme = "textual-light" if self.current_theme.dark else "textual-dark"

    def action_pause(self) -> None:
        """Stand still, or go on."""
        self.is_paused = not self.is_paused
        if not self.is_paused:
            self._begin_watch()
        self._redraw()

    def action_help(self) -> None:
        """Show all keys."""
        self.push_screen(LinesScreen(_help_lines))

    def _table(self) -> TableView:
        focused = self.screen_stack[0].focused
        if isinstance(focused, TableView):
            return focused
        return self.screen_stack[0].query_one(f"#{self._page.tables[-1]}", TableView)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def on_table_view_opened(self, message: TableView.Opened) -> None:
        """Open a row: a request as its own screen, everything else with all its members."""
        row = message.table.chosen
        if row is None:
            return
        request_id = _request_of(row)
        if request_id is not None:
            self.push_screen(RequestScreen(request_id))
            return
        title = f"{type(row).__name__.removesuffix('View')} {row.id}"
        self.push_screen(LinesScreen(lambda width: record_lines(title, row, self.now_ms, width)))

    def action_explain(self) -> None:
        """Show why the request went where it went, or read a prompt and show where it would go."""
        row = self._table().chosen
        if isinstance(row, StreamView):
            self.push_screen(RequestScreen(row.id))
            return
        model = _model_of(row)
        if model is None:
            self.tell("choose a row with a model", "warning")
            return
        self.actions.ask_where(model)

    def action_filter(self) -> None:
        """Read a filter of this page."""
        if self._page.filtered is None:
            self.tell("only workers, streams and recent requests can be filtered", "warning")
            return
        dialog = TextDialog(f"Filter {self._page.filtered}", self._filter.text, _filter_problem)
        self.push_screen(dialog, self._set_filter)

    def _set_filter(self, text: str | None) -> None:
        if text is not None and text != self._filter.text:
            self._page_filters[self._page.name] = parse_filter(text)
            self._begin_watch()
            self._redraw()

    def action_unfilter(self) -> None:
        """Take the filter away."""
        self._set_filter("")

    def action_go_to(self) -> None:
        """Read a name to go to."""
        self.push_screen(TextDialog("Go to a page, a request or a worker", "", _go_to_problem), self._go_to)

    def _go_to(self, word: str | None) -> None:
        if not word:
            return
        page = page_named(word)
        if page is not None:
            self._turn_to(page)
            return
        picture = self._state.picture
        for view in self._page.tables:
            found = [row for row in (getattr(picture, view) or () if picture else ()) if word in row.id]
            if len(found) == 1:
                table = self.screen_stack[0].query_one(f"#{view}", TableView)
                table.choose(found[0].id)
                table.focus()
                return
        self.push_screen(RequestScreen(word))  # it may have ended, or be beyond the limit of the list

    # -- actions -------------------------------------------------------------------------------------------------------

    def action_abort(self) -> None:
        """Confirm, then abort the chosen request."""
        row = self._table().chosen
        if isinstance(row, StreamView):
            self.actions.ask_to_abort(row)
        else:
            self.tell("choose a request in flight", "warning")

    def action_drain(self) -> None:
        """Confirm, then drain the chosen worker, or take that back."""
        row = self._table().chosen
        if not isinstance(row, WorkerView):
            self.tell("choose a worker", "warning")
        else:
            self.actions.ask_to_drain(row)

    def action_quarantine(self) -> None:
        """Confirm, then quarantine the chosen worker, or take that back."""
        row = self._table().chosen
        if not isinstance(row, WorkerView):
            self.tell("choose a worker", "warning")
        else:
            self.actions.ask_to_quarantine(row)

    # -- text ----------------------------------------------------------------------------------------------------------

    def tell(self, text: str, severity: SeverityLevel = "information") -> None:
        """Show a line for some seconds; `text` may hold what came from elsewhere."""
        self.notify(printable(text), severity=severity, markup=False)

    def action_copy(self) -> None:
        """Copy the page."""
        if self._state.picture is None:
            self.tell("there is nothing to copy yet", "warning")
            return
        self.copy_lines(picture_lines(self._state.picture, self._page.tables, None))

    def copy_lines(self, lines: Sequence[Line]) -> None:
        """Copy lines as text, by way of the terminal."""
        self.copy_to_clipboard("\n".join(map(plain_text, lines)) + "\n")
        self.tell(f"copied {len(lines)} lines")


def _notes(state: WatchState, *, is_paused: bool) -> list[TonedText]:
    """Return what is to be known of the picture itself: that it is old, and why."""
    now = time.monotonic()
    found = []
    old = age(now - state.received_at) if state.picture is not None else ""
    if state.problem is not None:
        wait = max(0.0, state.retry_at - now)
        found.append(TonedText.of(f"! {state.problem}", Tone.BAD))
        shown = f"stale: the picture is {old} old; " if old else ""
        found.append(TonedText(f"{shown}trying again in {wait:.0f}s", Tone.WARN))
    elif is_paused:
        found.append(TonedText(f"PAUSED: the picture is {old or '-'} old; p goes on", Tone.WARN))
    elif state.picture is not None and now - state.received_at > STALE_SECONDS:
        found.append(TonedText(f"unchanged for {old}", Tone.DIM))
    return found


def _help_lines(width: int) -> list[Line]:
    found: list[Line] = [heading("Keys", width)]
    found += [(TonedText(f" {keys:30}", Tone.STRONG), TonedText(what)) for keys, what in HELP]
    found += [(), heading("Pages", width)]
    found += [(TonedText(f" {page.key:3}{page.name:12}", Tone.STRONG), TonedText(page.about)) for page in PAGES]
    return found


def _filter_problem(text: str) -> str | None:
    try:
        parse_filter(text)
    except FilterError as error:
        return str(error)
    return None


def _go_to_problem(text: str) -> str | None:
    return None if text else "type the name of a page, or a part of an id"


def _request_of(row: Entry) -> str | None:
    """Return the request that a row is about: itself, or of a decision or a group of errors its own."""
    if hasattr(row, "endpoint"):
        return str(row.id)
    found: str | None = getattr(row, "example", None) or getattr(row, "request_id", None)
    return found


def _model_of(row: Entry | None) -> str | None:
    if isinstance(row, WorkerView):
        return row.models[0] if row.models else None
    found: str | None = getattr(row, "name", None) or getattr(row, "model", None)
    return found
