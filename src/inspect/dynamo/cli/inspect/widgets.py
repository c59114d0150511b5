"""Widgets that draw lines: only those that are on the screen, so that a thousand rows cost as much as forty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Final, NamedTuple

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from dynamo.cli.inspect.lines import Line, PlacedColumns, TableForm, Tone, TonedText, heading, width_of_line
from dynamo.protocol.inspector.views import Entry

HEAD_LINES: Final = 2  # of a table: its title and its column heads
WHEEL_LINES: Final = 3
MEASURED_ROWS: Final = 100  # the widths of columns are those of so many rows


class LineWidget(Widget):
    """Draws lines of pieces in the colours of the theme."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"tone--{tone.name.lower()}" for tone in Tone} | {"tone--chosen"}
    DEFAULT_CSS = """
    LineWidget {
        & > .tone--normal { color: $foreground; }
        & > .tone--dim { color: $foreground-muted; }
        & > .tone--strong { color: $foreground; text-style: bold; }
        & > .tone--good { color: $text-success; }
        & > .tone--warn { color: $text-warning; }
        & > .tone--bad { color: $text-error; text-style: bold; }
        & > .tone--accent { color: $text-primary; }
        & > .tone--chosen { background: $surface-lighten-2; }
    }
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._styles: dict[tuple[Tone, bool], Style] = {}  # of this drawing, by tone and whether the line is chosen

    def render_lines(self, crop: Region) -> list[Strip]:
        """Draw the lines that are on the screen. A style is found once for all of them: it changes with theme and focus."""
        self._styles.clear()
        return super().render_lines(crop)

    def strip_of(self, line: Line, *, is_chosen: bool = False) -> Strip:
        """Return a line as wide as the widget."""
        segments = [Segment(piece.text, self._style_of(piece.tone, is_chosen)) for piece in line]
        strip = Strip(segments, width_of_line(line))
        return strip.adjust_cell_length(self.size.width, self._style_of(Tone.NORMAL, is_chosen))

    def _style_of(self, tone: Tone, is_chosen: bool) -> Style:
        found = self._styles.get((tone, is_chosen))
        if found is None:
            own = self.get_component_rich_style(f"tone--{tone.name.lower()}")
            found = self.rich_style + Style(color=own.color, bold=own.bold)
            if is_chosen:
                found += Style(bgcolor=self.get_component_rich_style("tone--chosen").bgcolor)
            self._styles[tone, is_chosen] = found
        return found


class LinesView(LineWidget):
    """Shows lines, and scrolls where there are more than fit."""

    can_focus = False

    def __init__(
        self, make: Callable[[int], Sequence[Line]], *, id: str | None = None, classes: str | None = None
    ) -> None:
        """`make`: returns the lines for a width; it is called again at every change."""
        super().__init__(id=id, classes=classes)
        self._make = make
        self._lines: Sequence[Line] = ()
        self._first = 0

    def remake(self) -> None:
        """Show what there is now."""
        width = self.size.width or self.app.size.width
        self._lines = self._make(width)
        self._first = max(0, min(self._first, len(self._lines) - max(1, self.size.height)))
        self.refresh(layout=self.styles.height is not None and self.styles.height.is_auto)

    def scroll_lines(self, number: int) -> None:
        """Move by so many lines."""
        self._first += number
        self.remake()

    def scroll_to_line(self, is_wanted: Callable[[Line], bool]) -> None:
        """Scroll so that the first such line stands at the top, as far as that goes."""
        found = next((place for place, line in enumerate(self._lines) if is_wanted(line)), None)
        if found is not None:
            self._first = found
            self.remake()

    @property
    def page_lines(self) -> int:
        """How many lines fit."""
        return max(1, self.size.height - 1)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return how many lines there are."""
        return len(self._make(width))

    def render_line(self, y: int) -> Strip:
        """Draw one line."""
        place = self._first + y
        return self.strip_of(self._lines[place] if place < len(self._lines) else ())

    def on_resize(self) -> None:
        """Lay the lines out again."""
        self.remake()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Move with the wheel."""
        self.scroll_lines(WHEEL_LINES)
        event.stop()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Move with the wheel."""
        self.scroll_lines(-WHEEL_LINES)
        event.stop()


class _Shown(NamedTuple):
    now_ms: int
    title: str
    remark: str


