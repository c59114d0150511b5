// A table of live rows: sorted, chosen by keys, and drawn only where it is on screen. On narrow screens its rows are cards.

import { h } from "./dom.js";
import { COLUMNS } from "./columns.js"; // the server makes it of the columns that `dynamo top` shows, too
import {
  UNKNOWN,
  age,
  bytes,
  clock,
  columnsText,
  count,
  duration,
  figure,
  line,
  ratio,
  sampled,
  share,
} from "./text.js";
import { state } from "./parts.js";

const ROW_PX = 30; // as in inspect.css
const SPARE_ROWS = 12; // drawn above and below what is on screen, so that scrolling shows no gap
const WIDE_PX = 110; // what a column that shares the room has at least
const CARDS = 40; // drawn at first on a narrow screen, and with each "more"
const NARROW = matchMedia("(max-width: 720px)");
const COMPACT = matchMedia("(max-width: 1560px)"); // the screen of a laptop: inspect.css sets smaller type there
const COMPACT_SHARE = 0.76; // of a column's width
const widthOf = (column) => Math.round((column.width ?? 90) * (COMPACT.matches ? COMPACT_SHARE : 1));

// How each form of a column is written.
const WRITERS = {
  name: line,
  text: line,
  names: (names) => line(names.join(", ")),
  state: line,
  clock,
  number: (value) => (value ? String(value) : UNKNOWN),
  count,
  size: count,
  bytes,
  rate: figure,
  share,
  seconds: duration,
};

/** The columns of a view; `own` has, by a column's id, what its form does not decide: {text, cell, tone, sort}. */
export function columnsOf(view, own = {}) {
  return COLUMNS[view].map((column) => ({ ...column, ...written(column), ...own[column.id] }));
}

function written({ form, of, isNumber }) {
  const [name] = of;
  if (form === "ratio") return { text: (row) => ratio(row[name], row[of[1]]), sort: (row) => row[name] };
  if (form === "age" || form === "silence")
    return { text: (row, now) => age(row[name], now), sort: (row) => (row[name] ? -row[name] : null) };
  const write = WRITERS[form];
  if (write === undefined) return {}; // one of its own
  const text = (row) => write(row[name]);
  if (form === "state") return { text, cell: (row) => state(row[name]) };
  return isNumber || form === "clock" ? { text, sort: (row) => row[name] } : { text };
}

let tables = 0;

/**
 * A column: {id, label, text(row, now), sort(row, now)?, title?, width?, isNumber?, cell(row, now)?, tone(row, now)?, isWide?, isLong?}.
 * `text` is what is shown and copied; `cell` may draw it as more than text; `isWide` columns share what room is left, and
 * `isLong` ones have a line of their own where rows are cards.
 */
export class Table {
  #app;
  #columns;
  #options;
  #id = `table${(tables += 1)}`;
  #box = null;
  #height = 600;
  #top = 0;
  #cards = CARDS;
  #rows = [];
  #now = null;
  selected = null;

  /** Options: label, rowKey(row), sort (a column's id, with a minus: from the greatest), open(row), actions(row), keys. */
  constructor(app, columns, options) {
    this.#app = app;
    this.#columns = columns;
    this.#options = { rowKey: (row) => row.id, keys: {}, ...options };
    this.sort = this.#options.sort ?? null;
  }

  get chosen() {
    return this.#rows.find((row) => this.#options.rowKey(row) === this.selected) ?? null;
  }

