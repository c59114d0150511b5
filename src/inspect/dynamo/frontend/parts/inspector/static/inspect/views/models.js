// Models: which are ready, and of the others why not.

import { h } from "../dom.js";
import { address, link, pairs, panel, state, workerLink } from "../parts.js";
import { Table, columnsOf } from "../table.js";
import { UNKNOWN, count, line, pairsText, ratio } from "../text.js";
import { residentPanel, residentsText } from "./residents.js";

const roles = (model) =>
  Object.entries(model.workers ?? {})
    .map(([role, number]) => `${number} ${role}`)
    .join(", ") || UNKNOWN;
const readiness = (model) => (model.is_ready ? "ready" : `not ready: ${line(model.why_not)}`);

const COLUMNS = columnsOf("models", {
  name: { cell: (row) => link(address("models", row.id), line(row.name)) },
  ready: {
    text: readiness,
    cell: (row) =>
      row.is_ready
        ? state("ready")
        : h("span", { class: "state warn" }, h("span", { class: "mark", "aria-hidden": "true" }, "◐"), readiness(row)),
    sort: (row) => (row.is_ready ? 1 : 0),
  },
  workers: { text: roles },
});

let table = null;

function the(app) {
  return (table ??= new Table(app, COLUMNS, {
    label: "Models",
    sort: "name",
    open: (row) => app.go(address("models", row.id)),
  }));
}

export const models = {
  id: "models",
  label: "Models",
  letter: "m",
  watch: ["models", "residents"],
  count: (app) => (app.store.fleet ? count(app.store.fleet.models) : undefined),
  tone: (app) => (app.store.list("models").some((model) => !model.is_ready) ? "warn" : ""),

  draw(app) {
    if (app.route.id !== null) return one(app, app.route.id);
    const rows = app.store.list("models");
    return [
      h(
        "div",
        { class: "head" },
        h("h1", null, "Models"),
        h("span", { class: "quiet" }, app.listed("models", rows.length)),
      ),
      residentPanel(app),
      the(app).draw(rows, app.store.now(), { isTall: true, empty: "No model is registered: start a worker." }),
    ];
  },

  text(app) {
    const model = app.route.id === null ? null : app.store.one("models", app.route.id);
    if (model) return pairsText(facts(model));
    return residentsText(app) + the(app).text(app.store.list("models"), app.store.now());
  },
};

function facts(model) {
  return [
    ["name", line(model.name)],
    ["namespace", line(model.namespace)],
    ["types", line(model.types.join(", "))],
    ["ready", readiness(model)],
    ["workers", roles(model)],
    ["in flight", ratio(model.in_flight, model.limit)],
    ["waiting", count(model.waiting)],
    ["context", count(model.context_length)],
    ["block size", count(model.block_size)],
    ["router mode", line(model.router_mode)],
    ["base model", line(model.parent)],
    ["aliases", line(model.aliases.join(", "))],
    ["adapters", line(model.adapters.join(", "))],
  ];
}

function one(app, id) {
  const model = app.store.one("models", id);
  if (model === undefined)
    return h("p", { class: "empty" }, `There is no model ${line(id)} now. `, link(address("models"), "All models"));
  const workers = app.store.list("workers").filter((worker) => worker.models.includes(model.name));
  return [
    h(
      "div",
      { class: "head" },
      link(address("models"), "← Models"),
      h("h1", null, line(model.name)),
      model.is_ready ? state("ready") : h("span", { class: "state warn" }, readiness(model)),
    ),
    panel("Model", null, pairs(facts(model))),
    panel(
      "Its workers",
      count(workers.length),
      workers.length === 0
        ? h("p", { class: "quiet" }, "None is known to this frontend.")
        : h(
            "ul",
            { class: "plain" },
            workers.map((worker) =>
              h(
                "li",
                { key: worker.id, class: "spread" },
                workerLink(worker.id),
                h("span", { class: "quiet" }, line(worker.role)),
                h("span", null, `run ${ratio(worker.running, worker.limit)}`),
                state(worker.state),
              ),
            ),
          ),
    ),
    h(
      "p",
      null,
      link(address("streams", null, { filter: `model:${quoted(model.name)}` }), "Its streams"),
      " · ",
      link(address("playground", null, { model: model.name }), "Try it in the playground"),
    ),
  ];
}

function quoted(name) {
  return /[\s"]/.test(name) ? `"${name.replaceAll('"', "")}"` : name;
}