class TableView(LineWidget, can_focus=True):
    """A table with a chosen row, which stays chosen while others come and go."""

    BINDINGS: ClassVar = [
        ("up,k", "move(-1)", "up"),
        ("down,j", "move(1)", "down"),
        ("pageup", "page(-1)", "page up"),
        ("pagedown,space", "page(1)", "page down"),
        ("home", "move(-1000000)", "first"),
        ("end", "move(1000000)", "last"),
        ("enter", "open", "open"),
    ]

    class Opened(Message):
        """The chosen row is to be opened."""

        def __init__(self, table: TableView) -> None:
            self.table = table
            super().__init__()

    def __init__(self, form: TableForm[Entry], id: str) -> None:
        super().__init__(id=id)
        self.form = form
        self.rows: list[Entry] = []
        self._shown = _Shown(0, "", "")
        self._chosen_id: str | None = None
        self._at = 0  # the place of the chosen row
        self._first = 0  # the row at the top
        self._longest = [0] * len(form.columns)
        self._placed: PlacedColumns[Entry] = PlacedColumns((), 0)

    @property
    def chosen(self) -> Entry | None:
        """The row under the mark."""
        return self.rows[self._at] if self.rows else None

    def show(self, rows: list[Entry], now_ms: int, title: str, remark: str = "") -> None:
        """Show these rows, which are sorted. The chosen one stays chosen; where it has gone, its neighbour is."""
        self.rows, self._shown = rows, _Shown(now_ms, title, remark)
        if self._chosen_id is not None:
            found = next((place for place, row in enumerate(rows) if row.id == self._chosen_id), None)
            self._at = self._at if found is None else found
        self._measure()
        self._move_to(self._at)
        self.refresh()

    def _measure(self) -> None:
        """Let columns grow with their texts. They never shrink again while the table is shown, or it would flicker."""
        longest = self.form.longest(self.rows[:MEASURED_ROWS], self._shown.now_ms, self._longest)
        if longest != self._longest:
            self._longest = longest
            self._placed = PlacedColumns((), 0)

    def choose(self, id: str) -> bool:
        """Choose the row of this id; whether there is one."""
        for place, row in enumerate(self.rows):
            if row.id == id:
                self._move_to(place)
                return True
        return False

    def _move_to(self, place: int) -> None:
        self._at = max(0, min(place, len(self.rows) - 1))
        self._chosen_id = self.rows[self._at].id if self.rows else self._chosen_id
        shown = self._shown_rows
        self._first = max(0, min(self._first, self._at, max(0, len(self.rows) - shown)))
        self._first = max(self._first, self._at - shown + 1)
        self.refresh()

    @property
    def _shown_rows(self) -> int:
        return max(1, self.size.height - HEAD_LINES)

    def render_line(self, y: int) -> Strip:
        """Draw one line."""
        if self._placed.width != self.size.width or not self._placed.columns:
            self._placed = self.form.at(self.size.width, self._longest)
        if y == 0:
            return self.strip_of(heading(self._shown.title, self.size.width, self._right_of_title()))
        if y == 1:
            return self.strip_of(self._placed.head())
        place = self._first + y - HEAD_LINES
        if place < len(self.rows):
            is_chosen = place == self._at and self.has_focus
            return self.strip_of(
                self._placed.row(self.rows[place], self._shown.now_ms, is_chosen=is_chosen), is_chosen=is_chosen
            )
        if y == HEAD_LINES and not self.rows:
            return self.strip_of((TonedText(f" {self.form.nothing}", Tone.DIM),))
        return self.strip_of(())

    def _right_of_title(self) -> str:
        shown = self._shown_rows
        if len(self.rows) <= shown:
            return self._shown.remark
        lines = f"{self._first + 1:,}-{min(len(self.rows), self._first + shown):,}"
        return f"{self._shown.remark}  {lines}" if self._shown.remark else lines

    # -- keys and mouse ------------------------------------------------------------------------------------------------

    def action_move(self, number: int) -> None:
        """Choose another row."""
        self._move_to(self._at + number)

    def action_page(self, number: int) -> None:
        """Choose a row a screen away."""
        self._move_to(self._at + number * self._shown_rows)

    def action_open(self) -> None:
        """Open the chosen row."""
        if self.chosen is not None:
            self.post_message(self.Opened(self))

    def on_click(self, event: events.Click) -> None:
        """Choose a row; open it with a second click."""
        place = self._first + event.y - HEAD_LINES
        if event.y >= HEAD_LINES and place < len(self.rows):
            self._move_to(place)
            if event.chain > 1:
                self.action_open()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Move with the wheel."""
        self.action_move(WHEEL_LINES)
        event.stop()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Move with the wheel."""
        self.action_move(-WHEEL_LINES)
        event.stop()

    def on_resize(self) -> None:
        """Keep the chosen row on the screen."""
        self._move_to(self._at)

    def on_focus(self) -> None:
        """Show the mark."""
        self.refresh()

    def on_blur(self) -> None:
        """Hide the mark."""
        self.refresh()
