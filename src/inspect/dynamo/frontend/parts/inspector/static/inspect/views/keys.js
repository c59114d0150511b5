// What keys have used, added up by key, never the keys themselves; and the share of each project in what all of them share.

import { bar } from "../charts.js";
import { h } from "../dom.js";
import { isMissing, panel, waiting } from "../parts.js";
import { Table } from "../table.js";
import { UNKNOWN, bytes, count, line } from "../text.js";

const PATH = "/admin/usage?group_by=key";
const SHARES_PATH = "/admin/shares";
const EVERY_SECONDS = 10;

const amount = (row, value) => (row.unit === "bytes" ? bytes(value) : count(value));
const SHARES = [
  { id: "name", label: "of", isWide: true, text: (row) => line(row.name), sort: (row) => row.name },
  { id: "owner", label: "project", isWide: true, text: (row) => line(row.owner || "everybody"), sort: (row) => row.owner },
  {
    id: "used",
    label: "has",
    isNumber: true,
    width: 130,
    text: (row) => amount(row, row.used),
    sort: (row) => row.part,
    cell: (row) => bar(row.part, amount(row, row.used), { tone: "accent" }),
  },
  {
    id: "may",
    label: "may have",
    isNumber: true,
    width: 130,
    text: (row) => amount(row, row.owner_limit),
    title: "while the others have nothing",
  },
  { id: "all", label: "there is", isNumber: true, width: 130, text: (row) => amount(row, row.limit) },
];
let sharesTable = null;

// A row for each bound and project.
function shares(app) {
  const found = app.resources.use(SHARES_PATH, EVERY_SECONDS).value?.data ?? [];
  const rows = found.flatMap((bound) =>
    bound.owners.map((owner) => ({
      ...bound,
      ...owner,
      id: `${bound.name}/${owner.owner}`,
      part: owner.used / Math.max(1, bound.owner_limit),
    })),
  );
  if (rows.length === 0) return null;
  sharesTable ??= new Table(app, SHARES, { label: "Shares of projects", sort: "-used" });
  return panel("Shares", "of what all projects share", sharesTable.draw(rows, app.store.now()));
}

let most = 1;
let table = null;
let drawn = "";

const known = (name) => name.replaceAll("_", " ");

// The columns are what the server adds up: a new sum of a newer server shows up here by itself.
function the(app, rows) {
  const names = Object.keys(rows[0] ?? {});
  if (table === null || drawn !== names.join()) {
    drawn = names.join();
    const isNumber = (name) => rows.some((row) => typeof row[name] === "number");
    table = new Table(
      app,
      names.map((name) => ({
        id: name,
        label: known(name),
        isNumber: isNumber(name),
        isWide: !isNumber(name),
        width: 130,
        text: (row) => (typeof row[name] === "number" ? count(row[name]) : line(row[name])),
        sort: (row) => row[name],
        ...(name === "requests"
          ? { cell: (row) => bar(row.requests / most, count(row.requests), { tone: "accent" }) }
          : {}),
      })),
      {
        label: "Use of keys",
        rowKey: (row) => String(row.key ?? row.key_id ?? names.map((name) => row[name]).join()),
        sort: names.includes("requests") ? "-requests" : null,
      },
    );
  }
  return table;
}

export const keys = {
  id: "keys",
  label: "Keys",
  letter: "k",
  watch: [],

  draw(app) {
    const resource = app.resources.use(PATH, EVERY_SECONDS);
    const head = h(
      "div",
      { class: "head" },
      h("h1", null, "Keys"),
      h("span", { class: "quiet" }, "use of the last seven days"),
    );
    if (resource.value === null && resource.error) {
      return [
        head,
        h(
          "p",
          { class: "empty" },
          isMissing(resource.error) ? `Nothing to show: ${line(resource.error.message)}` : line(resource.error.message),
        ),
        shares(app),
      ];
    }
    const pending = waiting(resource, "the use of keys");
    if (pending) return [head, pending];
    const rows = resource.value.data;
    most = Math.max(1, ...rows.map((row) => row.requests ?? 0));
    return [
      head,
      shares(app),
      the(app, rows).draw(rows, app.store.now(), { isTall: true, empty: "No key has been used." }),
    ];
  },

  text(app) {
    const rows = app.resources.use(PATH, EVERY_SECONDS).value?.data ?? [];
    return rows.length ? the(app, rows).text(rows, app.store.now()) : UNKNOWN;
  },
};
