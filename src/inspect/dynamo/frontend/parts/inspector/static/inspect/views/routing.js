// Routing decisions with every candidate, and where a request would go that is not sent.

import { h } from "../dom.js";
import { address, decision, decisionText, link, panel } from "../parts.js";
import { Table, columnsOf } from "../table.js";
import { UNKNOWN, clock, count, line } from "../text.js";

const leftOut = (row) => row.candidates.filter((one) => one.left_out).length;
const COLUMNS = columnsOf("routing", {
  request: {
    cell: (row) =>
      row.request_id ? link(address("streams", row.request_id), line(row.request_id), { class: "id" }) : UNKNOWN,
  },
  chosen: { text: (row) => line(row.candidates.find((one) => one.is_chosen)?.worker) },
  of: {
    text: (row) => count(Math.max(row.candidates_in_all, row.candidates.length)),
    sort: (row) => row.candidates.length,
  },
  out: { text: (row) => count(leftOut(row)), sort: leftOut },
});

let table = null;
const asked = { model: "", prompt: "", kind: "messages", answer: null, problem: null, isAsking: false };

function the(app) {
  return (table ??= new Table(app, COLUMNS, {
    label: "Routing decisions",
    sort: "-at",
    open: (row) => app.go(address("routing", row.id)),
  }));
}

export const routing = {
  id: "routing",
  label: "Routing",
  letter: "o",
  watch: ["routing", "models"],

  draw(app) {
    const rows = app.store.list("routing");
    if (app.route.id !== null) return one(app, app.route.id);
    return [
      h(
        "div",
        { class: "head" },
        h("h1", null, "Routing"),
        h("span", { class: "quiet" }, app.listed("routing", rows.length)),
      ),
      whatIf(app),
      the(app).draw(rows, app.store.now(), {
        isTall: true,
        empty: "No decision is kept: nothing was routed lately.",
      }),
    ];
  },

  text(app) {
    const found = app.route.id === null ? undefined : app.store.one("routing", app.route.id);
    return found ? decisionText(found) : the(app).text(app.store.list("routing"), app.store.now());
  },
};

function one(app, id) {
  const found = app.store.one("routing", id);
  if (found === undefined)
    return h(
      "p",
      { class: "empty" },
      "This decision is not kept any more. ",
      link(address("routing"), "All decisions"),
    );
  return [
    h(
      "div",
      { class: "head" },
      link(address("routing"), "← Routing"),
      h("h1", null, `${line(found.model)} at ${clock(found.at_ms)}`),
      found.request_id ? link(address("streams", found.request_id), "its request") : null,
    ),
    panel("Decision", null, decision(found)),
  ];
}

function whatIf(app) {
  const models = app.store.list("models").map((model) => model.name);
  const model = asked.model || models[0] || "";
  return panel(
    "What if",
    "where a prompt would go now, without sending it",
    h(
      "form",
      { class: "what-if", onsubmit: (event) => (event.preventDefault(), ask(app, model)) },
      h(
        "label",
        null,
        "Model",
        h(
          "select",
          { value: model, onchange: (event) => (asked.model = event.target.value) },
          models.map((name) => h("option", { key: name, value: name }, line(name))),
        ),
      ),
      h(
        "label",
        null,
        "As",
        h(
          "select",
          { value: asked.kind, onchange: (event) => ((asked.kind = event.target.value), app.draw()) },
          h("option", { value: "messages" }, "a user's message"),
          h("option", { value: "token_ids" }, "token ids"),
        ),
      ),
      h(
        "label",
        { class: "grow" },
        asked.kind === "messages" ? "Prompt" : "Token ids, separated by spaces or commas",
        h("textarea", { rows: "2", value: asked.prompt, oninput: (event) => (asked.prompt = event.target.value) }),
      ),
      h("button", { class: "primary", disabled: asked.isAsking || !model }, asked.isAsking ? "Asking …" : "Explain"),
    ),
    asked.problem ? h("p", { class: "note bad", role: "alert" }, line(asked.problem)) : null,
    asked.answer ? asked.answer.map((routing, at) => h("div", { key: `${at}` }, decision(routing))) : null,
  );
}

async function ask(app, model) {
  asked.isAsking = true;
  asked.problem = null;
  app.draw();
  try {
    const prompt =
      asked.kind === "messages"
        ? { messages: [{ role: "user", content: asked.prompt }] }
        : { token_ids: idsOf(asked.prompt) };
    const answer = await app.api.post("/admin/v1/routing/explain", { model, ...prompt });
    asked.answer = Array.isArray(answer) ? answer : Array.isArray(answer.routing) ? answer.routing : [answer];
  } catch (error) {
    asked.answer = null;
    asked.problem = error.message;
  }
  asked.isAsking = false;
  app.draw();
}

function idsOf(text) {
  const ids = text
    .split(/[\s,[\]]+/)
    .filter(Boolean)
    .map(Number);
  const wrong = ids.findIndex((id) => !Number.isInteger(id) || id < 0);
  if (wrong >= 0) throw new Error(`the ${wrong + 1}. token id is not a whole number`);
  return ids;
}