  #sorted(rows, now) {
    if (this.sort === null) return rows;
    const isDown = this.sort.startsWith("-");
    const column = this.#columns.find((one) => one.id === this.sort.replace(/^-/, ""));
    if (column === undefined) return rows;
    const value = column.sort ?? ((row, at) => column.text(row, at));
    const keyed = rows.map((row) => [value(row, now), row]);
    // What is not known comes last, whichever way round.
    keyed.sort(([a], [b]) =>
      isNothing(a) || isNothing(b) ? isNothing(a) - isNothing(b) : (isDown ? -1 : 1) * compare(a, b),
    );
    return keyed.map(([, row]) => row);
  }

  /** Describe the table. `empty` is shown where there are no rows. */
  draw(rows, now, { empty = "Nothing to show.", isTall = false } = {}) {
    this.#rows = this.#sorted(rows, now);
    this.#now = now;
    if (this.#rows.length === 0) return h("p", { class: "empty" }, empty);
    const isNarrow = NARROW.matches;
    const all = this.#rows.length;
    let from = 0;
    let to = all;
    if (isNarrow) to = Math.min(all, this.#cards);
    else if (isTall) {
      from = Math.max(0, Math.min(all, Math.floor(this.#top / ROW_PX)) - SPARE_ROWS);
      to = Math.min(all, Math.ceil((this.#top + this.#height) / ROW_PX) + SPARE_ROWS);
    }
    const hasActions = this.#options.actions !== undefined;
    const columns = this.#columns;
    const active = this.selected === null ? null : this.#rowId(this.selected);
    return [
      h(
        "div",
        {
          key: this.#id,
          class: `table${isTall ? " tall" : ""}`,
          tabindex: "0",
          role: "group",
          "aria-label": this.#options.label,
          "aria-activedescendant": active,
          ref: (node) => this.#mounted(node),
          onscroll: isTall ? () => this.#scrolled() : null,
          onkeydown: (event) => this.#key(event),
        },
        h(
          "table",
          {
            role: "grid",
            "aria-label": this.#options.label,
            "aria-rowcount": String(all + 1),
            css: isNarrow ? {} : { "min-width": `${this.#leastWidth()}px` },
          },
          h(
            "colgroup",
            null,
            columns.map((one) => h("col", { key: one.id, css: one.isWide ? {} : { width: `${widthOf(one)}px` } })),
            hasActions ? h("col", { css: { width: `${this.#options.actionsWidth ?? 120}px` } }) : null,
          ),
          h(
            "thead",
            null,
            h(
              "tr",
              { role: "row" },
              columns.map((one) => this.#heading(one)),
              hasActions ? h("th", { class: "actions" }, h("span", { class: "unseen" }, "actions")) : null,
            ),
          ),
          h(
            "tbody",
            null,
            from > 0
              ? h(
                  "tr",
                  { key: "above", class: "space", "aria-hidden": "true" },
                  h("td", { css: { height: `${from * ROW_PX}px` } }),
                )
              : null,
            this.#rows.slice(from, to).map((row, at) => this.#row(row, from + at)),
            to < all && !isNarrow
              ? h(
                  "tr",
                  { key: "below", class: "space", "aria-hidden": "true" },
                  h("td", { css: { height: `${(all - to) * ROW_PX}px` } }),
                )
              : null,
          ),
        ),
      ),
      isNarrow && to < all
        ? h(
            "button",
            { class: "more", onclick: () => ((this.#cards += CARDS), this.#app.draw()) },
            `Show ${Math.min(CARDS, all - to)} more of ${sampled(all)}`,
          )
        : null,
    ];
  }

  /** Below this width the table scrolls sideways: no column vanishes. */
  #leastWidth() {
    const columns = this.#columns.reduce((sum, column) => sum + (column.isWide ? WIDE_PX : widthOf(column)), 0);
    return columns + (this.#options.actions ? (this.#options.actionsWidth ?? 120) : 0);
  }

  #heading(column) {
    const way = this.sort === column.id ? "ascending" : this.sort === `-${column.id}` ? "descending" : null;
    const turn = () => {
      this.sort =
        way === null
          ? column.isNumber
            ? `-${column.id}`
            : column.id
          : way === "ascending"
            ? `-${column.id}`
            : column.id;
      this.#options.sorted?.(this.sort);
      this.#app.draw();
    };
    return h(
      "th",
      { key: column.id, class: column.isNumber ? "number" : "", scope: "col", "aria-sort": way, title: column.title },
      h(
        "button",
        { onclick: turn },
        column.label,
        h("span", { class: "way", "aria-hidden": "true" }, way === "ascending" ? "▲" : way === "descending" ? "▼" : ""),
      ),
    );
  }

  #row(row, at) {
    const key = this.#options.rowKey(row);
    const { open, actions } = this.#options;
    const isSelected = key === this.selected;
    const choose = () => {
      this.selected = key;
      if (open) open(row);
      else this.#app.draw();
    };
    return h(
      "tr",
      {
        key: `row ${key}`,
        id: this.#rowId(key),
        class: `${open ? "opens " : ""}${this.#options.rowTone?.(row) ?? ""}`,
        role: "row",
        "aria-rowindex": String(at + 2),
        "aria-selected": isSelected ? "true" : "false",
        onclick: choose,
      },
      this.#columns.map((column) => {
        const text = column.text(row, this.#now);
        const tone = column.tone?.(row, this.#now) ?? "";
        return h(
          "td",
          {
            key: column.id,
            class: `${column.isNumber ? "number " : ""}${column.isLong ? "long " : ""}${text === UNKNOWN ? "unknown " : ""}${tone}`,
            "data-label": column.label,
            title: text,
          },
          column.cell ? column.cell(row, this.#now) : text,
        );
      }),
      actions ? h("td", { class: "actions", onclick: (event) => event.stopPropagation() }, actions(row)) : null,
    );
  }

  #rowId(key) {
    return `${this.#id}-${key}`;
  }

  #mounted(node) {
    this.#box = node;
    this.#top = 0;
    new ResizeObserver(() => {
      if (node.clientHeight === this.#height || !node.isConnected) return;
      this.#height = node.clientHeight;
      this.#app.draw();
    }).observe(node);
  }

  #scrolled() {
    const moved = Math.abs(this.#box.scrollTop - this.#top) >= (SPARE_ROWS / 2) * ROW_PX;
    const isEnd =
      this.#box.scrollTop === 0 || this.#box.scrollTop + this.#box.clientHeight >= this.#box.scrollHeight - 1;
    if (!moved && !isEnd) return;
    this.#top = this.#box.scrollTop;
    this.#app.draw();
  }

  #key(event) {
    if (event.target !== this.#box || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = this.#rows.findIndex((row) => this.#options.rowKey(row) === this.selected);
    const page = Math.max(1, Math.floor(this.#height / ROW_PX) - 2);
    const goals = {
      ArrowDown: at + 1,
      j: at + 1,
      ArrowUp: Math.max(0, at - 1),
      k: Math.max(0, at - 1),
      PageDown: at + page,
      PageUp: at - page,
      Home: 0,
      End: this.#rows.length - 1,
    };
    if (event.key in goals) {
      this.#select(Math.max(0, Math.min(this.#rows.length - 1, goals[event.key])));
    } else if (at >= 0 && event.key === "Enter" && this.#options.open) {
      this.#options.open(this.#rows[at]);
    } else if (at >= 0 && event.key in this.#options.keys) {
      this.#options.keys[event.key](this.#rows[at]);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #select(at) {
    this.selected = this.#options.rowKey(this.#rows[at]);
    const isTall = this.#box.classList.contains("tall");
    if (isTall && !NARROW.matches) {
      const [above, below] = [at * ROW_PX, (at + 2) * ROW_PX]; // the heading covers one row
      if (above < this.#box.scrollTop) this.#box.scrollTop = above;
      else if (below > this.#box.scrollTop + this.#box.clientHeight)
        this.#box.scrollTop = below - this.#box.clientHeight;
      this.#top = this.#box.scrollTop;
    } else if (NARROW.matches && at >= this.#cards) this.#cards = at + CARDS;
    this.#app.draw();
    if (!isTall || NARROW.matches)
      document.getElementById(this.#rowId(this.selected))?.scrollIntoView({ block: "nearest" });
  }

  /** All rows as aligned text. */
  text(rows, now) {
    const body = this.#sorted(rows, now).map((row) => this.#columns.map((column) => column.text(row, now)));
    return columnsText(
      [this.#columns.map((column) => column.label), ...body],
      this.#columns.map((column) => column.isNumber),
    );
  }
}

function isNothing(value) {
  return value === null || value === undefined || value === "" || value === UNKNOWN;
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}
