// Requests that have ended: how, and how long they took.

import { h } from "../dom.js";
import { RECENT, compile } from "../filter.js";
import { address, filterBox, link, shortEndpoint, state } from "../parts.js";
import { Table } from "../table.js";
import { UNKNOWN, age, clock, count, duration, line, ratio, tail } from "../text.js";

const COLUMNS = [
  { id: "ended", label: "Ended", width: 85, text: (row) => clock(row.ended_ms), sort: (row) => row.ended_ms },
  {
    id: "id",
    label: "Request",
    width: 165,
    isLong: true,
    text: (row) => line(row.id),
    cell: (row) => link(address("streams", row.id), line(row.id), { class: "id" }),
  },
  { id: "key", label: "Key", width: 92, text: (row) => line(row.key) },
  { id: "model", label: "Model", isWide: true, isLong: true, text: (row) => line(row.model) },
  { id: "endpoint", label: "Endpoint", width: 90, text: (row) => shortEndpoint(row.endpoint) },
  { id: "outcome", label: "Outcome", width: 95, text: (row) => line(row.outcome), cell: (row) => state(row.outcome) },
  {
    id: "status",
    label: "Status",
    isNumber: true,
    width: 70,
    text: (row) => (row.status ? String(row.status) : UNKNOWN),
    sort: (row) => row.status,
  },
  {
    id: "why",
    label: "Finish or code",
    width: 125,
    text: (row) => line(row.code ?? row.finish_reason),
    cell: (row) =>
      row.message
        ? h("span", { title: line(row.message) }, line(row.code ?? row.finish_reason))
        : line(row.code ?? row.finish_reason),
  },
  {
    id: "took",
    label: "Took",
    isNumber: true,
    width: 80,
    text: (row) => duration((row.ended_ms - row.started_ms) / 1000),
    sort: (row) => row.ended_ms - row.started_ms,
  },
  {
    id: "wait",
    label: "Wait",
    isNumber: true,
    width: 75,
    text: (row) => duration(row.queued_seconds),
    sort: (row) => row.queued_seconds,
  },
  {
    id: "ttft",
    label: "TTFT",
    isNumber: true,
    width: 75,
    text: (row) => duration(row.ttft_seconds),
    sort: (row) => row.ttft_seconds,
  },
  {
    id: "in",
    label: "In/cached",
    isNumber: true,
    width: 110,
    text: (row) => ratio(row.prompt_tokens, row.cached_tokens),
    sort: (row) => row.prompt_tokens,
  },
  {
    id: "out",
    label: "Out",
    isNumber: true,
    width: 70,
    text: (row) => count(row.output_tokens),
    sort: (row) => row.output_tokens,
  },
  {
    id: "worker",
    label: "Worker",
    width: 90,
    text: (row) => (row.workers.length ? line(row.workers.at(-1)) : UNKNOWN),
    cell: (row) => (row.workers.length ? tail(line(row.workers.at(-1)), 8) : UNKNOWN),
  },
  {
    id: "tries",
    label: "Tries",
    isNumber: true,
    width: 60,
    text: (row) => count(row.attempts),
    sort: (row) => row.attempts,
    tone: (row) => (row.attempts > 1 ? "warn" : ""),
  },
];

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
