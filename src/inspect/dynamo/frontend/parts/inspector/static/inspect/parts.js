// Parts that several views share: panels, pairs of names and values, states, links, the filter box, candidates of a routing.

import { h } from "./dom.js";
import { bar } from "./charts.js";
import { UNKNOWN, columnsText, count, figure, line, share } from "./text.js";

/** A titled box; `side` stands at the right of its title. */
export function panel(title, side, ...children) {
  return h(
    "section",
    { class: "panel", key: `panel ${title}` },
    h("header", null, h("h2", null, title), side ? h("div", { class: "side" }, side) : null),
    children,
  );
}

const LONG = 26; // characters of a value that gets a line of its own

/** Names and values side by side. A value is text or a description. */
export function pairs(entries) {
  return h(
    "dl",
    { class: "pairs" },
    entries.map(([name, value]) =>
      h(
        "div",
        { key: name, class: typeof value === "string" && value.length > LONG ? "long" : null },
        h("dt", null, name),
        h("dd", { class: value === UNKNOWN ? "unknown" : "" }, value),
      ),
    ),
  );
}

const TONES = {
  ready: "ok",
  loaded: "ok",
  loading: "warn",
  closing: "warn",
  unloading: "warn",
  ok: "ok",
  serving: "ok",
  starting: "warn",
  draining: "warn",
  leaving: "warn",
  stopping: "warn",
  quarantined: "bad",
  gone: "bad",
  failed: "bad",
  aborted: "bad",
  cancelled: "warn",
  shed: "warn",
  "client slow": "warn",
  queued: "warn",
  running: "ok",
  completed: "ok",
};

/** The tone of a state's word; the word is always beside the colour. */
export function toneOf(word) {
  return TONES[word] ?? "";
}

/** A state in words, with a mark whose shape differs by tone. */
export function state(word) {
  const tone = toneOf(word);
  return h(
    "span",
    { class: `state ${tone}` },
    h("span", { class: "mark", "aria-hidden": "true" }, { ok: "●", warn: "◐", bad: "■" }[tone] ?? "○"),
    line(word),
  );
}

/** A link within the page. */
export function link(hash, text, props = {}) {
  return h("a", { href: hash, ...props }, text);
}

/** The address of an entry of a view. */
export function address(view, id = null, query = {}) {
  const asked = Object.entries(query)
    .filter(([, value]) => value)
    .map(([name, value]) => `${name}=${encodeURIComponent(value)}`);
  return `#/${view}${id === null ? "" : `/${encodeURIComponent(id)}`}${asked.length ? `?${asked.join("&")}` : ""}`;
}

// The server names an API as its metrics do.
const PATHS = {
  chat_completions: "/v1/chat/completions",
  completions: "/v1/completions",
  embeddings: "/v1/embeddings",
  responses: "/v1/responses",
  messages: "/v1/messages",
};

/** The path of an API by the server's name for it. */
export function pathOf(endpoint) {
  return PATHS[endpoint] ?? (endpoint.startsWith("/") ? endpoint : `/v1/${endpoint}`);
}

