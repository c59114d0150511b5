"""The pages of the live screen, each with its key; and the keys, for the line at the foot and for the help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


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
