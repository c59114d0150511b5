// The whole system: its figures with their last five minutes, a tile for each worker, what happened.

import { sparkline } from "../charts.js";
import { h } from "../dom.js";
import { address, kvBar, link, pairs, panel, state, toneOf, workerLink } from "../parts.js";
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
  pairsText,
  ratio,
  sampled,
  share,
} from "../text.js";

const EVENTS = 100; // the newest; all that were sent are in the text of the view

// label, value of CountersView, how it is written, name of its history
const FIGURES = [
  ["Requests/s", "requests_per_second", figure],
  ["Tokens/s out", "output_tokens_per_second", figure],
  ["Tokens/s in", "input_tokens_per_second", figure],
  ["Running", "running", count],
  ["Waiting", "waiting", count],
  ["TTFT p50", "ttft_p50_seconds", duration],
  ["TTFT p99", "ttft_p99_seconds", duration],
  ["ITL p50", "itl_p50_seconds", duration],
  ["ITL p99", "itl_p99_seconds", duration],
  ["Server errors", "error_share", share],
  ["Refused", "refused_share", share], // clients' mistakes, and requests without room
  ["Shed/s", "shed_per_second", figure],
  ["KV in use", "kv_share", share],
  ["Prefix hits", "prefix_hit_share", share],
];

export const fleet = {
  id: "fleet",
  label: "Fleet",
  letter: "f",
  watch: ["frontends", "models", "events"],

  draw(app) {
    const { store } = app;
    if (store.fleet === null)
      return h(
        "p",
        { class: "empty" },
        app.connection.state === "key" ? "A key is needed to see anything." : "Waiting for the first picture …",
      );
    const now = store.now();
    return [
      h("h1", { class: "unseen" }, "Fleet"),
      h(
        "div",
        { class: "cards" },
        FIGURES.map(([label, name, written]) => card(store.fleet, label, name, written)),
      ),
      panel(
        "Workers",
        link(address("workers"), `${app.listed("workers", store.list("workers").length)}`),
        tiles(store.list("workers"), now),
      ),
      h(
        "div",
        { class: "halves" },
        panel("Models", link(address("models"), app.countOf("models") ?? UNKNOWN), modelList(store.list("models"))),
        panel("Frontends", count(store.fleet.frontends), frontendTable(store.list("frontends"), now)),
      ),
      panel(
        "Events",
        sampled(Math.min(EVENTS, store.list("events").length), store.total("events")),
        eventList(newest(store.list("events")).slice(0, EVENTS), now),
      ),
    ];
  },

  text(app) {
    const { store } = app;
    if (store.fleet === null) return "nothing is known yet";
    const workers = store
      .list("workers")
      .map((one) => [one.id, one.role, one.state, ratio(one.running, one.limit), line(one.note)]);
    return [
      pairsText(FIGURES.map(([label, name, written]) => [label, written(store.fleet.now[name])])),
      columnsText([["worker", "role", "state", "run/limit", "note"], ...workers]),
      eventsText(store.list("events")),
    ].join("\n\n");
  },
};

function card(fleetView, label, name, written) {
  const history = fleetView.history?.[name];
  const value = written(fleetView.now[name]);
  return h(
    "div",
    { class: "card", key: name },
    h("div", { class: "quiet" }, label),
    h("div", { class: `large${value === UNKNOWN ? " unknown" : ""}` }, value),
    sparkline(history, { label: `${label}: the last five minutes, now ${value}` }),
  );
}

function tiles(workers, now) {
  if (workers.length === 0) return h("p", { class: "empty" }, "No worker has registered yet.");
  return h(
    "div",
    { class: "tiles" },
    workers.map((worker) => {
      const load = worker.limit ? worker.running / worker.limit : null;
      // Five shades: a difference that matters is one that the eye can see.
      const shade = load === null ? 0 : Math.min(4, Math.floor(load * 5));
      return link(
        address("workers", worker.id),
        [
          h("div", { class: "spread" }, h("b", { class: "id" }, line(worker.id).slice(-8)), state(worker.state)),
          h(
            "div",
            { class: "spread quiet" },
            h("span", null, line(worker.role)),
            h(
              "span",
              null,
              `run ${ratio(worker.running, worker.limit)}`,
              worker.queued ? ` · queue ${count(worker.queued)}` : "",
            ),
          ),
          h("div", { class: "spread" }, h("span", { class: "quiet" }, "KV"), kvBar(worker)),
          worker.note
            ? h("div", { class: "quiet clip", title: line(worker.note) }, line(worker.note))
            : h(
                "div",
                { class: "quiet clip" },
                `${figure(worker.output_tokens_per_second)} tok/s · ${age(worker.since_ms, now)}`,
              ),
        ],
        { key: worker.id, class: `tile load${shade} ${toneOf(worker.state)}` },
      );
    }),
  );
}

function modelList(models) {
  if (models.length === 0) return h("p", { class: "empty" }, "No model is registered.");
  return h(
    "ul",
    { class: "plain" },
    models.map((model) =>
      h(
        "li",
        { key: model.id, class: "spread" },
        link(address("models", model.id), line(model.name)),
        model.is_ready
          ? state("ready")
          : h(
              "span",
              { class: "state warn" },
              h("span", { class: "mark", "aria-hidden": "true" }, "◐"),
              `not ready: ${line(model.why_not)}`,
            ),
      ),
    ),
  );
}

function frontendTable(frontends, now) {
  if (frontends.length === 0) return h("p", { class: "quiet" }, "Nothing is known of single processes.");
  return h(
    "div",
    { class: "frontends" },
    frontends.map((one) =>
      h(
        "div",
        { key: one.id },
        h("div", { class: "spread" }, h("b", null, `${line(one.host)} pid ${one.pid}`), state(one.stage)),
        pairs([
          ["in flight", count(one.in_flight)],
          ["CPU", share(one.cpu_share)],
          ["memory", bytes(one.rss_bytes)],
          ["loop lag", duration(one.loop_lag_seconds)],
          ["age", age(one.started_ms, now)],
        ]),
      ),
    ),
  );
}

function newest(events) {
  return events.sort((a, b) => b.at_ms - a.at_ms);
}

/** Events, the newest first, with links to what they are about. */
export function eventList(events, now) {
  if (events.length === 0) return h("p", { class: "quiet" }, "Nothing has happened yet.");
  return h(
    "ol",
    { class: "events" },
    events.map((event) =>
      h(
        "li",
        { key: event.id },
        h("time", { title: `${age(event.at_ms, now)} ago` }, clock(event.at_ms)),
        h("span", { class: "kind" }, line(event.kind)),
        h("span", { class: "what" }, line(event.text), event.by ? ` (by ${line(event.by)})` : ""),
        event.request_id ? link(address("streams", event.request_id), "request") : null,
        event.worker ? workerLink(event.worker) : null,
      ),
    ),
  );
}

export function eventsText(events) {
  return newest(events)
    .map(
      (event) =>
        `${clock(event.at_ms)} ${line(event.kind)}: ${line(event.text)}${event.by ? ` (by ${line(event.by)})` : ""}`,
    )
    .join("\n");
}