/** The name of an API as a column has room for: "chat" for chat_completions. */
export function shortEndpoint(endpoint) {
  return line(endpoint)
    .replace(/^\/v1\//, "")
    .replace(/^chat[_/]completions$/, "chat");
}

export function workerLink(id) {
  return id === null || id === undefined ? UNKNOWN : link(address("workers", id), line(id), { class: "id" });
}

/** KV blocks in use as a share of one; null where either figure is not known. */
export function kvShare(worker) {
  const { kv_blocks_used: used, kv_blocks_total: total } = worker;
  return used === null || used === undefined || !total ? null : used / total;
}

export function kvBar(worker) {
  const part = kvShare(worker);
  return bar(part, share(part));
}

/** The filter box above a table; what is typed is kept in the address. */
export function filterBox(app, { value, problem, example, note }) {
  return h(
    "div",
    { class: "filter", key: "filter" },
    h(
      "label",
      null,
      h("span", { class: "unseen" }, "Filter"),
      h("input", {
        id: "filter",
        type: "search",
        value,
        placeholder: `/ filter, as ${example}`,
        spellcheck: "false",
        autocomplete: "off",
        "aria-invalid": problem ? "true" : null,
        "aria-describedby": "filter-note",
        oninput: (event) => app.ask({ filter: event.target.value }),
      }),
    ),
    h(
      "span",
      { id: "filter-note", class: problem ? "note bad" : "note", role: problem ? "alert" : null },
      problem ?? note,
    ),
  );
}

export const CANDIDATES = [
  {
    id: "worker",
    label: "worker",
    isWide: true,
    text: (row) => `${line(row.worker)}${row.rank ? ` rank ${row.rank}` : ""}`,
    cell: (row) => [workerLink(row.worker), row.rank ? ` rank ${row.rank}` : ""],
  },
  {
    id: "overlap",
    label: "overlap",
    title: "blocks of the prompt that it holds",
    isNumber: true,
    text: (row) => (row.overlap_blocks === null ? UNKNOWN : `${count(row.overlap_blocks)} blk`),
    sort: (row) => row.overlap_blocks,
  },
  {
    id: "prefill",
    label: "prefill",
    title: "prompt tokens that it would have to compute, with those before it",
    isNumber: true,
    text: (row) => count(row.prefill_tokens),
    sort: (row) => row.prefill_tokens,
  },
  {
    id: "decode",
    label: "decode",
    title: "blocks that its streams occupy",
    isNumber: true,
    text: (row) => figure(row.decode_blocks),
    sort: (row) => row.decode_blocks,
  },
  { id: "running", label: "running", isNumber: true, text: (row) => count(row.running), sort: (row) => row.running },
  {
    id: "cost",
    label: "cost",
    title: "the lowest wins",
    isNumber: true,
    text: (row) => figure(row.cost),
    sort: (row) => row.cost,
  },
  {
    id: "why",
    label: "",
    isWide: true,
    isLong: true,
    text: (row) => (row.is_chosen ? "chosen" : row.left_out ? `left out: ${line(row.left_out)}` : ""),
    cell: (row) =>
      row.is_chosen
        ? h("b", { class: "chosen" }, "◀ chosen")
        : row.left_out
          ? h("span", { class: "quiet" }, `left out: ${line(row.left_out)}`)
          : "",
  },
].map((column) => ({ width: 90, ...column }));

/** A routing decision with every candidate and its figures. */
export function decision(routing) {
  const more = (routing.candidates_in_all ?? 0) - routing.candidates.length;
  return h(
    "div",
    { class: "decision", key: routing.id },
    h(
      "p",
      null,
      h("b", null, routing.stage),
      ` ${line(routing.policy)}, ${count(Math.max(routing.candidates_in_all ?? 0, routing.candidates.length))} candidates; decided by: `,
      h("b", null, line(routing.decided_by)),
      routing.prompt_tokens !== null && routing.prompt_tokens !== undefined
        ? `; prompt ${count(routing.prompt_tokens)} tokens`
        : "",
      routing.block_size ? `, blocks of ${count(routing.block_size)}` : "",
    ),
    h(
      "div",
      { class: "table" },
      h(
        "table",
        { class: "small" },
        h(
          "colgroup",
          null,
          CANDIDATES.map((column) => h("col", { key: column.id, css: column.isWide ? {} : { width: "110px" } })),
        ),
        h(
          "thead",
          null,
          h(
            "tr",
            null,
            CANDIDATES.map((column) =>
              h(
                "th",
                { key: column.id, scope: "col", class: column.isNumber ? "number" : "", title: column.title },
                column.label,
              ),
            ),
          ),
        ),
        h(
          "tbody",
          null,
          routing.candidates.map((row) =>
            h(
              "tr",
              {
                key: `${row.worker}/${row.rank ?? 0}`,
                class: row.is_chosen ? "is-chosen" : row.left_out ? "is-out" : "",
              },
              CANDIDATES.map((column) =>
                h(
                  "td",
                  {
                    key: column.id,
                    class: `${column.isNumber ? "number " : ""}${column.isLong ? "long" : ""}`,
                    "data-label": column.label,
                  },
                  column.cell ? column.cell(row) : column.text(row),
                ),
              ),
            ),
          ),
        ),
      ),
    ),
    more > 0 ? h("p", { class: "quiet" }, `and ${count(more)} more candidates`) : null,
  );
}

export function decisionText(routing) {
  const rows = [
    CANDIDATES.map((column) => column.label),
    ...routing.candidates.map((row) => CANDIDATES.map((column) => column.text(row))),
  ];
  return `${routing.stage}: ${line(routing.policy)}, decided by ${line(routing.decided_by)}\n${columnsText(
    rows,
    CANDIDATES.map((column) => column.isNumber),
  )}`;
}

/** What stands where a fetched value is not there yet, or not to be had; null where it is there. */
export function waiting(resource, what) {
  if (resource.value !== null) return null;
  const { error } = resource;
  if (error === null) return h("p", { class: "quiet", role: "status" }, `Reading ${what} …`);
  if (isMissing(error))
    return h("p", { class: "quiet", role: "status" }, `Not to be had here, ${what}: ${line(error.message)}`);
  return h("p", { class: "note bad", role: "alert" }, `${what}: ${line(error.message)}`);
}

/** Whether the server does not have what was asked for, or no such route: not a failure. */
export function isMissing(error) {
  return error.status === 404 || error.status === 501;
}

/** A file for the viewer to keep. */
export function download(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const anchor = document.createElement("a");
  anchor.setAttribute("href", url);
  anchor.setAttribute("download", name.replaceAll(/[^\w.-]+/g, "_"));
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
