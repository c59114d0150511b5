// The prefix caches of the workers: how full they are as the router knows it, and which part of the prompts they had.

import { bar, sparkline } from "../charts.js";
import { h } from "../dom.js";
import { panel, workerLink } from "../parts.js";
import { Table } from "../table.js";
import { UNKNOWN, count, line, share } from "../text.js";

const known = (row) => (row.blocks_total && row.blocks_known !== null ? row.blocks_known / row.blocks_total : null);
const tiers = (row) =>
  Object.entries(row.tiers ?? {})
    .map(([tier, blocks]) => `${line(tier)} ${count(blocks)}`)
    .join(", ");

const COLUMNS = [
  { id: "id", label: "Worker", width: 130, text: (row) => line(row.id), cell: (row) => workerLink(row.id) },
  { id: "role", label: "Role", width: 62, text: (row) => line(row.role) },
  { id: "model", label: "Model", isWide: true, isLong: true, text: (row) => line(row.model) },
  {
    id: "known",
    label: "Blocks known",
    isNumber: true,
    isLong: true,
    width: 180,
    title: "blocks of it in the index of this router, of those on its device",
    text: (row) => `${count(row.blocks_known)}${row.blocks_total ? ` of ${count(row.blocks_total)}` : ""}`,
    sort: (row) => row.blocks_known,
    cell: (row) =>
      bar(known(row), `${count(row.blocks_known)}${row.blocks_total ? `/${count(row.blocks_total)}` : ""}`, {
        tone: "accent",
      }),
  },
  {
    id: "index",
    label: "Of the index",
    isNumber: true,
    width: 100,
    title: "its part of all blocks that the index knows",
    text: (row) => share(row.index_share),
    sort: (row) => row.index_share,
  },
  { id: "tiers", label: "Tiers", width: 120, text: (row) => tiers(row) || UNKNOWN },
  {
    id: "hits",
    label: "Hit rate",
    isNumber: true,
    width: 76,
    title: "of the prompt tokens of requests that ended within a minute, those that it had cached",
    text: (row) => share(row.hit_share),
    sort: (row) => row.hit_share,
  },
  {
    id: "rate",
    label: "Hit blocks/min",
    isNumber: true,
    width: 128,
    text: (row) => count(row.hit_blocks_per_minute),
    sort: (row) => row.hit_blocks_per_minute,
  },
  {
    id: "history",
    label: "Five minutes",
    width: 112,
    text: (row) => `at most ${count(Math.max(0, ...row.history))}`,
    cell: (row) =>
      sparkline(row.history, {
        label: `hit blocks per minute of ${line(row.id)}, the last five minutes`,
        width: 96,
        height: 22,
      }),
  },
  {
    id: "evicted",
    label: "Evicted/min",
    isNumber: true,
    width: 106,
    title: "blocks that it removed within a minute, by its KV events",
    text: (row) => count(row.evicted_blocks_per_minute),
    sort: (row) => row.evicted_blocks_per_minute,
  },
  {
    id: "gaps",
    label: "Gaps",
    isNumber: true,
    width: 60,
    title: "how often some of its KV events were missing, since this frontend follows them",
    text: (row) => count(row.gaps),
    sort: (row) => row.gaps,
  },
  {
    id: "resyncs",
    label: "Resyncs",
    isNumber: true,
    width: 80,
    title: "how often it had to send its whole state again, since this frontend follows its KV events",
    text: (row) => count(row.resyncs),
    sort: (row) => row.resyncs,
  },
  {
    id: "trust",
    label: "Known by",
    width: 84,
    title: "exact: every event was applied; degraded: some were lost; predicted: only by what was routed there",
    text: (row) => line(row.trust),
    tone: (row) => (row.trust && row.trust.includes("degraded") ? "warn" : ""),
  },
];

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
