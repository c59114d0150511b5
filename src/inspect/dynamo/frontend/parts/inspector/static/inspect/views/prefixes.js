// The prefix caches: how full they are and what hits in them; which prefixes are held, by whom, and which are hot.

import { bar, treemap } from "../charts.js";
import { h } from "../dom.js";
import { panel, workerLink } from "../parts.js";
import { Table, columnsOf } from "../table.js";
import { count, line, ratio, sampled } from "../text.js";
import { cachePanel, cachesText } from "./caches.js";

const TONES = 6; // of the map: as many models can be told apart

let longest = 1;

const COLUMNS = columnsOf("prefixes", {
  id: { cell: (row) => h("span", { class: "id" }, line(row.id)) },
  blocks: { cell: (row) => bar(row.blocks / longest, count(row.blocks), { tone: "accent" }) },
  held: { text: (row) => count(row.holders.length), sort: (row) => row.holders.length },
  by: {
    text: (row) => line(row.holders.join(" ")),
    cell: (row) => row.holders.slice(0, 8).flatMap((id) => [workerLink(id), " "]),
  },
});

let table = null;

function the(app) {
  return (table ??= new Table(app, COLUMNS, { label: "Prefixes", sort: "-hits" }));
}

/** Which part of the prompts of the last minute all workers together had, in blocks. */
function hitNote(app) {
  const rows = app.store.list("caches");
  const sum = (name) => rows.reduce((total, row) => total + (row[name] ?? 0), 0);
  const [hits, prompts] = [sum("hit_blocks_per_minute"), sum("prompt_blocks_per_minute")];
  return prompts
    ? `, ${ratio(Math.round(hits), Math.round(prompts))} blocks of prompts hit in the last minute`
    : "";
}

export const prefixes = {
  id: "prefixes",
  label: "Prefix cache",
  letter: "p",
  watch: ["caches", "prefixes", "models"],

  draw(app) {
    const rows = app.store.list("prefixes");
    longest = Math.max(1, ...rows.map((row) => row.blocks));
    const models = [...new Set(rows.map((row) => row.model))].sort();
    const items = rows.map((row) => ({
      key: row.id,
      weight: row.blocks * Math.max(1, row.holders.length),
      label: `${count(row.blocks)} × ${row.holders.length}`,
      title: `${line(row.id)}: ${count(row.blocks)} blocks of ${line(row.model)}, held by ${line(row.holders.join(", "))}, hits ${count(row.hits)}`,
      tone: models.indexOf(row.model) % TONES,
    }));
    const modes = app.store
      .list("models")
      .filter((model) => model.router_mode !== "kv")
      .map((model) => line(model.name));
    const empty = app.store.has("prefixes")
      ? `No prefix is known.${modes.length ? ` Only workers behind the kv router mode are watched: ${modes.join(", ")} ${modes.length === 1 ? "is" : "are"} not.` : ""}`
      : "Reading the index …";
    return [
      h(
        "div",
        { class: "head" },
        h("h1", null, "Prefix cache"),
        h("span", { class: "quiet" }, `${sampled(rows.length, app.store.total("prefixes"))} prefixes${hitNote(app)}`),
      ),
      cachePanel(app),
      rows.length
        ? panel(
            "Blocks by prefix × holders",
            `the ${sampled(Math.min(200, rows.length), app.store.total("prefixes"))} largest`,
            treemap(items, { label: `${rows.length} prefixes by how many blocks of caches they take` }),
          )
        : null,
      the(app).draw(rows, app.store.now(), { isTall: true, empty }),
    ];
  },

  text(app) {
    return `${cachesText(app)}\n\n${the(app).text(app.store.list("prefixes"), app.store.now())}`;
  },
};
