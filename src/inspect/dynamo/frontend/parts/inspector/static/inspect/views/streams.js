// Every request in flight: what it does, since when, how fast, and whether it is stuck.

import { abort, abortButton } from "../actions.js";
import { h } from "../dom.js";
import { STREAMS, compile } from "../filter.js";
import { address, filterBox, link, shortEndpoint, state } from "../parts.js";
import { Table } from "../table.js";
import { UNKNOWN, age, bytes, count, duration, figure, line, ratio, sampled, tail } from "../text.js";
import { drawRequest, requestText } from "./request.js";

const COLUMNS = [
  {
    id: "id",
    label: "Request",
    width: 140,
    text: (row) => line(row.id),
    cell: (row) => link(address("streams", row.id), line(row.id), { class: "id" }),
  },
  { id: "key", label: "Key", width: 92, text: (row) => line(row.key) },
  { id: "model", label: "Model", isWide: true, isLong: true, text: (row) => line(row.model) },
  { id: "endpoint", label: "Endpoint", width: 70, text: (row) => shortEndpoint(row.endpoint) },
  {
    id: "phase",
    label: "Phase",
    width: 140,
    text: (row) => `${line(row.phase)}${row.is_stalled ? " STALLED" : ""}`,
    tone: (row) => (row.is_stalled ? "bad" : ""),
    cell: (row) =>
      row.is_stalled
        ? [line(row.phase), " ", h("b", { class: "stalled" }, "STALLED")]
        : row.phase === "client slow"
          ? state(row.phase)
          : line(row.phase),
  },
  {
    id: "age",
    label: "Age",
    isNumber: true,
    width: 66,
    text: (row, now) => age(row.started_ms, now),
    sort: (row) => -row.started_ms,
  },
  {
    id: "wait",
    label: "Wait",
    isNumber: true,
    width: 58,
    title: "time in queues",
    text: (row) => duration(row.queued_seconds),
    sort: (row) => row.queued_seconds,
  },
  {
    id: "ttft",
    label: "TTFT",
    isNumber: true,
    width: 72,
    title: "time to the first token",
    text: (row) => duration(row.ttft_seconds),
    sort: (row) => row.ttft_seconds,
  },
  {
    id: "in",
    label: "In/cached",
    isNumber: true,
    width: 100,
    title: "tokens of the prompt, and those found in a cache",
    text: (row) => ratio(row.prompt_tokens, row.cached_tokens),
    sort: (row) => row.prompt_tokens,
  },
  {
    id: "out",
    label: "Out/max",
    isNumber: true,
    width: 100,
    title: "tokens so far, and at most",
    text: (row) => ratio(row.output_tokens, row.max_tokens),
    sort: (row) => row.output_tokens,
  },
  {
    id: "rate",
    label: "Tok/s",
    isNumber: true,
    width: 54,
    text: (row) => figure(row.tokens_per_second),
    sort: (row) => row.tokens_per_second,
  },
  {
    id: "last",
    label: "Last",
    isNumber: true,
    width: 58,
    title: "since the last token",
    text: (row, now) => age(row.last_token_ms, now),
    sort: (row) => (row.last_token_ms ? -row.last_token_ms : null),
    tone: (row) => (row.is_stalled ? "bad" : ""),
  },
  {
    id: "worker",
    label: "Worker",
    width: 86,
    text: (row) => (row.workers.length ? line(row.workers.at(-1)) : UNKNOWN),
    cell: (row) =>
      row.workers.length
        ? link(address("workers", row.workers.at(-1)), tail(line(row.workers.at(-1)), 8), { class: "id" })
        : UNKNOWN,
  },
  {
    id: "attempt",
    label: "Try",
    isNumber: true,
    width: 42,
    title: "which attempt runs",
    text: (row) => count(row.attempt),
    sort: (row) => row.attempt,
    tone: (row) => (row.attempt > 1 ? "warn" : ""),
  },
  {
    id: "n",
    label: "n",
    isNumber: true,
    width: 34,
    title: "choices",
    text: (row) => count(row.choices),
    sort: (row) => row.choices,
  },
  {
    id: "client",
    label: "Unsent",
    isNumber: true,
    width: 60,
    title: "bytes that wait for the client to read them",
    text: (row) => bytes(row.client_bytes_waiting),
    sort: (row) => row.client_bytes_waiting,
  },
];

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
