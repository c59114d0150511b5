// Every request in flight: what it does, since when, how fast, and whether it is stuck.

import { abort, abortButton } from "../actions.js";
import { h } from "../dom.js";
import { STREAMS, compile } from "../filter.js";
import { address, filterBox, link, shortEndpoint, state } from "../parts.js";
import { Table, columnsOf } from "../table.js";
import { UNKNOWN, age, count, line, sampled, tail } from "../text.js";
import { drawRequest, requestText } from "./request.js";

const COLUMNS = columnsOf("streams", {
  id: { cell: (row) => link(address("streams", row.id), line(row.id), { class: "id" }) },
  endpoint: { text: (row) => shortEndpoint(row.endpoint) },
  phase: {
    text: (row) => `${line(row.phase)}${row.is_stalled ? " STALLED" : ""}`,
    tone: (row) => (row.is_stalled ? "bad" : ""),
    cell: (row) =>
      row.is_stalled
        ? [line(row.phase), " ", h("b", { class: "stalled" }, "STALLED")]
        : row.phase === "client slow"
          ? state(row.phase)
          : line(row.phase),
  },
  last: { tone: (row) => (row.is_stalled ? "bad" : "") },
  worker: {
    text: (row) => (row.workers.length ? line(row.workers.at(-1)) : UNKNOWN),
    cell: (row) =>
      row.workers.length
        ? link(address("workers", row.workers.at(-1)), tail(line(row.workers.at(-1)), 8), { class: "id" })
        : UNKNOWN,
  },
  attempt: { tone: (row) => (row.attempt > 1 ? "warn" : "") },
});

let table = null;
let isFiltered = false; // by the server

function the(app) {
  if (table === null) {
    table = new Table(app, COLUMNS, {
      label: "Streams",
      sort: app.route.query.sort ?? "-age",
      sorted: (sort) => app.ask({ sort }),
      open: (row) => app.go(address("streams", row.id)),
      rowTone: (row) => (row.is_stalled ? "is-stalled" : ""),
      keys: { a: (row) => abort(app, row.id) },
      actionsWidth: 76,
      actions: (row) => abortButton(app, row.id, "small"),
    });
  }
  return table;
}

function rowsOf(app) {
  const { matches, problem } = compile(app.route.query.filter ?? "", STREAMS);
  const now = app.store.now();
  const all = app.store.list("streams");
  return { rows: all.filter((row) => matches(row, now)), problem, all };
}

const isSampled = (app) => (app.store.total("streams") ?? 0) > app.store.list("streams").length;

export const streams = {
  id: "streams",
  label: "Streams",
  letter: "s",
  watch: (app) => (app.route.id === null ? [] : ["recent"]), // the one that is shown may end

  count: (app) => app.countOf("streams"),
  tone: (app) => (app.store.list("streams").some((stream) => stream.is_stalled) ? "bad" : ""),
  keys: [
    ["↑ ↓ or j k", "choose a stream"],
    ["Enter", "open it"],
    ["a", "abort it"],
    ["Home End PgUp PgDn", "far"],
  ],

  serverFilter(app) {
    const filter = app.route.id === null ? app.route.query.filter : null;
    // Once asked, the server goes on filtering until the box is empty: what it sends then is less, but not all there is.
    isFiltered = Boolean(filter) && (isFiltered || isSampled(app));
    return isFiltered && compile(filter, STREAMS).problem === null ? filter : null;
  },

  draw(app) {
    if (app.route.id !== null) return drawRequest(app, app.route.id);
    const { rows, problem, all } = rowsOf(app);
    const stalled = rows.filter((row) => row.is_stalled).length;
    const total = app.store.total("streams");
    const note = `${sampled(rows.length, Math.max(total ?? 0, all.length))}${stalled ? `, ${count(stalled)} stalled` : ""}`;
    return [
      h(
        "div",
        { class: "head" },
        h("h1", null, "Streams"),
        filterBox(app, { value: app.route.query.filter ?? "", problem, example: "model:demo age>30 stalled", note }),
      ),
      the(app).draw(rows, app.store.now(), {
        isTall: true,
        empty: all.length ? "No stream fits the filter." : "Nothing is in flight.",
      }),
    ];
  },

  text(app) {
    return app.route.id === null ? the(app).text(rowsOf(app).rows, app.store.now()) : requestText(app, app.route.id);
  },
};
