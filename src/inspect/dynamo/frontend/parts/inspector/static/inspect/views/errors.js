// Failures, those that look alike together; one example of each with all that is kept of it.

import { h } from "../dom.js";
import { address, download, link, pairs, panel, waiting } from "../parts.js";
import { Table, columnsOf } from "../table.js";
import { UNKNOWN, age, count, figure, line, lines, moment, pairsText } from "../text.js";

const COLUMNS = columnsOf("errors");

let table = null;

function the(app) {
  return (table ??= new Table(app, COLUMNS, {
    label: "Failures",
    sort: "last",
    open: (row) => app.go(address("errors", row.id)),
  }));
}

const bundlePath = (id) => `/admin/v1/errors/${encodeURIComponent(id)}`;

export const errors = {
  id: "errors",
  label: "Errors",
  letter: "e",
  watch: ["errors"],

  draw(app) {
    const { id, query } = app.route;
    if (query.example) return bundle(app, query.example, null);
    if (id !== null) return group(app, id);
    const rows = app.store.list("errors");
    const all = rows.reduce((sum, row) => sum + row.count, 0);
    return [
      h(
        "div",
        { class: "head" },
        h("h1", null, "Errors"),
        h(
          "span",
          { class: "quiet" },
          rows.length ? `${app.listed("errors", rows.length)} kinds, ${count(all)} failures` : "",
        ),
      ),
      the(app).draw(rows, app.store.now(), { isTall: true, empty: "No request has failed since the server started." }),
    ];
  },

  text(app) {
    const { id, query } = app.route;
    const example = query.example ?? app.store.one("errors", id)?.example;
    if (!example) return the(app).text(app.store.list("errors"), app.store.now());
    const found = app.resources.use(bundlePath(example)).value;
    const kind = app.store.one("errors", id);
    return `${kind ? `${pairsText(facts(kind, app.store.now()))}\n\n` : ""}${found ? JSON.stringify(found, null, 2) : "the bundle is not read yet"}`;
  },
};

function facts(kind, now) {
  return [
    ["status", String(kind.status)],
    ["code", line(kind.code)],
    ["model", line(kind.model)],
    ["worker", line(kind.worker)],
    ["message", line(kind.message)],
    ["count", count(kind.count)],
    ["per minute", figure(kind.per_minute)],
    ["first", `${moment(kind.first_ms)} (${age(kind.first_ms, now)} ago)`],
    ["last", `${moment(kind.last_ms)} (${age(kind.last_ms, now)} ago)`],
  ];
}

function group(app, id) {
  const kind = app.store.one("errors", id);
  if (kind === undefined)
    return h(
      "p",
      { class: "empty" },
      "Failures of this kind are not kept any more. ",
      link(address("errors"), "All errors"),
    );
  return bundle(
    app,
    kind.example,
    panel("Failures that look alike", count(kind.count), pairs(facts(kind, app.store.now()))),
  );
}

function bundle(app, example, before) {
  const resource = app.resources.use(bundlePath(example));
  const text = resource.value === null ? null : JSON.stringify(resource.value, null, 2);
  return [
    h(
      "div",
      { class: "head" },
      link(address("errors"), "← Errors"),
      h("h1", null, "An example"),
      link(address("streams", example), line(example), { class: "id" }),
      text === null
        ? null
        : h(
            "div",
            { class: "row" },
            h("button", { onclick: () => download(`${example}.json`, text) }, "Download the bundle"),
            h("button", { onclick: () => app.copy(text, "the bundle") }, "Copy the bundle"),
          ),
    ),
    before,
    waiting(resource, "the bundle") ??
      panel(
        "Bundle",
        `run it again with: dynamo replay FILE --url ${location.origin}`,
        summary(resource.value),
        h("pre", { class: "bundle" }, lines(text)),
      ),
  ];
}

// What has one line comes first; the whole is below it.
function summary(value) {
  const flat = Object.entries(value ?? {}).filter(([, one]) => one === null || typeof one !== "object");
  return flat.length ? pairs(flat.map(([name, one]) => [line(name), one === null ? UNKNOWN : line(one)])) : null;
}
