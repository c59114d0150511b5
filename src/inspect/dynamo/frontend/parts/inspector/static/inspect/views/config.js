// The settings in force, and where each came from.

import { h } from "../dom.js";
import { compile } from "../filter.js";
import { filterBox, waiting } from "../parts.js";
import { Table } from "../table.js";
import { line, sampled } from "../text.js";

const PATH = "/admin/v1/config";

const FILTER = {
  texts: { name: (row) => row.name, origin: (row) => row.origin },
  marks: { changed: (row) => row.origin !== "default" },
  beginnings: ["name"],
  words: (row) => [row.name, row.help, row.value === null ? null : line(row.value)],
};

const COLUMNS = [
  {
    id: "name",
    label: "Setting",
    width: 330,
    text: (row) => line(row.name),
    cell: (row) => h("span", { class: "id" }, line(row.name)),
  },
  {
    id: "value",
    label: "Value",
    width: 230,
    text: (row) => (row.value === true ? "yes" : row.value === false ? "no" : line(row.value)),
  },
  {
    id: "origin",
    label: "From",
    width: 110,
    text: (row) => line(row.origin),
    cell: (row) => (row.origin === "default" ? "default" : h("b", null, line(row.origin))),
  },
  { id: "help", label: "What it does", isWide: true, isLong: true, text: (row) => line(row.help) },
];

let table = null;

function the(app) {
  return (table ??= new Table(app, COLUMNS, { label: "Settings", sort: "name", rowKey: (row) => row.name }));
}

function rowsOf(app) {
  const resource = app.resources.use(PATH);
  const all = Array.isArray(resource.value)
    ? resource.value
    : (resource.value?.settings ?? resource.value?.config ?? []);
  const { matches, problem } = compile(app.route.query.filter ?? "", FILTER);
  return { resource, all, rows: all.filter((row) => matches(row)), problem };
}

export const config = {
  id: "config",
  label: "Config",
  letter: "c",
  watch: [],

  draw(app) {
    const { resource, all, rows, problem } = rowsOf(app);
    const pending = waiting(resource, "the settings");
    return [
      h(
        "div",
        { class: "head" },
        h("h1", null, "Config"),
        filterBox(app, {
          value: app.route.query.filter ?? "",
          problem,
          example: "changed, origin:flag, timeout",
          note: pending ? "" : sampled(rows.length, all.length),
        }),
      ),
      pending ?? the(app).draw(rows, app.store.now(), { isTall: true, empty: "No setting fits the filter." }),
    ];
  },

  text(app) {
    return the(app).text(rowsOf(app).rows, app.store.now());
  },
};
