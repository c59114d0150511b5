// Requests that have ended: how, and how long they took.

import { h } from "../dom.js";
import { RECENT, compile } from "../filter.js";
import { address, filterBox, link, shortEndpoint } from "../parts.js";
import { Table, columnsOf } from "../table.js";
import { UNKNOWN, age, duration, line, tail } from "../text.js";

const COLUMNS = columnsOf("recent", {
  id: { cell: (row) => link(address("streams", row.id), line(row.id), { class: "id" }) },
  endpoint: { text: (row) => shortEndpoint(row.endpoint) },
  why: {
    text: (row) => line(row.code ?? row.finish_reason),
    cell: (row) =>
      row.message
        ? h("span", { title: line(row.message) }, line(row.code ?? row.finish_reason))
        : line(row.code ?? row.finish_reason),
  },
  took: {
    text: (row) => duration((row.ended_ms - row.started_ms) / 1000),
    sort: (row) => row.ended_ms - row.started_ms,
  },
  worker: {
    text: (row) => (row.workers.length ? line(row.workers.at(-1)) : UNKNOWN),
    cell: (row) => (row.workers.length ? tail(line(row.workers.at(-1)), 8) : UNKNOWN),
  },
  tries: { tone: (row) => (row.attempts > 1 ? "warn" : "") },
});

let table = null;

function the(app) {
  return (table ??= new Table(app, COLUMNS, {
    label: "Requests that have ended",
    sort: app.route.query.sort ?? "-ended",
    sorted: (sort) => app.ask({ sort }),
    open: (row) => app.go(address("streams", row.id)),
  }));
}

function rowsOf(app) {
  const { matches, problem } = compile(app.route.query.filter ?? "", RECENT);
  const now = app.store.now();
  const all = app.store.list("recent");
  return { rows: all.filter((row) => matches(row, now)), problem, all };
}

export const recent = {
  id: "recent",
  label: "Recent",
  letter: "r",
  watch: ["recent"],

  draw(app) {
    const { rows, problem, all } = rowsOf(app);
    const now = app.store.now();
    const oldest = Math.min(...all.map((row) => row.ended_ms));
    return [
      h(
        "div",
        { class: "head" },
        h("h1", null, "Recent"),
        filterBox(app, {
          value: app.route.query.filter ?? "",
          problem,
          example: "outcome:failed ttft>2",
          note: `${app.listed("recent", rows.length)}${all.length ? `, the oldest ${age(oldest, now)} ago` : ""}`,
        }),
      ),
      the(app).draw(rows, now, {
        isTall: true,
        empty: all.length ? "Nothing fits the filter." : "No request has ended since the server started.",
      }),
    ];
  },

  text(app) {
    return the(app).text(rowsOf(app).rows, app.store.now());
  },
};
