// The models that are loaded on demand: which are in memory, and which requests wait for one.

import { bar } from "../charts.js";
import { address, panel } from "../parts.js";
import { Table, columnsOf } from "../table.js";
import { UNKNOWN, bytes } from "../text.js";

let whole = 1; // bytes of a full bar

const COLUMNS = columnsOf("residents", {
  memory: {
    cell: (row) =>
      row.taken_bytes === null
        ? UNKNOWN
        : bar(row.taken_bytes / whole, bytes(row.taken_bytes), { tone: "accent" }),
  },
  pinned: { text: (row) => (row.is_pinned ? "pinned" : "") },
  why: { tone: () => "warn" },
});

let table = null;

function the(app) {
  return (table ??= new Table(app, COLUMNS, { label: "Models on demand", sort: "name", open: (row) => open(app, row) }));
}

/** Go to the model, where it is registered: once it was loaded. */
function open(app, row) {
  const model = app.store.list("models").find((one) => one.name === row.name);
  if (model) app.go(address("models", model.id));
}

/** The models as a panel; null where none is loaded on demand. */
export function residentPanel(app) {
  const rows = app.store.list("residents");
  if (rows.length === 0) return null;
  const used = rows.reduce((sum, row) => sum + (row.taken_bytes ?? 0), 0);
  const budget = app.store.fleet?.budget_bytes ?? null;
  whole = Math.max(1, budget ?? used);
  return panel(
    "On demand",
    `${bytes(used)} in memory${budget === null ? "" : ` of ${bytes(budget)}`}`,
    the(app).draw(rows, app.store.now()),
  );
}

/** The same as text, with an empty line behind it; "" where there are none. */
export function residentsText(app) {
  const rows = app.store.list("residents");
  return rows.length === 0 ? "" : `${the(app).text(rows, app.store.now())}\n\n`;
}
