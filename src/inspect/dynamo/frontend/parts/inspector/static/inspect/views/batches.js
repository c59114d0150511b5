// Batches of the public API, as far as the viewer's key may see them.

import { bar } from "../charts.js";
import { h } from "../dom.js";
import { address, isMissing, link, pairs, panel, state, waiting } from "../parts.js";
import { Table } from "../table.js";
import { UNKNOWN, count, duration, line, moment, pairsText, ratio } from "../text.js";

const PATH = "/v1/batches?limit=100";
const EVERY_SECONDS = 5;

const done = (row) => (row.request_counts ? row.request_counts.completed + row.request_counts.failed : null);
const part = (row) => (row.request_counts?.total ? done(row) / row.request_counts.total : null);

/** Requests per second since it began, and how long the rest takes at that rate; null where nothing can be said. */
function pace(row, nowSeconds) {
  const begun = row.in_progress_at;
  const ended = row.completed_at ?? row.cancelled_at ?? row.failed_at ?? row.expired_at;
  const took = begun ? (ended ?? nowSeconds) - begun : 0;
  const rate = took > 0 && done(row) > 0 ? done(row) / took : null;
  const rest = rate && !ended && row.request_counts.total ? (row.request_counts.total - done(row)) / rate : null;
  return { rate, rest };
}

const nowSeconds = () => Date.now() / 1000;

const COLUMNS = [
  {
    id: "created",
    label: "Created",
    width: 165,
    text: (row) => moment(row.created_at * 1000),
    sort: (row) => row.created_at,
  },
  {
    id: "id",
    label: "Batch",
    width: 230,
    isLong: true,
    text: (row) => line(row.id),
    cell: (row) => link(address("batches", row.id), line(row.id), { class: "id" }),
  },
  { id: "endpoint", label: "Endpoint", isWide: true, isLong: true, text: (row) => line(row.endpoint) },
  {
    id: "status",
    label: "Status",
    width: 120,
    text: (row) => (row.paused ? `paused: ${line(row.paused)}` : line(row.status)),
    tone: (row) => (row.paused ? "bad" : ""),
    cell: (row) => (row.paused ? h("span", { title: line(row.paused) }, "paused") : state(row.status)),
  },
  {
    id: "done",
    label: "Done",
    isNumber: true,
    width: 190,
    text: (row) => ratio(done(row), row.request_counts?.total),
    sort: part,
    cell: (row) => bar(part(row), ratio(done(row), row.request_counts?.total), { tone: "accent" }),
  },
  {
    id: "failed",
    label: "Failed",
    isNumber: true,
    width: 80,
    text: (row) => count(row.request_counts?.failed),
    sort: (row) => row.request_counts?.failed,
    tone: (row) => (row.request_counts?.failed ? "bad" : ""),
  },
  {
    id: "rate",
    label: "Per second",
    isNumber: true,
    width: 95,
    text: (row) => {
      const { rate } = pace(row, nowSeconds());
      return rate === null ? UNKNOWN : rate.toFixed(1);
    },
    sort: (row) => pace(row, nowSeconds()).rate,
  },
  {
    id: "rest",
    label: "Left",
    isNumber: true,
    width: 90,
    title: "at this rate",
    text: (row) => duration(pace(row, nowSeconds()).rest ?? undefined),
    sort: (row) => pace(row, nowSeconds()).rest,
  },
];

let table = null;

function the(app) {
  return (table ??= new Table(app, COLUMNS, {
    label: "Batches",
    sort: "-created",
    open: (row) => app.go(address("batches", row.id)),
  }));
}

export const batches = {
  id: "batches",
  label: "Batches",
  letter: "b",
  watch: [],

  draw(app) {
    const resource = app.resources.use(PATH, EVERY_SECONDS);
    const head = h(
      "div",
      { class: "head" },
      h("h1", null, "Batches"),
      resource.value
        ? h(
            "span",
            { class: "quiet" },
            `${count(resource.value.data.length)}${resource.value.has_more ? ", and older ones" : ""}`,
          )
        : null,
    );
    if (resource.value === null && resource.error)
      return [
        head,
        h(
          "p",
          { class: "empty" },
          isMissing(resource.error)
            ? `This listener has no batches: ${line(resource.error.message)}`
            : line(resource.error.message),
        ),
      ];
    const pending = waiting(resource, "the batches");
    if (pending) return [head, pending];
    const one = app.route.id === null ? null : resource.value.data.find((row) => row.id === app.route.id);
    if (one)
      return [
        h(
          "div",
          { class: "head" },
          link(address("batches"), "← Batches"),
          h("h1", { class: "id" }, line(one.id)),
          state(one.status),
        ),
        panel("Batch", null, pairs(facts(one))),
      ];
    return [
      head,
      the(app).draw(resource.value.data, app.store.now(), { isTall: true, empty: "There are no batches." }),
    ];
  },

  text(app) {
    const rows = app.resources.use(PATH, EVERY_SECONDS).value?.data ?? [];
    const one = rows.find((row) => row.id === app.route.id);
    return one ? pairsText(facts(one)) : the(app).text(rows, app.store.now());
  },
};

function facts(row) {
  return Object.entries(row).map(([name, value]) => [
    name,
    name.endsWith("_at") && value ? moment(value * 1000) : line(value),
  ]);
}
