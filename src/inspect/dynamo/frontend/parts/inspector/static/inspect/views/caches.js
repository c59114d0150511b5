// The prefix caches of the workers: how full they are as the router knows it, and which part of the prompts they had.

import { bar, sparkline } from "../charts.js";
import { panel, workerLink } from "../parts.js";
import { Table, columnsOf } from "../table.js";
import { UNKNOWN, count, line } from "../text.js";

const known = (row) => (row.blocks_total && row.blocks_known !== null ? row.blocks_known / row.blocks_total : null);
const tiers = (row) =>
  Object.entries(row.tiers ?? {})
    .map(([tier, blocks]) => `${line(tier)} ${count(blocks)}`)
    .join(", ");

const COLUMNS = columnsOf("caches", {
  id: { cell: (row) => workerLink(row.id) },
  known: {
    text: (row) => `${count(row.blocks_known)}${row.blocks_total ? ` of ${count(row.blocks_total)}` : ""}`,
    cell: (row) =>
      bar(known(row), `${count(row.blocks_known)}${row.blocks_total ? `/${count(row.blocks_total)}` : ""}`, {
        tone: "accent",
      }),
  },
  tiers: { text: (row) => tiers(row) || UNKNOWN },
  history: {
    text: (row) => `at most ${count(Math.max(0, ...row.history))}`,
    cell: (row) =>
      sparkline(row.history, {
        label: `hit blocks per minute of ${line(row.id)}, the last five minutes`,
        width: 96,
        height: 22,
      }),
  },
  trust: { tone: (row) => (row.trust && row.trust.includes("degraded") ? "warn" : "") },
});

let table = null;

function the(app) {
  return (table ??= new Table(app, COLUMNS, { label: "Prefix caches", sort: "-rate" }));
}

/** The caches as a panel. */
export function cachePanel(app) {
  const rows = app.store.list("caches");
  return panel(
    "Workers",
    "as this router knows them",
    the(app).draw(rows, app.store.now(), {
      empty: app.store.has("caches") ? "No worker with a block size is known." : "Reading the index …",
    }),
  );
}

export function cachesText(app) {
  return the(app).text(app.store.list("caches"), app.store.now());
}
