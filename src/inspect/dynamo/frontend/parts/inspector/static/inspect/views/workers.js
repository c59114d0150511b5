// Workers: state and why, load, KV blocks; drained, quarantined and taken back from here.

import { actOnWorker, workerButtons } from "../actions.js";
import { bar } from "../charts.js";
import { h } from "../dom.js";
import { WORKERS, compile } from "../filter.js";
import { address, filterBox, kvBar, kvShare, link, pairs, panel, state, toneOf } from "../parts.js";
import { Table, columnsOf } from "../table.js";
import { UNKNOWN, age, count, duration, figure, line, pairsText, ratio, share } from "../text.js";

const until = (row, now) =>
  row.state_until_ms !== null && row.state_until_ms > now
    ? ` (${duration(Math.ceil((row.state_until_ms - now) / 1000))} left)`
    : "";
const queue = (row) =>
  row.queued === null || row.queued === undefined
    ? UNKNOWN
    : `${count(row.queued)}${row.queue_age_seconds ? ` ${duration(row.queue_age_seconds)}` : ""}`;

const COLUMNS = columnsOf("workers", {
  id: { cell: (row) => link(address("workers", row.id), line(row.id), { class: "id" }) },
  state: { text: (row, now) => `${row.state}${until(row, now)}` },
  load: { cell: (row) => bar(row.limit ? row.running / row.limit : null, ratio(row.running, row.limit)) },
  queue: { text: queue },
  kv: { text: (row) => share(kvShare(row)), sort: kvShare, cell: kvBar },
  note: {
    text: (row, now) => (row.note ? `${line(row.note)}${until(row, now)}` : ""),
    tone: (row) => toneOf(row.state),
  },
});

let table = null;

function the(app) {
  return (table ??= new Table(app, COLUMNS, {
    label: "Workers",
    sort: "id",
    open: (row) => app.go(address("workers", row.id)),
    rowTone: (row) => (row.state === "ready" ? "" : "dim"),
    keys: {
      d: (row) => actOnWorker(app, row, "drain"),
      q: (row) => actOnWorker(app, row, "quarantine"),
      u: (row) => actOnWorker(app, row, "undrain"),
    },
    actionsWidth: 190,
    actions: (row) => workerButtons(app, row),
  }));
}

function rowsOf(app) {
  const { matches, problem } = compile(app.route.query.filter ?? "", WORKERS);
  const now = app.store.now();
  const all = app.store.list("workers");
  return { rows: all.filter((row) => matches(row, now)), problem, all };
}

export const workers = {
  id: "workers",
  label: "Workers",
  letter: "w",
  watch: [],
  count: (app) => app.countOf("workers"),
  tone: (app) => (app.store.list("workers").some((worker) => worker.state === "quarantined") ? "bad" : ""),
  keys: [
    ["↑ ↓ or j k", "choose a worker"],
    ["Enter", "open it"],
    ["d", "drain it"],
    ["q", "quarantine it"],
    ["u", "take it back"],
  ],

  draw(app) {
    if (app.route.id !== null) return one(app, app.route.id);
    const { rows, problem, all } = rowsOf(app);
    return [
      h(
        "div",
        { class: "head" },
        h("h1", null, "Workers"),
        filterBox(app, {
          value: app.route.query.filter ?? "",
          problem,
          example: "model:demo kv>80 !quarantined",
          note: app.listed("workers", rows.length),
        }),
      ),
      the(app).draw(rows, app.store.now(), {
        isTall: true,
        empty: all.length ? "No worker fits the filter." : "No worker has registered yet.",
      }),
    ];
  },

  text(app) {
    const worker = app.route.id === null ? null : app.store.one("workers", app.route.id);
    return worker ? pairsText(facts(worker, app.store.now())) : the(app).text(rowsOf(app).rows, app.store.now());
  },
};

function facts(worker, now) {
  return [
    ["id", line(worker.id)],
    ["state", `${line(worker.state)}${until(worker, now)}`],
    ["note", line(worker.note)],
    ["role", line(worker.role)],
    ["models", line(worker.models.join(", "))],
    ["address", line(worker.address)],
    ["wire", line(worker.wire)],
    ["running", ratio(worker.running, worker.limit)],
    ["queue", queue(worker)],
    ["age", age(worker.since_ms, now)],
    ["silence", age(worker.silent_ms, now)],
    ["tokens/s", figure(worker.output_tokens_per_second)],
    ["KV blocks", ratio(worker.kv_blocks_used, worker.kv_blocks_total)],
    ["prefix hits", share(worker.prefix_hit_share)],
    ["adapters", line(worker.adapters.join(", "))],
    ["version", line(worker.version)],
    ["card", line(worker.card)],
  ];
}

function one(app, id) {
  const worker = app.store.one("workers", id);
  if (worker === undefined)
    return h("p", { class: "empty" }, `There is no worker ${line(id)} now. `, link(address("workers"), "All workers"));
  const now = app.store.now();
  const its = app.store.list("streams").filter((stream) => stream.workers.includes(worker.id));
  return [
    h(
      "div",
      { class: "head" },
      link(address("workers"), "← Workers"),
      h("h1", { class: "id" }, line(worker.id)),
      state(worker.state),
      h("div", { class: "row" }, workerButtons(app, worker)),
    ),
    worker.note ? h("p", { class: toneOf(worker.state) }, line(worker.note), until(worker, now)) : null,
    h(
      "div",
      { class: "cards" },
      load("Running", worker.limit ? worker.running / worker.limit : null, ratio(worker.running, worker.limit)),
      load("KV blocks", kvShare(worker), ratio(worker.kv_blocks_used, worker.kv_blocks_total)),
      load("Prefix hits", worker.prefix_hit_share, share(worker.prefix_hit_share), "accent"),
    ),
    panel("Worker", null, pairs(facts(worker, now))),
    panel(
      "Its streams",
      link(address("streams", null, { filter: `worker:${worker.id}` }), count(its.length)),
      its.length === 0
        ? h("p", { class: "quiet" }, "None now.")
        : h(
            "ul",
            { class: "plain" },
            its
              .slice(0, 50)
              .map((stream) =>
                h(
                  "li",
                  { key: stream.id, class: "spread" },
                  link(address("streams", stream.id), line(stream.id), { class: "id clip" }),
                  h("span", null, line(stream.phase)),
                  h("span", null, age(stream.started_ms, now)),
                ),
              ),
          ),
    ),
  ];
}

function load(label, part, text, tone = null) {
  return h(
    "div",
    { class: "card", key: label },
    h("div", { class: "quiet" }, label),
    h("div", { class: `large${text === UNKNOWN ? " unknown" : ""}` }, text),
    bar(part ?? null, part === null || part === undefined ? UNKNOWN : share(part), { tone }),
  );
}
