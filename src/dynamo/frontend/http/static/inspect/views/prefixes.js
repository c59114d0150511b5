// The prefix cache: which prefixes are held, by whom, and how long they are.

import { bar, treemap } from "../charts.js";
import { h } from "../dom.js";
import { panel, workerLink } from "../parts.js";
import { Table } from "../table.js";
import { count, line, sampled } from "../text.js";

const TONES = 6; // of the map: as many models can be told apart

let longest = 1;

const COLUMNS = [
  {
    id: "id",
    label: "Prefix",
    width: 170,
    title: "hash of its last block",
    text: (row) => line(row.id),
    cell: (row) => h("span", { class: "id" }, line(row.id)),
  },
  { id: "model", label: "Model", isWide: true, text: (row) => line(row.model) },
  {
    id: "blocks",
    label: "Blocks",
    isNumber: true,
    width: 200,
    text: (row) => count(row.blocks),
    sort: (row) => row.blocks,
    cell: (row) => bar(row.blocks / longest, count(row.blocks), { tone: "accent" }),
  },
  { id: "depth", label: "Depth", isNumber: true, width: 80, text: (row) => count(row.depth), sort: (row) => row.depth },
  {
    id: "held",
    label: "Holders",
    isNumber: true,
    width: 80,
    text: (row) => count(row.holders.length),
    sort: (row) => row.holders.length,
  },
  {
    id: "by",
    label: "Held by",
    isWide: true,
    text: (row) => line(row.holders.join(" ")),
    cell: (row) => row.holders.slice(0, 8).flatMap((id) => [workerLink(id), " "]),
  },
  { id: "hits", label: "Hits", isNumber: true, width: 90, text: (row) => count(row.hits), sort: (row) => row.hits },
];

let table = null;

function the(app) {
  return (table ??= new Table(app, COLUMNS, { label: "Prefixes", sort: "-blocks" }));
}

export const prefixes = {
  id: "prefixes",
  label: "Prefix cache",
  letter: "p",
  watch: ["prefixes", "models"],

  draw(app) {
    const rows = app.store.list("prefixes");
    longest = Math.max(1, ...rows.map((row) => row.blocks));
    const models = [...new Set(rows.map((row) => row.model))].sort();
    const items = rows.map((row) => ({
      key: row.id,
      weight: row.blocks * Math.max(1, row.holders.length),
      label: `${count(row.blocks)} blk × ${row.holders.length}`,
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
        h("span", { class: "quiet" }, app.listed("prefixes", rows.length)),
      ),
      rows.length
        ? panel(
            "Blocks by prefix and holder",
            `the ${sampled(Math.min(200, rows.length), app.store.total("prefixes"))} largest`,
            treemap(items, { label: `${rows.length} prefixes by how many blocks of caches they take` }),
          )
        : null,
      the(app).draw(rows, app.store.now(), { isTall: true, empty }),
    ];
  },

  text(app) {
    return the(app).text(app.store.list("prefixes"), app.store.now());
  },
};
